"""The time that one side of the wire waits for the other, from what is usual for it. [pure]

One rule holds for everybody who waits. A peer gets three usual rounds. Beyond them it gets time as
long as bytes flow at half of their usual rate or more, and at most twice the time that the
outstanding bytes need at the usual rate. So a slow line is waited for, whatever it carries. A line
that trickles is not, nor a process that hangs and still says that it lives. A fixed time would be
too short for one model and too long for another. Where it is known how fast others are, no peer is
waited for beyond USUAL_RATIO_MAX times the time that they need for its bytes: nobody can hold the
others up by a line that it makes slow.
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
"""Usual rounds that a peer gets whether or not bytes flow."""

SLOWER: Final = 2.0
"""Factor by which a peer may be slower than it usually is."""

USUAL_RATIO_MAX: Final = 4.0
"""A peer's usual round, and its bytes, get at most this multiple of the time of the others'. One
that answers a little later each time must not stretch its own patience without end."""

SAMPLES: Final = 15
"""The usual rate is the median of so many samples, each of at least PATIENCE_SAMPLE_S in which
bytes were awaited. A few seconds of another rate, such as a join beside an idle broker, do not move
a median."""

STATE_BYTES: Final = 4.0
"""Bytes per element of a fragment that is behind. Its whole state is the most that it can need."""


def push_bytes_max(setting: str, elements: int) -> float:
    """Bytes of the largest payload of a push under this codec setting."""
    assert elements > 0, f"a push of {elements} elements"
    return float(max(codec(name).payload_bytes_max(elements, 1) for name in codecs_of(setting)))


@dataclass
class Flow:
    """Bytes in one direction and their usual rate. Seconds on the caller's clock."""

    moved: int = 0
    """Bytes so far."""
    sampled_bytes_per_s: float | None = None
    """The usual rate by whole samples; None: there is none yet."""
    _positions: tuple[int, ...] = ()
    _since: float | None = None
    """Time of the last progress, or from which on bytes are awaited; None: none are."""
    _bytes: int = 0
    _seconds: float = 0.0
    _rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=SAMPLES))

    def expect(self, now: float, *, anew: bool = False) -> None:
        """Bytes are awaited from now on, if they were not before; `anew`: the wait starts again."""
        if anew or self._since is None:
            self._since = now

    def settle(self) -> None:
        """Everything awaited is here. From now on passing time says nothing about the rate."""
        self._since = None

    def move(self, positions: Sequence[int], now: float) -> None:
        """The streams stand at these positions; a new session begins at 0.

        The first message of a stream only shows the position that it starts from. For a peer that
        is believed: another one may claim any position, so that only `add` counts.
        """
        # One that falls counts as a new start, and is no error.
        pairs = zip(positions, self._positions, strict=False)
        grown = sum(new - old for new, old in pairs if new > old > 0)
        assert grown >= 0, grown
        self._positions = tuple(positions)
        self.add(grown, now)

    def add(self, size_bytes: int, now: float) -> None:
        """So many bytes have come."""
        assert size_bytes >= 0, size_bytes
        self.moved += size_bytes
        if not size_bytes or self._since is None:
            return
        self._bytes += size_bytes
        self._seconds += now - self._since
        self._since = now
        if self._seconds >= PATIENCE_SAMPLE_S:
            self._rates.append(self._bytes / self._seconds)
            self.sampled_bytes_per_s = median(self._rates)
            self._bytes, self._seconds = 0, 0.0

    @property
    def usual_bytes_per_s(self) -> float | None:
        """The usual rate; None: nothing has been seen yet."""
        if self.sampled_bytes_per_s is not None:
            return self.sampled_bytes_per_s
        return self._bytes / self._seconds if self._seconds > 0 else None


@dataclass
class Way:
    """One direction of a wait, from its beginning."""

    flow: Flow
    outstanding_bytes: float
    limit_bytes_per_s: float = math.inf
    """Rate that the budget allows now. No peer can be asked for more."""
    others_bytes_per_s: float | None = None
    """Usual rate of the others; None: it is unknown, or there are none."""

    def __post_init__(self) -> None:
        assert self.outstanding_bytes >= 0, self.outstanding_bytes
        assert self.limit_bytes_per_s > 0, self.limit_bytes_per_s
        self._moved_before = self.flow.moved
        # Taken now: measured during the wait, a trickle would become the usual rate.
        self._usual = self.flow.usual_bytes_per_s

    @property
    def moved_bytes(self) -> int:
        return self.flow.moved - self._moved_before

    @property
    def usual_bytes_per_s(self) -> float:
        """The rate of the time before the wait, or the present one of a peer that was unknown.

        No line counts as slower than the smallest budget.
        """
        usual = self._usual or self.flow.usual_bytes_per_s or 0.0
        rate = min(max(usual, RATE_MIN / 8), self.limit_bytes_per_s)
        assert rate > 0, "times are divided by it"
        return rate

    @property
    def moved_s(self) -> float:
        """Seconds that these bytes usually take. Bytes that were sent again do not count."""
        return min(self.moved_bytes, self.outstanding_bytes) / self.usual_bytes_per_s

    @property
    def longest_s(self) -> float:
        """The longest wait for these bytes."""
        longest = SLOWER * self.outstanding_bytes / self.usual_bytes_per_s
        if self.others_bytes_per_s is None:
            return longest
        others = min(self.others_bytes_per_s, self.limit_bytes_per_s)
        return min(longest, USUAL_RATIO_MAX * self.outstanding_bytes / others)


@dataclass
class Patience:
    """A wait for one peer, since `begun_at`."""

    begun_at: float
    round_s: float
    """Seconds of the peer's usual round."""
    least_s: float
    """Seconds before which nobody is given up: a peer may be gone for so long."""
    ways: tuple[Way, ...] = ()
    _moving_since: float | None = None

    def until(self, now: float) -> float:
        """The time at which the peer is given up, unless more bytes come."""
        assert self.round_s >= 0 and self.least_s >= 0, self
        until = self.begun_at + max(ROUNDS * self.round_s, self.least_s)
        moved_s = sum(way.moved_s for way in self.ways)
        if not moved_s:
            return until
        if self._moving_since is None:
            self._moving_since = now
        flowing = self._moving_since + SLOWER * moved_s
        longest = self.begun_at + sum(way.longest_s for way in self.ways)
        # Progress only ever adds patience: nobody is given up sooner for having sent something.
        return max(until, min(flowing, longest))
