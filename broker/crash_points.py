"""Places at which a test ends the process as a power cut would: `NARROWS_CRASH_AT=NAME:N`.

N is the visit of the place at which it happens. Without the variable a visit costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Final

VARIABLE: Final = "NARROWS_CRASH_AT"
NAMES: Final = (
    "received", "unpacked", "merged", "appended", "durable", "installed", "published",
    "checkpoint_begun", "checkpoint_written", "journal_cut",
)  # fmt: skip
"""In the order of a round's life, then those of a checkpoint."""

_place, _, _visit = os.environ.get(VARIABLE, "").partition(":")
_visits: Counter[str] = Counter()


def reach(name: str) -> None:
    """Says that the process is at this place; the end of it if that was asked for."""
    assert name in NAMES
    if name != _place:
        return
    _visits[name] += 1
    if _visits[name] == int(_visit or 1):
        os.kill(os.getpid(), signal.SIGKILL)
