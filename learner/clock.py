"""The two clocks of a learner: the run's, in tokens, and the time that its own steps take."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

from narrows.proto.messages import Beat

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

    def tokens(self, beat: Beat, age_s: float) -> float:
        """The clock now; the newest Beat came `age_s` seconds ago."""
        ahead_s = min(max(0.0, age_s), EXTRAPOLATION_MAX_S)
        self._floor = max(self._floor, beat.run_tokens + beat.tokens_per_s * ahead_s)
        return self._floor


class StepTimes:
    """The newest times between two steps, without the waits and pauses of the training thread."""

    def __init__(self) -> None:
        self._newest_s: deque[float] = deque(maxlen=STEP_TIMES)
        self._stepped_at: float | None = None
        self._median_s = 0.0
        """That of the newest times, kept because each fragment asks at each step."""

    def stepped(self, now: float) -> None:
        """A step is made."""
        if self._stepped_at is not None:
            self._newest_s.append(now - self._stepped_at)
            self._median_s = median(self._newest_s)
        self._stepped_at = now

    def interrupt(self) -> None:
        """The training thread does something else: the time to its next step is no step time."""
        self._stepped_at = None

    def median_s(self, steps_ahead: int = 0) -> float:
        """The learner's step time, 0 if it is not known yet.

        Steps ahead may take any time: with them it is an upper bound.
        """
        if not steps_ahead:
            return self._median_s
        return median([*self._newest_s, *[math.inf] * steps_ahead][-STEP_TIMES:])
