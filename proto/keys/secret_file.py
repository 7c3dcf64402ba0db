"""Files with secrets: made for their owner alone, and refused when others may read them."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from narrows.proto.errors import ConfigError

FILE_BYTES_MAX: Final = 16 << 20
"""Largest file that is read: a ring of 50,000 keys."""

TomlValue: TypeAlias = str | int | float | Sequence[str]
"""A value of a table that is written here."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def write_secret(path: Path, text: str) -> None:
    """Writes a new file that its owner alone may read. Raises ConfigError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists",
            expected="a new file: a key is never overwritten",
            remedy="choose another name, or move the old file away",
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(path.parent)


def replace_secret(path: Path, text: str) -> None:
    """Puts a new file, readable by its owner alone, in the place of `path`, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    write_secret(temporary, text)
    temporary.rename(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_secret(path: Path) -> dict[str, object]:
    """The TOML table in a file with a secret. Raises ConfigError if others may read the file."""
    return read_toml(path, is_secret=True)


def read_toml(path: Path, *, is_secret: bool = False) -> dict[str, object]:
    """The TOML table in `path`. Raises ConfigError; it names the file and shows no content."""
    try:
        data = _content(path, is_secret=is_secret)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        # The text of the parser's error may quote the line, which may hold a secret.
        raise ConfigError(f"{path} is no TOML file that `narrows keys` wrote") from error


def _content(path: Path, *, is_secret: bool) -> bytes:
    # Without O_NONBLOCK a pipe in the place of the file would hang its reader.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES_MAX:
            raise ConfigError(
                f"{path} is no key file", expected=f"a file of at most {FILE_BYTES_MAX} bytes"
            )
        if is_secret and status.st_mode & _OTHERS:
            raise ConfigError(
                f"{path} holds a secret key, and others may read it",
                expected="mode 0600",
                got=f"mode {stat.S_IMODE(status.st_mode):04o}",
                remedy=f"`chmod 600 {path}`; if others may have read it, make a new key",
            )
        return file.read(FILE_BYTES_MAX)


def toml_lines(values: Mapping[str, TomlValue]) -> list[str]:
    """TOML lines for texts, numbers and lists of texts. The texts need no escapes."""
    return [f"{key} = {_written(value)}" for key, value in values.items()]


def _written(value: TomlValue) -> str:
    if isinstance(value, str):
        assert value.isprintable() and not set(value) & {'"', "\\"}, "it needs escapes"
        return f'"{value}"'
    if isinstance(value, Sequence):
        return "[" + ", ".join(_written(each) for each in value) + "]"
    assert not isinstance(value, bool)
    return repr(value)
