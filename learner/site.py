"""Where a learner joins, and as whom: from arguments, or from the key file of its site."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from narrows.proto.errors import ConfigError
from narrows.proto.keys import SiteKey, key_path, read_site_key


@dataclass(frozen=True)
class JoinTarget:
    """All that a learner needs to find its broker and to be known there."""

    broker: str
    """Control address of the broker, tcp://HOST:PORT."""
    name: str
    key: SiteKey | None = None
    key_file: Path | None = None


def site_of(
    broker: str | None, name: str | None, key: str | os.PathLike[str] | None = None
) -> JoinTarget:
    """The key file gives what is not given: the file that `key`, or NARROWS_KEY, names.

    Raises ConfigError for another name than the key's, for a file that cannot be used, or if
    something is missing.
    """
    path = key_path(key)
    if path is None:
        return _without_key(broker, name)
    found = read_site_key(path)
    if name is not None and name != found.name:
        raise ConfigError(
            f"the key in {path} is of another name",
            expected=f"the name {found.name}, or none",
            got=name,
            remedy=f"a name needs a key of its own: the broker's operator types "
            f"`narrows keys invite {name} --address {found.broker}`",
        )
    return JoinTarget(broker or found.broker, found.name, found, path)


def _without_key(broker: str | None, name: str | None) -> JoinTarget:
    if broker is None or name is None:
        raise ConfigError(
            f"the learner's {'broker' if broker is None else 'name'} is missing",
            expected="broker and name, or a key file that has both",
            remedy="give both, or a key (key=, --key, NARROWS_KEY)",
        )
    return JoinTarget(broker, name)
