"""A site's key file: all that a learner needs to join but the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from narrows.proto.address import parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.keys.pair import KeyPair, check_public_key, pair_of_secret
from narrows.proto.keys.secret_file import (
    TomlValue,
    read_secret,
    replace_secret,
    toml_lines,
    write_secret,
)

FORMAT = 1
SERVERS_MAX = 8
"""Keys of brokers that a site trusts: the one in use, its successor, those of standbys."""


ENVIRONMENT: Final = "NARROWS_KEY"
"""Names the key file of a process to which none is given."""


def key_path(given: str | os.PathLike[str] | None = None) -> Path | None:
    """The site's key file: the given one, else that of the environment; None: there is no key."""
    named = given or os.environ.get(ENVIRONMENT)
    return Path(named) if named else None


@dataclass(frozen=True)
class SiteKey:
    """A key pair, its holder's name, and the broker for which it is."""

    name: str
    pair: KeyPair
    broker: str
    """Address of the broker, tcp://HOST:PORT."""
    servers: tuple[str, ...]
    """Public keys of the broker that are trusted, tried in turn."""


class _SiteFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    broker: str
    servers: list[str]
    secret: str


def write_site_key(path: Path, key: SiteKey, *, replace: bool = False) -> None:
    """Writes a site's key for its owner alone. Raises ConfigError if the file exists."""
    (replace_secret if replace else write_secret)(path, _text(key))


def read_site_key(path: Path) -> SiteKey:
    """Reads a site's key. Raises ConfigError for a file that others may read, or is none."""
    try:
        file = msgspec.convert(read_secret(path), _SiteFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} is no site's key",
            remedy="`narrows keys accept INVITATION --to FILE` makes one",
        ) from error
    if file.format != FORMAT:
        raise ConfigError(
            f"{path}: unknown format", expected=f"format = {FORMAT}", got=str(file.format)
        )
    if not 1 <= len(file.servers) <= SERVERS_MAX:
        raise ConfigError(
            f"{path}: servers", expected=f"1 to {SERVERS_MAX} keys", got=str(len(file.servers))
        )
    servers = tuple(check_public_key(text, f"{path}: servers") for text in file.servers)
    parse_address(file.broker, f"{path}: broker")
    return SiteKey(file.name, pair_of_secret(file.secret, str(path)), file.broker, servers)


def _text(key: SiteKey) -> str:
    values: dict[str, TomlValue] = {
        "format": FORMAT,
        "name": key.name,
        "broker": key.broker,
        "servers": list(key.servers),
        "secret": key.pair.secret,
    }
    return "\n".join(["# The secret of a site. Copy it to nobody.", *toml_lines(values), ""])
