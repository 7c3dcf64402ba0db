"""A bounded file of JSON lines. A disk that cannot take a line stops neither shell."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

BYTES_MAX = 64 << 20
"""Largest size of one file, some 250,000 lines. It and its predecessor take twice as much."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class EventFile:
    """Lines for benches and monitors, never for recovery: a line that cannot be written is missing.

    Before the file grows beyond `bytes_max` it becomes NAME.1, in the place of the one before it.
    A pipe or a terminal has no bound. One thread uses it.
    """

    def __init__(self, path: Path, log: logging.Logger, *, bytes_max: int = BYTES_MAX) -> None:
        """Raises OSError if `path` cannot be opened, unless that is for a full disk."""
        self._path, self._log, self._bytes_max = path, log, bytes_max
        self._file: FileIO | None = None
        self._size_bytes = 0
        self._is_regular = True
        self._is_torn = False
        """True if the file ends within a line."""
        self._missing = 0
        """Lines since the last one that was written."""
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL:
                raise

    def write(self, record: Mapping[str, object]) -> None:
        """Appends a line: the system's time in seconds as `time_s`, and the record."""
        try:
            self._append(json.dumps({"time_s": time.time(), **record}).encode() + b"\n")
        except OSError as error:
            self._missing += 1
            if self._missing == 1:
                text = "events are not written to %s: %s. All else goes on; what comes is missing"
                self._log.warning(text, self._path, error.strerror or error)
            return
        if self._missing:
            missing, self._missing = self._missing, 0
            self._log.info("events are written to %s again; %d are missing", self._path, missing)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        status = os.fstat(self._file.fileno())
        self._is_regular, self._size_bytes = stat.S_ISREG(status.st_mode), status.st_size

    def _append(self, line: bytes) -> None:
        if self._is_regular and 0 < self._size_bytes and self._bytes_max < self._after(line):
            self.close()
            self._file = None
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            # Also for the case that the new file cannot be opened now: there is none to rotate.
            self._is_torn, self._size_bytes = False, 0
        if self._file is None:
            self._open()
        assert self._file is not None
        data = b"\n" + line if self._is_torn else line
        written = self._file.write(data) or 0
        self._size_bytes += written
        if written:
            self._is_torn = data[written - 1 : written] != b"\n"
        if written < len(data):
            # A disk that is nearly full takes a part of a line without an error.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _after(self, line: bytes) -> int:
        return self._size_bytes + self._is_torn + len(line)
