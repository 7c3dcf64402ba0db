"""The events file of either process: JSON lines for monitors.

Nothing here is for recovery: a line that cannot be written is missing, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

EVENTS_BYTES_MAX: Final = 64 << 20
"""Bytes of an events file, some 250,000 lines; it and the one before it take twice as much."""

_log = logging.getLogger("narrows")


class EventFile:
    """JSON lines. Before it exceeds EVENTS_BYTES_MAX it becomes NAME.1, in place of the last."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if `path` cannot be opened."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._failed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Appends the record with the system's time, `time_s`."""
        line = json.dumps({"time_s": time.time(), **record}, default=str).encode() + b"\n"
        try:
            if self._file.closed:
                self._file = self._path.open("ab", buffering=0)
            if 0 < self._file.tell() and self._file.tell() + len(line) > EVENTS_BYTES_MAX:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
            # A line that a full disk had cut is ended, so that the next one can be read.
            self._file.write(b"\n" + line if self._failed else line)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.warning("events are not written to %s: %s; the run goes on", self._path, error)
            self._failed = True

    def close(self) -> None:
        """A later `write` opens the file again."""
        self._file.close()
