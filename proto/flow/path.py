"""How fast a peer takes what it is sent, and how much of it may be under way. [pure]

A line holds rate x round trip; what is sent beyond that only waits in queues, and a push that is
settled meanwhile cannot be called back from there. The rate is the largest of the last seconds,
as in BBR (Cardwell et al. 2016): deliveries per time between two acknowledgements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from narrows.proto.timing import (
    ACKNOWLEDGE_S,
    ACKNOWLEDGE_SLACK_S,
    ACKNOWLEDGE_SOON_S,
    DELIVERY_MEMORY_S,
)

ACKNOWLEDGE_BYTES: Final = 128 << 10
"""Received bytes after which positions are told every ACKNOWLEDGE_SOON_S."""

WINDOW_START_BYTES: Final = 1 << 20
"""Until something is known. A window that is used up doubles with every round trip."""

WINDOW_MIN_BYTES: Final = 64 << 10


class Mark(NamedTuple):
    """What a message needs to remember when it leaves."""

    sent_at: float
    delivered: int
    delivered_at: float


@dataclass
class Delivery:
    """Bytes and seconds on the caller's monotonic clock."""

    delivered: int = 0
    _delivered_at: float = 0.0
    _rates: tuple[float, float] = (0.0, 0.0)
    """Largest of the present and of the last period, in bytes per second."""
    _trips_s: tuple[float, float] = (math.inf, math.inf)
    """Smallest, likewise."""
    _period_at: float = -math.inf

    def leave(self, now: float, *, alone: bool) -> Mark:
        """A message leaves; `alone`: nothing else is under way, so the clock starts now."""
        if alone:
            self._delivered_at = now
        return Mark(now, self.delivered, self._delivered_at)

    def arrive(self, size_bytes: int, newest: Mark, now: float) -> None:
        """So many bytes were acknowledged; `newest` is the mark of the last message of them."""
        self.delivered += size_bytes
        self._delivered_at = now
        if now >= self._period_at + DELIVERY_MEMORY_S:
            self._period_at = now
            self._rates = (0.0, self._rates[0])
            self._trips_s = (math.inf, self._trips_s[0])
        elapsed_s = max(now - newest.delivered_at, now - newest.sent_at, 1e-6)
        rate = (self.delivered - newest.delivered) / elapsed_s
        self._rates = (max(self._rates[0], rate), self._rates[1])
        self._trips_s = (min(self._trips_s[0], now - newest.sent_at), self._trips_s[1])

    @property
    def round_trip_s(self) -> float:
        """From a message's departure to its acknowledgement, at best; inf before the first."""
        return min(self._trips_s)

    @property
    def window_bytes(self) -> float:
        """How much may be unacknowledged: twice what the line holds, so that a rate which has
        risen is noticed, and what arrives until the receiver says so."""
        rate = max(self._rates)
        if not rate:
            return WINDOW_START_BYTES
        between_s = min(max(ACKNOWLEDGE_BYTES / rate, ACKNOWLEDGE_SOON_S), ACKNOWLEDGE_S)
        return max(
            WINDOW_MIN_BYTES, 2 * rate * (self.round_trip_s + between_s + ACKNOWLEDGE_SLACK_S)
        )
