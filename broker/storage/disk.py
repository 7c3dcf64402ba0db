"""What the journal asks of a disk: few primitives on plain names below one directory.

They are a protocol so that tests can put a disk in their place that fails and forgets.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from narrows.broker.storage.durable_files import open_file, read_into

WRITEV_PARTS_MAX: Final = 1024
"""IOV_MAX of Linux."""

_NO_PREALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Files(Protocol):
    """Files in one directory. Everything raises OSError."""

    def names(self) -> list[str]:
        """Names of everything in the directory."""
        ...

    def size_bytes(self, name: str) -> int:
        """Size of a file. Raises Damaged if it is not a regular one."""
        ...

    def read(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset` on. Raises Damaged if the file ends too early."""
        ...

    def create(self, name: str, size_bytes: int) -> int:
        """A handle to write a new file from its start; the room for `size_bytes` zeros is taken."""
        ...

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        """Writes all parts behind what was written before."""
        ...

    def sync(self, handle: int) -> None:
        """What was written is durable when this returns. Never again after it has failed once."""
        ...

    def close(self, handle: int) -> None:
        """The handle is gone even if this fails."""
        ...

    def unlink(self, name: str) -> None:
        """Removes a name."""
        ...

    def sync_directory(self) -> None:
        """Names that were made and removed are durably so when this returns."""
        ...


class DirectoryFiles:
    """The files below an open directory, whose descriptor the caller closes at the end."""

    def __init__(self, directory_fd: int) -> None:
        self._fd = directory_fd

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def size_bytes(self, name: str) -> int:
        with open_file(self._fd, name) as (_, size_bytes):
            return size_bytes

    def read(self, name: str, offset: int, target: memoryview) -> None:
        with open_file(self._fd, name) as (fd, _):
            os.lseek(fd, offset, os.SEEK_SET)
            read_into(fd, name, target)

    def create(self, name: str, size_bytes: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            _preallocate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            # On a full disk this is what gives the part back that could be had.
            with suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            raise
        return fd

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        views = [memoryview(part) for part in parts]
        index = 0
        while index < len(views):
            count = os.writev(handle, views[index : index + WRITEV_PARTS_MAX])
            while index < len(views) and count >= len(views[index]):
                count -= len(views[index])
                index += 1
            if count:
                views[index] = views[index][count:]

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync_directory(self) -> None:
        os.fsync(self._fd)


def _preallocate(fd: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise
