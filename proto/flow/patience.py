"""How long one side of the wire waits for the other, by what is usual for it. [pure]

One rule for all who wait: three usual rounds; beyond them as long as bytes flow at half of their
usual rate or more, and at most twice the time that the outstanding bytes need at that rate. So a
slow line is waited for, whatever it carries, but not a line that trickles, nor a process that
hangs and still says that it lives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from narrows.proto.codec import codec, codecs_of
from narrows.proto.limits import RATE_MIN
from narrows.proto.timing import PATIENCE_SAMPLE_S

ROUNDS: Final = 3.0
"""So many usual rounds are waited for whether or not bytes flow."""

SLOWER: Final = 2.0
"""A peer may be so many times slower than it usually is."""

SAMPLES: Final = 15
"""The usual rate is the median of so many samples, each of at least PATIENCE_SAMPLE_S in which
bytes were awaited: a few seconds of another rate, such as a join beside an idle broker, do not move
it."""

STATE_BYTES: Final = 4.0
"""Per element of a fragment that is behind: its whole state is the most that can be needed."""


def push_bytes_max(setting: str, elements: int) -> float:
    """The largest payload of a push under this codec setting."""
    return float(max(codec(name).payload_bytes_max(elements, 1) for name in codecs_of(setting)))


@dataclass
class Flow:
    """Bytes in one direction, and how fast they usually come. Seconds on the caller's clock."""

    moved: int = 0
    """In all. The first message of a stream only shows where it stands."""
    _positions: tuple[int, ...] = ()
    _since: float | None = None
    """Of the last progress, or since when bytes are awaited; None: none are."""
    _bytes: int = 0
    _seconds: float = 0.0
    _rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=SAMPLES))

    def expect(self, now: float, *, anew: bool = False) -> None:
        """Bytes are awaited from now on, if they were not already; `anew`: they were not."""
        if anew or self._since is None:
            self._since = now

    def settle(self) -> None:
        """All that was awaited is here: time that passes says nothing about the rate."""
        self._since = None

    def move(self, positions: Sequence[int], now: float) -> None:
        """The streams stand at these positions; a session that begins anew begins at 0."""
        pairs = zip(positions, self._positions, strict=False)
        grown = sum(new - old for new, old in pairs if new > old > 0)
        self._positions = tuple(positions)
        self.moved += grown
        if not grown or self._since is None:
            return
        self._bytes += grown
        self._seconds += now - self._since
        self._since = now
        if self._seconds >= PATIENCE_SAMPLE_S:
            self._rates.append(self._bytes / self._seconds)
            self._bytes, self._seconds = 0, 0.0

    @property
    def usual_bytes_per_s(self) -> float | None:
        """None: nothing has been seen yet."""
        if self._rates:
            return median(self._rates)
        return self._bytes / self._seconds if self._seconds > 0 else None


@dataclass
class Way:
    """One direction of a wait, from its beginning."""

    flow: Flow
    outstanding_bytes: float
    limit_bytes_per_s: float = math.inf
    """What the budget allows now: nobody can be asked for more."""

    def __post_init__(self) -> None:
        self._moved_before = self.flow.moved
        # Later, a trickle would be what is usual.
        self._usual = self.flow.usual_bytes_per_s

    @property
    def moved_bytes(self) -> int:
        return self.flow.moved - self._moved_before

    @property
    def usual_bytes_per_s(self) -> float:
        """That of the time before the wait; of a peer of which nothing was known, the present one.
        No line counts as slower than what a budget may be."""
        usual = self._usual or self.flow.usual_bytes_per_s or 0.0
        return min(max(usual, RATE_MIN / 8), self.limit_bytes_per_s)

    @property
    def moved_s(self) -> float:
        """Time that usually passes until so much has moved; what is sent again does not count."""
        return min(self.moved_bytes, self.outstanding_bytes) / self.usual_bytes_per_s

    @property
    def needed_s(self) -> float:
        return self.outstanding_bytes / self.usual_bytes_per_s


@dataclass
class Patience:
    """A wait for one peer, since `begun_at`."""

    begun_at: float
    round_s: float
    """The peer's usual round."""
    least_s: float
    """Nobody is given up sooner: so long a peer may be gone altogether."""
    ways: tuple[Way, ...] = ()
    _moving_since: float | None = None

    def until(self, now: float) -> float:
        """When the peer is given up, unless more bytes come."""
        until = self.begun_at + max(ROUNDS * self.round_s, self.least_s)
        moved_s = sum(way.moved_s for way in self.ways)
        if not moved_s:
            return until
        if self._moving_since is None:
            self._moving_since = now
        flowing = self._moving_since + SLOWER * moved_s
        longest = self.begun_at + SLOWER * sum(way.needed_s for way in self.ways)
        return max(until, min(flowing, longest))
