"""The run's clock in tokens, as a learner sees it between two messages of the broker. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.proto.timing import EXTRAPOLATION_MAX_S


@dataclass(frozen=True)
class RunTime:
    """Tokens of the run in one epoch: told by the broker, extrapolated in between, never falling.

    The broker counts tokens when they are merged, so between two merges its count stands still.
    The time therefore counts from the message that brought the count first. It goes on for
    EXTRAPOLATION_MAX_S after the newest message.

    Other threads read it, therefore it never changes: news make another one. A broker that was
    restarted from older state begins a new epoch, and the learner a new RunTime.
    """

    _tokens: int = 0
    _tokens_per_s: float = 0.0
    _counted_at: float = 0.0
    """Time of the first message with this count."""
    _told_at: float = 0.0
    """Time of the newest message."""
    _floor: float = 0.0
    """Tokens below which the clock does not fall: it was read at least so high."""

    def updated(self, tokens: int, tokens_per_s: float, now: float) -> RunTime:
        """The clock after the broker's message of time `now`."""
        is_new = tokens != self._tokens or not self._told_at
        counted_at = now if is_new else self._counted_at
        newer = RunTime(tokens, tokens_per_s, counted_at, now, self.tokens(now))
        assert newer.tokens(now) >= self.tokens(now), (newer, self)
        return newer

    def tokens(self, now: float) -> float:
        """Tokens at the time `now`, in seconds on the clock of `updated`."""
        # `now` may lie before the update: a step is counted with the time at which it ended.
        until = min(now, self._told_at + EXTRAPOLATION_MAX_S)
        ahead_s = max(until - self._counted_at, 0.0)
        return max(self._floor, self._tokens + self._tokens_per_s * ahead_s)
