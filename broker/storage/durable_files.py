"""The system calls behind checkpoints: files that are durable, whole and in their place.

Every file is opened below a directory that is open already, by a plain name, and never through a
symbolic link. So nobody can lead the broker to another file by renaming folders above it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from narrows.proto.errors import ErrorCode, NarrowsError

CALL_BYTES_MAX: Final = 1 << 30
"""Bytes per call. Linux takes less than 2 GiB at once."""


class StateError(NarrowsError):
    """The state directory cannot be used: STATE_LOCKED or STATE_DAMAGED."""


class RecordsLost(StateError):
    """Records of the journal are needed that are gone or do not verify."""


class Damaged(Exception):
    """One file or generation differs from what was written; the text says which and how."""


def write_file(directory_fd: int, name: str, blocks: Iterable[bytes | memoryview]) -> None:
    """Writes a new file. Its content is durable, its name only after an fsync of the directory."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory_fd)
    try:
        for block in blocks:
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(fd, rest[:CALL_BYTES_MAX]) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def open_file(directory_fd: int, name: str) -> Generator[tuple[int, int]]:
    """A regular file's descriptor and size in bytes. Raises FileNotFoundError, Damaged."""
    # Without O_NONBLOCK a pipe in the place of the file would stop the broker without end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"{name}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{name}: not a regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)


def read_into(fd: int, name: str, target: memoryview) -> None:
    """Fills `target` from the file; `name` is for the message. Raises Damaged."""
    while target:
        try:
            count = os.readv(fd, [target[:CALL_BYTES_MAX]])
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error
        if count == 0:
            raise Damaged(f"{name}: ends too early")
        target = target[count:]


@contextmanager
def directory(parent_fd: int | None, name: str) -> Generator[int]:
    """A directory's descriptor; below a parent not through a link. Raises OSError."""
    follow = 0 if parent_fd is None else os.O_NOFOLLOW
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Makes `path` and the missing folders above it, with durable names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        with directory(None, str(each.parent)) as fd:
            os.fsync(fd)


def lock(path: Path, directory_fd: int) -> int:
    """The descriptor that holds the lock until it is closed. Raises StateError STATE_LOCKED.

    The kernel gives the lock back when the process ends, however it ends. A file with a process
    number would have to be judged after a crash.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open("lock", flags, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
    except BlockingIOError as error:
        holder = os.read(fd, 32).decode("ascii", "replace") or "unknown"
        os.close(fd)
        raise StateError(
            ErrorCode.STATE_LOCKED, f"{path}: another broker uses this directory",
            got=f"process {holder}", remedy="stop that broker, or choose another state_dir",
        ) from error  # fmt: skip
    except BaseException:
        os.close(fd)
        raise
    return fd
