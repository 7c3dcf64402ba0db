"""The broker's log, which cannot flood, and the named places where tests kill the broker."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

REPEATS_MAX: Final = 10
"""Lines of one kind in REPEATS_S that reach the log; what peers cause must not fill the disk."""
REPEATS_S: Final = 60.0
KINDS_MAX: Final = 1000
"""Kinds of lines that are told apart, so that texts of peers cannot fill the memory."""

CRASH_PLACES: Final = ("merged", "appended", "durable", "installed", "published")
"""Moments in the life of a round, in their order, at which a test may end the process."""

log: Final = logging.getLogger("narrows.broker")


class LimitRepeats(logging.Filter):
    """Lets a few lines of each kind pass in a minute; then the next one tells how many it hid.

    A kind is the message before its arguments, or the record's `kind` where it has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since_s = 0.0
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created >= self._since_s + REPEATS_S or len(self._seen) > KINDS_MAX:
            hidden = sum(max(0, count - REPEATS_MAX) for count in self._seen.values())
            self._since_s, self._seen = record.created, Counter()
            if hidden:
                record.msg, record.args = f"{record.getMessage()} ({hidden} lines were hidden)", ()
        kind = str(getattr(record, "kind", record.msg))
        self._seen[kind] += 1
        return record.levelno >= logging.ERROR or self._seen[kind] <= REPEATS_MAX


def crash_places(environment: Mapping[str, str]) -> Callable[[str], None]:
    """The function that the broker calls at each of CRASH_PLACES.

    NARROWS_CRASH_AT=PLACE:VISIT ends the process there as a power cut would. A signal from outside
    would come at another moment each time, and a failure could not be repeated.
    """
    place, _, visit = environment.get("NARROWS_CRASH_AT", "").partition(":")
    visits: Counter[str] = Counter()

    def reach(name: str) -> None:
        assert name in CRASH_PLACES, name
        if name == place:
            visits[name] += 1
            if visits[name] == int(visit or 1):
                os.kill(os.getpid(), signal.SIGKILL)

    return reach
