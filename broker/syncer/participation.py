"""One learner's record of rounds: how fast it answers, what was merged, what it missed. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.smoothing import Smoothed

MISSED_FACTOR = 1.5
"""A missed round counts as an answer that took this many times the round's wait."""

MISSED_RUNNING_NAMED = 3
MISSED_NAMED_S = 10.0
"""A learner that missed this many rounds in a row, over this many seconds, is named in the log.
Both limits are needed: where rounds are quick, a healthy learner misses some."""


@dataclass
class Participation:
    """Contributions of one incarnation. Only these methods write it."""

    last_merged: list[int]
    """Last merged push id per fragment; 0: none."""
    contributed_at: float
    """Time at which its last contribution was complete, or at which it joined."""
    arrival: Smoothed = field(default_factory=Smoothed)
    """Seconds from the opening of a round to this learner's complete contribution."""
    contributions: int = 0
    missed_running: int = 0
    """Rounds missed in a row."""
    missed_named: bool = False
    """The operator's log has the warning about them."""

    def predicted_s(self, step_s: float) -> float | None:
        """Seconds after the opening of a round within which a contribution is expected.

        Mean plus three deviations, but at least one step more than the mean: a learner answers at
        its next step, so that a few quick answers say little about the next one.
        """
        assert step_s >= 0.0
        if not self.arrival.samples:
            return None
        return max(self.arrival.upper(), self.arrival.mean + step_s)

    def complete(self, took_s: float | None, now: float) -> None:
        """Notes a complete contribution; `took_s` is None if its duration says nothing."""
        assert now >= self.contributed_at
        if took_s is not None:
            assert took_s >= 0.0
            self.arrival.add(took_s)
        self.missed_running, self.missed_named = 0, False
        self.contributed_at = now

    def miss(self, waited_s: float | None) -> None:
        """Notes a missed round; `waited_s` is None for a learner that may be cut off."""
        self.missed_running += 1
        if waited_s is not None:
            assert waited_s >= 0.0
            # It would have come later than now: predictions that know only those who were in time
            # would leave a learner that became slower out for ever.
            self.arrival.add(MISSED_FACTOR * waited_s)

    def name_misses(self, now: float) -> str:
        """Text for the log, once per series of missed rounds; empty: nothing to say."""
        assert self.missed_running > 0
        since_s = now - self.contributed_at
        is_series = self.missed_running >= MISSED_RUNNING_NAMED and since_s >= MISSED_NAMED_S
        if not is_series or self.missed_named:
            return ""
        self.missed_named = True
        return f"missed {self.missed_running} rounds in {since_s:.0f} s"

    def merge(self, fragment: int, push_id: int) -> None:
        """Notes that a push is part of a version."""
        assert push_id > self.last_merged[fragment], "a push is merged once, in the order of ids"
        self.last_merged[fragment] = push_id
        self.contributions += 1
