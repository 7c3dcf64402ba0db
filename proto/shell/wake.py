"""A pipe that wakes the thread which owns the sockets: for both shells, not for what decides."""

from __future__ import annotations

import os
from contextlib import suppress

READ_BYTES = 4096
"""Of wakes that nobody has answered yet, so many are read at once; more come with the next look."""


class WakePipe:
    """`wake` may be called by any thread and by signal handlers; the rest by one thread."""

    def __init__(self) -> None:
        self.source, self._end = os.pipe()
        """`source` is readable once somebody has called: for a poller."""
        os.set_blocking(self.source, False)
        os.set_blocking(self._end, False)

    def wake(self) -> None:
        """Never waits. A full pipe says all that one byte more would say, and its reader may be
        waiting for a lock that the caller holds."""
        with suppress(BlockingIOError):
            os.write(self._end, b"\0")

    def drain(self) -> None:
        """Takes the wakes so far; none is fine."""
        with suppress(BlockingIOError):
            os.read(self.source, READ_BYTES)

    def close(self) -> None:
        os.close(self.source)
        os.close(self._end)
