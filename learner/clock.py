"""Two clocks that a learner extrapolates: the run's, in tokens, and the time of its own steps."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

from narrows.proto import messages as msg

STEP_TIMES: Final = 8
"""Newest step times whose median is the learner's own."""

EXTRAPOLATION_MAX_S: Final = 10.0
"""The run's clock goes on for so long without news from the broker."""


class RunClock:
    """The run's clock in tokens. Between two Beats it goes on at the rate that the broker told.

    It never falls: it stands still while a broker of an older state has not caught up.
    """

    def __init__(self) -> None:
        self._floor = 0.0

    def tokens(self, beat: msg.Beat, age_s: float) -> float:
        """The clock now; `beat` is the newest Beat and came `age_s` seconds ago."""
        ahead_s = min(max(0.0, age_s), EXTRAPOLATION_MAX_S)
        self._floor = max(self._floor, beat.run_tokens + beat.tokens_per_s * ahead_s)
        return self._floor


class StepTimes:
    """The newest times that an inner step took, without waits and pauses."""

    def __init__(self) -> None:
        self._newest_s: deque[float] = deque(maxlen=STEP_TIMES)
        self._stepped_at: float | None = None

    def stepped(self, now: float) -> None:
        """A step is made."""
        if self._stepped_at is not None:
            self._newest_s.append(now - self._stepped_at)
        self._stepped_at = now

    def interrupted(self) -> None:
        """The training thread does something else: the time to the next step is no step time."""
        self._stepped_at = None

    def median_s(self, steps_ahead: int = 0) -> float:
        """The learner's step time, 0 if it is not known yet. Steps ahead may take for ever, so with
        some of them it is an upper bound."""
        times_s = [*self._newest_s, *[math.inf] * steps_ahead]
        return median(times_s[-STEP_TIMES:]) if times_s else 0.0
