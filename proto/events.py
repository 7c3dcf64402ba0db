"""The events file of either process: JSON lines for monitors; and the last inputs of its machine.

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
from tempfile import mkdtemp
from typing import Final

from narrows.proto.flow import Quota
from narrows.proto.recorder import Recorder

EVENTS_BYTES_MAX: Final = 64 << 20
"""Bytes of an events file, some 250,000 lines; it and the one before it take twice as much."""

LINES_AT_ONCE: Final = 2048
"""Lines of one kind that the file takes at once: 1,024 learners leave, and join."""

LINES_PER_S: Final = 20
"""Lines of one kind that the file takes in each second from then on. A peer that floods must not
overwrite its own traces: the longest lines, 11 kB, need ten minutes to fill both files."""

_log = logging.getLogger("narrows")


class EventFile(RotatingFileHandler):
    """JSON lines. Before it exceeds EVENTS_BYTES_MAX it becomes NAME.1, in place of the last."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if `path` cannot be opened."""
        super().__init__(path, maxBytes=EVENTS_BYTES_MAX, backupCount=1, encoding="utf-8")
        self._told = False
        self._quotas: dict[str, Quota] = {}

    def write(self, record: Mapping[str, object], *, kind: str = "") -> None:
        """Appends the record with the system's time, `time_s`, also after `close`.

        A record that a peer causes has a `kind`: above its quota it is left out, and the next line
        of that kind tells how many were.
        """
        fields = {"time_s": time.time(), **record}
        if kind:
            now = time.monotonic()
            quota = self._quotas.setdefault(kind, Quota(now))
            if not quota.takes(LINES_AT_ONCE, LINES_PER_S, now):
                return
            if quota.left_out:
                fields["left_out"] = quota.left_out
                quota.left_out = 0
        line = json.dumps(fields, default=str)
        self.handle(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by `handle` where it fails."""
        if not self._told:
            _log.warning(
                "events are not written to %s: %s; the run goes on",
                self.baseFilename,
                sys.exc_info()[1],
            )
        self._told = True

    def close(self) -> None:
        with suppress(OSError):  # A full disk: the last lines are lost.
            super().close()


def write_inputs(recorder: Recorder, folder: Path | None, name: str) -> None:
    """Writes the last inputs of a machine into a folder, else into a new one for temporary files.
    Safe from signal handlers, and an error is one line of the log."""
    try:
        file = (folder or Path(mkdtemp(prefix="narrows-"))) / name
        file.touch(mode=0o600)
        file.write_bytes(recorder.text())
    except OSError as error:
        _log.warning("the last inputs cannot be written: %s", error)
    else:
        _log.warning("the last inputs are in %s: `narrows debug replay` plays them", file)
