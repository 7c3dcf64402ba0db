"""The journal's view of a disk: few primitives on plain names below one directory.

They are a protocol, so that tests can replace the disk by one that fails and forgets what was not
synced. A real disk does that too rarely.
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
        """A handle to write a new file from its start. Room for `size_bytes` zeros is reserved."""
        ...

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        """Writes all parts behind those of earlier calls."""
        ...

    def sync(self, handle: int) -> None:
        """Everything written is durable when this returns.

        After a failure it is never called again for this handle: Linux reports an error of
        writeback once, and a second fsync would succeed without the data.
        """
        ...

    def close(self, handle: int) -> None:
        """Gives the handle back, even if this fails."""
        ...

    def unlink(self, name: str) -> None:
        """Removes a name."""
        ...

    def sync_directory(self) -> None:
        """Names that were made or removed stay so after a power cut when this returns."""
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
            # On a full disk this gives back the room that was reserved before it ran out.
            with suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            raise
        return fd

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        views = [memoryview(part) for part in parts]
        index = 0
        # The kernel may take less than it was given: the rest goes into the next call.
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
    """Reserves room, so that a full disk shows here and not in the middle of a record.

    A file system that cannot do it is no error: then a write fails later, and that is handled too.
    """
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise
