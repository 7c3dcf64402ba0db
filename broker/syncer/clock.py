"""The clock of the run: tokens of merged pushes, and how fast they come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from narrows.proto.messages import TOKENS_MAX

SAMPLES: Final = 17
"""Merges that the speed is taken from, one more than the gaps between them."""

QUIET_S: Final = 2.0
"""The speed is told as 0 after this long and two usual gaps without a merge."""


@dataclass
class Clock:
    """Counts the tokens of merged pushes, and has no state by name: nothing that it counted can
    leave with a learner."""

    fragments: int
    tokens: int = 0
    """Tokens of all merged pushes, summed over fragments: each token counts once per fragment."""
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(time, tokens) of the newest merges."""

    @property
    def run_tokens(self) -> int:
        """Tokens that the run has learned."""
        return self.tokens // self.fragments

    def count(self, tokens: int, now: float) -> None:
        """A round became durable that holds these tokens."""
        # A Beat beyond TOKENS_MAX could be read by nobody.
        self.tokens = min(self.tokens + tokens, TOKENS_MAX)
        self._samples.append((now, tokens))

    def tokens_per_s(self, now: float) -> float:
        """Tokens per second over the newest merges; 0 after a pause."""
        if len(self._samples) < 2:
            return 0.0
        first_at, last_at = self._samples[0][0], self._samples[-1][0]
        gap_s = (last_at - first_at) / (len(self._samples) - 1)
        if gap_s <= 0 or now > last_at + QUIET_S + 2 * gap_s:
            return 0.0
        counted = sum(tokens for _, tokens in self._samples) - self._samples[0][1]
        return counted / self.fragments / (last_at - first_at)
