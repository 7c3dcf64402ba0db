"""Places at which a test ends the process as a power cut would: `NARROWS_CRASH_AT=NAME:N`.

The process ends at the N-th visit of the place. A signal from outside would come at another place
each time, so a failure could not be repeated.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

VARIABLE: Final = "NARROWS_CRASH_AT"
NAMES: Final = (
    "received", "unpacked", "merged", "appended", "durable", "installed", "published",
    "checkpoint_begun", "checkpoint_written", "journal_cut",
)  # fmt: skip
"""Names of the places: those of a round in their order, then those of a checkpoint."""


def crash_points(environment: Mapping[str, str]) -> Callable[[str], None]:
    """The function that the broker calls with the name of each place it reaches.

    It kills the process at the visit that the variable names; without the variable it does nothing.
    """
    place, _, visit = environment.get(VARIABLE, "").partition(":")
    visits: Counter[str] = Counter()

    def reach(name: str) -> None:
        assert name in NAMES, f"{name} is no crash point"
        if name == place:
            visits[name] += 1
            if visits[name] == int(visit or 1):
                os.kill(os.getpid(), signal.SIGKILL)

    return reach
