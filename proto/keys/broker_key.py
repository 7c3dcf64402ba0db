"""A broker's own key: the pair that it serves with, and the one that comes next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from narrows.proto.errors import ConfigError
from narrows.proto.keys.pair import KeyPair, new_pair, pair_of_secret
from narrows.proto.keys.secret_file import (
    TomlValue,
    read_secret,
    replace_secret,
    toml_lines,
    write_secret,
)

FORMAT = 1


@dataclass(frozen=True)
class BrokerKey:
    """The pair in use, and a successor that sites may trust already."""

    current: KeyPair
    next: KeyPair | None = None


class _BrokerFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    secret: str
    next_secret: str = ""


def broker_key_path(directory: Path) -> Path:
    """The broker's secret in its directory of keys."""
    return directory / "broker.key"


def new_broker_key(directory: Path) -> BrokerKey:
    """Makes the directory and a fresh key in it. Raises ConfigError if there is one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = BrokerKey(new_pair())
    write_secret(broker_key_path(directory), _text(key))
    return key


def write_broker_key(directory: Path, key: BrokerKey) -> None:
    """Puts `key` in the place of the broker's key."""
    replace_secret(broker_key_path(directory), _text(key))


def read_broker_key(directory: Path) -> BrokerKey:
    """The broker's key. Raises ConfigError, naming the command that makes one."""
    path = broker_key_path(directory)
    if not path.exists():
        raise ConfigError(
            f"{directory} has no broker.key",
            expected="a directory of keys",
            remedy=f"`narrows keys new --keys {directory}` makes one",
        )
    try:
        file = msgspec.convert(read_secret(path), _BrokerFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is no broker's key") from error
    if file.format != FORMAT:
        raise ConfigError(
            f"{path}: unknown format", expected=f"format = {FORMAT}", got=str(file.format)
        )
    successor = pair_of_secret(file.next_secret, str(path)) if file.next_secret else None
    return BrokerKey(pair_of_secret(file.secret, str(path)), successor)


def _text(key: BrokerKey) -> str:
    values: dict[str, TomlValue] = {"format": FORMAT, "secret": key.current.secret}
    if key.next is not None:
        values["next_secret"] = key.next.secret
    return "\n".join(["# The secret of a broker. Copy it to nobody.", *toml_lines(values), ""])
