"""Payload bytes of contributions, as they travelled, in append-only files of 256 MiB.

Payloads are megabytes and facts are bytes, so they are kept apart: a payload is written once, and
a pack is removed whole when no start needs it any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from narrows.proto.errors import ErrorCode, StateError

PACK_BYTES: Final = 256 << 20
"""A pack is closed once it has as many bytes."""

REMEDY: Final = (
    "Put a backup of the directory in its place, or find out with `narrows journal audit` what is "
    "whole and go on from there with `narrows journal rollback`, which makes a new directory"
)


class DiskFull(OSError):
    """The disk did not take the bytes. Nothing has changed; try again later."""


def damaged(file: Path, *, expected: str, got: str) -> StateError:
    """The error for a file of a state directory that is not as it was written."""
    return StateError(
        ErrorCode.STATE_DAMAGED, f"{file} is damaged", expected=expected, got=got, remedy=REMEDY
    )


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; before that, a new file may be gone after a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Place(NamedTuple):
    """Where the chunks of a contribution lie, one after another."""

    pack: int
    offset: int
    sizes: tuple[int, ...]
    """Bytes of each chunk."""


class Packs:
    """The packs of one state directory: `packs/00000012.pack`.

    What a process finds at its start is never appended to, and neither is a pack that failed once:
    after a failed fsync its end may be in the page cache only, and the next fsync would succeed
    without it.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder
        self._durable = durable
        self._fd, self._number = -1, 0
        self._begin, self._end = 0, 0
        """Where that begins and ends which was appended last."""

    def append(self, payloads: Sequence[Sequence[bytes]]) -> list[Place]:
        """Writes the chunks of each payload; they are durable when it returns. Raises DiskFull."""
        places: list[Place] = []
        try:
            if self._fd < 0 or self._end >= PACK_BYTES:
                self._open_next()
            self._begin = self._end
            for chunks in payloads:
                places.append(Place(self._number, self._end, tuple(map(len, chunks))))
                for chunk in chunks:
                    self._end += len(chunk)
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(self._fd, view) :]
            if self._durable:
                os.fdatasync(self._fd)
        except OSError as error:
            self.take_back()
            raise DiskFull(error.errno, f"{self.folder}: {error.strerror}") from error
        return places

    def take_back(self) -> None:
        """Frees what was appended last, since it may be what fills the disk: it is not durable, or
        its row is not. It comes again, in another pack."""
        with suppress(OSError):
            if self._fd >= 0 and self._begin:
                os.ftruncate(self._fd, self._begin)
            elif self._fd >= 0:
                self.path(self._number).unlink()
        with suppress(OSError):
            self.close()

    def read(self, place: Place) -> tuple[bytes, ...]:
        """The chunks at a place, as far as the pack goes. Raises StateError if it is missing."""
        path = self.path(place.pack)
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                return tuple(file.read(size) for size in place.sizes)
        except OSError as error:
            raise damaged(path, expected="a pack", got=str(error)) from error

    def remove_except(self, needed: set[int]) -> None:
        """Removes every pack but those and the one that is being written."""
        for path in self.folder.glob("*.pack"):
            if int(path.stem) not in needed and int(path.stem) != self._number:
                path.unlink(missing_ok=True)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.pack"

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_next(self) -> None:
        self.close()
        found = (int(path.stem) for path in self.folder.glob("*.pack"))
        self._number = max(found, default=self._number) + 1
        self._begin = self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = os.open(self.path(self._number), flags, 0o600)
        if self._durable:
            sync_folder(self.folder)
