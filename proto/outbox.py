"""Data messages on their way to one peer: order, streams, and credit that prevents drops.

Pub/sub drops silently what a full queue or a broken connection loses, and without a bound its queue
would hold all that a peer does not read. So each stream counts the bytes it has sent, the receiver
reports the position it has seen, and never more than `window_bytes` are unacknowledged.
TCP keeps order within a stream: a position implies that everything before it arrived or is lost
for good, so a drop cannot leak credit. What was lost is asked for again by range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


DOUBLINGS_MAX = 6
"""The longest pause between two messages to a peer that acknowledges nothing is 64 stalls."""


class Lane(IntEnum):
    """What goes first: fragments of open rounds, then full-state transfers."""

    FRAGMENT = 0
    STATE = 1


class Departure(NamedTuple, Generic[Item]):
    """An item that may leave now, on `stream`, which then stands at `position` bytes."""

    item: Item
    stream: int
    position: int


@dataclass
class _Stream:
    sent: int = 0
    acknowledged: int = 0
    progress_at: float = 0.0
    renewals: int = 0
    """Since the last progress."""


@dataclass
class Outbox(Generic[Item]):
    """The queue in front of the data connections of one peer.

    Units: bytes for sizes, seconds on the caller's monotonic clock for `now`.
    """

    stream_count: int
    window_bytes: int
    """Unacknowledged bytes per stream; the socket's high-water mark holds at least as much."""
    stall_s: float = 5.0
    """A stream without progress for so long has lost what it carried: then one message may leave
    to find out, the next after twice the time; all of the window after progress."""
    bytes_sent: int = 0
    _streams: list[_Stream] = field(default_factory=list[_Stream])
    _lanes: tuple[deque[tuple[Item, int]], ...] = ()

    def __post_init__(self) -> None:
        assert self.stream_count > 0 and self.window_bytes > 0
        self._streams = [_Stream() for _ in range(self.stream_count)]
        self._lanes = tuple(deque[tuple[Item, int]]() for _ in Lane)

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes)

    def __iter__(self) -> Iterator[Item]:
        """What waits to leave."""
        return (item for lane in self._lanes for item, _ in lane)

    @property
    def idle(self) -> bool:
        """Nothing waits to leave, and all that left has arrived or is lost."""
        return not len(self) and all(s.sent == s.acknowledged for s in self._streams)

    def put(self, item: Item, size_bytes: int, lane: Lane = Lane.FRAGMENT) -> None:
        """Queues a message of `size_bytes`."""
        self._lanes[lane].append((item, size_bytes))

    def take(self, now: float) -> Departure[Item] | None:
        """The next message that the credit lets go, on the emptiest stream."""
        for lane in self._lanes:
            if not lane:
                continue
            item, size_bytes = lane[0]
            stream = min(
                range(self.stream_count),
                key=lambda index: self._streams[index].sent - self._streams[index].acknowledged,
            )
            state = self._streams[stream]
            in_flight = state.sent - state.acknowledged
            window_bytes = 0 if state.renewals else self.window_bytes
            if in_flight and in_flight + size_bytes > window_bytes:
                return None
            lane.popleft()
            if not in_flight:
                state.progress_at = now
            state.sent += size_bytes
            self.bytes_sent += size_bytes
            return Departure(item, stream, state.sent)
        return None

    def acknowledge(self, positions: tuple[int, ...], now: float) -> None:
        """Takes the receiver's stream positions in; nonsense (the future, too many) is ignored."""
        for state, position in zip(self._streams, positions, strict=False):
            if state.acknowledged < position <= state.sent:
                state.acknowledged = position
                state.progress_at, state.renewals = now, 0

    def renew_stalled(self, now: float) -> int:
        """Writes off what stalled streams carried and returns how many bytes that were."""
        lost = 0
        for state in self._streams:
            stall_s = self.stall_s * 2.0 ** min(state.renewals, DOUBLINGS_MAX)
            if state.sent > state.acknowledged and now - state.progress_at >= stall_s:
                lost += state.sent - state.acknowledged
                state.acknowledged = state.sent
                state.renewals += 1
        return lost

    def discard(self, unwanted: Callable[[Item], bool]) -> None:
        """Removes queued items, for example the chunks of a settled push."""
        for lane in self._lanes:
            kept = [entry for entry in lane if not unwanted(entry[0])]
            lane.clear()
            lane.extend(kept)
