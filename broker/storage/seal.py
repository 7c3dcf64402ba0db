"""The seal key, and the keyed BLAKE2b digests that nobody without the key can make.

xxh3 finds what a disk damages. Whoever alters a file can compute xxh3 again, but not a seal: the
key lies outside the state directory. Each use of the key has a name of its own, so that no seal of
one kind can stand for one of another kind.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from narrows.broker.storage.durable_files import StateError
from narrows.proto.errors import ConfigError, ErrorCode

SEAL_BYTES: Final = 32
MARK_BYTES: Final = 16
NO_SEAL: Final = bytes(SEAL_BYTES)
"""The state of a chain before its first record."""

_KEY: Final = re.compile(r"[0-9a-f]{64}")
_KEY_FILE_BYTES_MAX: Final = 1024
_REMEDY: Final = "make one with `narrows journal new-seal-key FILE`, outside the state directory"


@dataclass(frozen=True)
class SealKey:
    """The key of all seals of a run. Its text shows nothing of it."""

    _key: bytes = field(repr=False)

    def seal(
        self,
        kind: Literal["record", "mark", "segment", "file", "seals", "name"],
        parts: Iterable[bytes | bytearray | memoryview],
        size_bytes: int = SEAL_BYTES,
    ) -> bytes:
        """The seal of these parts in a row, as one kind of content."""
        person = f"narrows {kind}".encode()
        hasher = hashlib.blake2b(key=self._key, digest_size=size_bytes, person=person)
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    @property
    def name(self) -> str:
        """A name by which two keys are told apart; it tells nothing of the key."""
        return self.seal("name", [], 8).hex()

    def record(self, before: bytes, number: int, body: Iterable[bytes | memoryview]) -> bytes:
        """The seal of a record: it covers the seal of the record before.

        It does not depend on the segment, because a record may be written a second time.
        """
        # One after the other: pieces of a file may lie in one buffer.
        return self.seal("record", chain([before, number.to_bytes(8, "little")], body))

    def mark(self, segment_seal: bytes, header: bytes) -> bytes:
        """The mark of a record's header in one segment."""
        return self.seal("mark", [segment_seal, header], MARK_BYTES)


def new_seal_key(path: Path) -> SealKey:
    """Writes a new key to a new file that only its owner may read. Raises ConfigError."""
    key = secrets.token_bytes(SEAL_BYTES)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: no key file can be made", expected="a new file", got=error.strerror or "",
            remedy="choose another name; a key that is lost cannot be made again",
        ) from error  # fmt: skip
    try:
        os.write(fd, f"{key.hex()}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    return SealKey(key)


def read_seal_key(path: Path, state_dir: Path) -> SealKey:
    """The key in a file. Raises ConfigError if others may read it, or if it lies in `state_dir`."""
    if path.resolve().is_relative_to(state_dir.resolve()):
        raise ConfigError(
            f"{path}: the seal key lies in the state directory", expected="another place",
            got="a place where whoever alters the state finds the key",
            remedy="move it, and set security.seal_key",
        )  # fmt: skip
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{path}: the seal key cannot be read", got=error.strerror or "", remedy=_REMEDY
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: others may read the seal key", expected="mode 0600", got=f"{mode:04o}",
            remedy=f"chmod 600 {path}; make a new key if somebody may have read it",
        )  # fmt: skip
    text = content.decode("ascii", "replace").strip()
    if not _KEY.fullmatch(text):
        raise ConfigError(
            f"{path}: no seal key", expected="64 hexadecimal digits", got=f"{len(content)} bytes",
            remedy=_REMEDY,
        )  # fmt: skip
    return SealKey(bytes.fromhex(text))


def altered(place: str, what: str, *, expected: str = "", got: str = "") -> StateError:
    """The error for content whose digests may be right and whose seal is not."""
    return StateError(
        ErrorCode.STATE_DAMAGED, f"{place}: {what}", expected=expected, got=got,
        remedy="somebody has altered it without the seal key, or the disk has damaged it: restore "
        "the state directory from a backup, and see docs/operation.md, \"The seal\"",
    )  # fmt: skip


def unequal(one: Sequence[str], other: Sequence[str]) -> str:
    """The first name that only one of two lists has; "": there is none."""
    return next(iter(sorted(set(one) ^ set(other))), "")
