"""The rate at which a peer takes data, and how many bytes may be under way to it. [pure]

A line holds rate x round trip. More bytes would only wait in queues, and a push that is settled
meanwhile cannot be called back from a queue. The rate is the largest of the last seconds, as in BBR
(Cardwell et al. 2016): deliveries per time between two acknowledgements. The mean would be too
low, because a sender often has nothing to send.
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
"""Received bytes after which a receiver acknowledges every ACKNOWLEDGE_SOON_S. The sooner it does,
the fewer bytes must be under way."""

WINDOW_START_BYTES: Final = 1 << 20
"""The window before the first acknowledgement. A window that is used up doubles with every round
trip, so a low start costs a few round trips only."""

WINDOW_MIN_BYTES: Final = 64 << 10
"""The smallest window: a slow line, too, needs a message under way while the next one is made."""


class Mark(NamedTuple):
    """The state of the path at a message's departure; its acknowledgement is compared with it."""

    sent_at: float
    delivered: int
    delivered_at: float


@dataclass
class Delivery:
    """Deliveries to one peer. Bytes, and seconds on the caller's monotonic clock."""

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
        """`size_bytes` were acknowledged; `newest` is the mark of the last message of them."""
        assert size_bytes >= 0, size_bytes
        assert newest.sent_at <= now, f"acknowledged {newest.sent_at - now} s before it was sent"
        assert newest.delivered <= self.delivered, "a mark from the future"
        self.delivered += size_bytes
        self._delivered_at = now
        if now >= self._period_at + DELIVERY_MEMORY_S:
            self._period_at = now
            self._rates = (0.0, self._rates[0])
            self._trips_s = (math.inf, self._trips_s[0])
        # The longer of both times: acknowledgements that come together, or a sender that paused,
        # must not look like a fast line. The floor keeps a clock that stands still from dividing.
        elapsed_s = max(now - newest.delivered_at, now - newest.sent_at, 1e-6)
        rate = (self.delivered - newest.delivered) / elapsed_s
        self._rates = (max(self._rates[0], rate), self._rates[1])
        self._trips_s = (min(self._trips_s[0], now - newest.sent_at), self._trips_s[1])

    @property
    def round_trip_s(self) -> float:
        """Seconds from a departure to its acknowledgement, at best; inf before the first."""
        return min(self._trips_s)

    @property
    def window_bytes(self) -> float:
        """Bytes that may be unacknowledged: twice the bytes that the line holds.

        Bytes that arrive before the receiver says so count as well. Twice, because with a window
        of exactly the known rate nobody would notice that the rate has risen.
        """
        rate = max(self._rates)
        if not rate:
            return WINDOW_START_BYTES
        between_s = min(max(ACKNOWLEDGE_BYTES / rate, ACKNOWLEDGE_SOON_S), ACKNOWLEDGE_S)
        assert math.isfinite(self.round_trip_s), "a rate without a round trip"
        return max(
            WINDOW_MIN_BYTES, 2 * rate * (self.round_trip_s + between_s + ACKNOWLEDGE_SLACK_S)
        )
