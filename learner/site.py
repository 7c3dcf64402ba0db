"""Where a learner joins and as whom: arguments, then the environment, then the key file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from narrows.proto.config import Address, parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.keys import SiteKey, check_name, check_trust, read_site_key
from narrows.proto.wire import speaks_for

WORKERS_MAX: Final = 8
"""Most threads that code unless a user asks for more."""


@dataclass(frozen=True)
class JoinTarget:
    """All that a learner needs to find its broker and to be known there."""

    broker: str
    """Control address of the broker, tcp://HOST:PORT."""
    name: str
    key: SiteKey | None = None
    key_file: Path | None = None
    relay: Address | None = None
    """Address of the site's relay, from which publications come instead of from the broker."""
    workers: int = 1
    """Threads that code in the background."""


def join_target(
    broker: str | None,
    name: str | None,
    key: str | os.PathLike[str] | None,
    workers: int | None = None,
) -> JoinTarget:
    """`NARROWS_BROKER`, `NARROWS_NAME`, `NARROWS_KEY` and `NARROWS_WORKERS` stand in for what is
    not given; a key file has a name and may have a broker; `NARROWS_RELAY` names the relay of a
    site that has one.

    Raises ConfigError for a file, an address, a name or a number that cannot be used, or if
    something is missing.
    """
    file = key or os.environ.get("NARROWS_KEY")
    path = Path(file) if file else None
    site = read_site_key(path) if path else None
    broker = broker or os.environ.get("NARROWS_BROKER")
    name = name or os.environ.get("NARROWS_NAME")
    if site:
        broker = broker or site.broker
        name = name or site.name
    if not broker or not name:
        raise ConfigError(
            f"the learner's {'name' if broker else 'broker'} is missing",
            expected="broker and name, or a key file that has both",
            remedy="give both: --broker and --name, in Python broker= and name=, NARROWS_BROKER and"
            " NARROWS_NAME; or a key that has both",
        )
    parse_address(broker)
    check_name(name, "the learner's name")
    if site and not speaks_for(site.name, name):
        raise ConfigError(
            f"the key in {path} is of another name",
            expected=f"{site.name}, or {site.name}/PART",
            got=name,
            remedy=f"the site {name} needs a key of its own: narrows keys new FILE --name {name}",
        )
    if site and path:
        check_trust(site, path)
    via = os.environ.get("NARROWS_RELAY")
    relay = parse_address(via) if via else None
    return JoinTarget(broker, name, site, path, relay, _workers(workers))


def _workers(given: int | None) -> int:
    """By default a quarter of the cores that this process may use: the others train."""
    text = os.environ.get("NARROWS_WORKERS") if given is None else str(given)
    if not text:
        return min(max(1, len(os.sched_getaffinity(0)) // 4), WORKERS_MAX)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "the number of the learner's workers",
            expected="a whole number of threads, at least 1",
            got=text,
            remedy="leave out workers= and NARROWS_WORKERS: it then takes a quarter of the cores",
        )
    return int(text)
