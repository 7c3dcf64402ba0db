"""A pipe that wakes the thread which owns the sockets. Both shells use it."""

from __future__ import annotations

import os
from contextlib import suppress

READ_BYTES = 4096
"""Wakes that are read at once. More of them make the pipe readable again."""


class WakePipe:
    """A pipe as an alarm. Any thread or signal handler may call `wake`, one thread the rest.

    A pipe, because a poller waits for descriptors only, and a lock is not safe in a handler.
    """

    def __init__(self) -> None:
        self.source, self._end = os.pipe()
        """`source` is readable once somebody has called: for a poller."""
        os.set_blocking(self.source, False)
        os.set_blocking(self._end, False)

    def wake(self) -> None:
        """Makes `source` readable, without waiting.

        A full pipe already says all that one more byte would say, and its reader may be waiting
        for a lock that the caller holds.
        """
        with suppress(BlockingIOError, BrokenPipeError):  # Closed: nobody is to be woken.
            os.write(self._end, b"\0")

    def drain(self) -> None:
        """Takes the wakes so far. That there are none is no error."""
        with suppress(BlockingIOError):
            os.read(self.source, READ_BYTES)

    def close(self) -> None:
        os.close(self.source)

    def __del__(self) -> None:
        # Not before: another thread may be about to write, and the number may be another file's.
        os.close(self._end)
