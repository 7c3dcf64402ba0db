"""The events file of either process: JSON lines for monitors.

Nothing here is for recovery: a line that cannot be written is missing, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

EVENTS_BYTES_MAX: Final = 64 << 20
"""Bytes of an events file, some 250,000 lines; it and the one before it take twice as much."""

_log = logging.getLogger("narrows")


class EventFile(RotatingFileHandler):
    """JSON lines. Before it exceeds EVENTS_BYTES_MAX it becomes NAME.1, in place of the last."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if `path` cannot be opened."""
        super().__init__(path, maxBytes=EVENTS_BYTES_MAX, backupCount=1, encoding="utf-8")
        self._told = False

    def write(self, record: Mapping[str, object]) -> None:
        """Appends the record with the system's time, `time_s`; after `close` it opens it again."""
        line = json.dumps({"time_s": time.time(), **record}, default=str)
        self.handle(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by `handle` where it fails."""
        if not self._told:
            place, error = self.baseFilename, sys.exc_info()[1]
            _log.warning("events are not written to %s: %s; the run goes on", place, error)
        self._told = True

    def close(self) -> None:
        with suppress(OSError):  # What a full disk did not take is lost.
            super().close()
