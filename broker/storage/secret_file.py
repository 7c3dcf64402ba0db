"""The file `run.secret`: 32 random bytes that only the run's brokers may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    open_file,
    read_into,
)
from narrows.broker.syncer import SECRET_BYTES
from narrows.proto.errors import ErrorCode

SECRET_FILE: Final = "run.secret"
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_secret(directory_fd: int, path: Path) -> bytes | None:
    """The secret in the state directory `path`, None if there is none.

    Raises StateError RUN_SECRET if others can read it, or if it is not whole.
    """
    file, secret = path / SECRET_FILE, bytearray(SECRET_BYTES)
    anew = f"`narrows broker --new-run-secret --state-dir {path}` makes a new one"
    try:
        with open_file(directory_fd, SECRET_FILE) as (fd, size_bytes):
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if size_bytes != SECRET_BYTES:
                raise Damaged(f"{size_bytes} bytes")
            read_into(fd, SECRET_FILE, memoryview(secret))
    except FileNotFoundError:
        return None
    except Damaged as problem:
        raise StateError(
            ErrorCode.RUN_SECRET, f"{file} cannot be read",
            expected=f"{SECRET_BYTES} bytes", got=str(problem),
            remedy=f"restore it from a backup; without one, {anew}",
        ) from problem  # fmt: skip
    if mode & _OTHERS:
        raise StateError(
            ErrorCode.RUN_SECRET, f"{file}: others can read it",
            expected="mode 0600", got=f"mode {mode:04o}",
            remedy=f"chmod 600 {file}; if somebody may have read it, {anew}",
        )  # fmt: skip
    return bytes(secret)


def new_secret() -> bytes:
    """Another secret; the state directory writes it."""
    return secrets.token_bytes(SECRET_BYTES)


def find_secret(directory_fd: int, path: Path, *, is_required: bool) -> bytes | None:
    """The secret in the state directory `path`, None if there is none and none is required.

    Raises StateError RUN_SECRET.
    """
    secret = read_secret(directory_fd, path)
    if secret is None and is_required:
        raise StateError(
            ErrorCode.RUN_SECRET, f"{path / SECRET_FILE} is missing",
            remedy="restore it from a backup of the state directory; without one,"
            f" `narrows broker --new-run-secret --state-dir {path}` makes a new one",
        )  # fmt: skip
    return secret
