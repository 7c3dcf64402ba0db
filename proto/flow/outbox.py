"""Data messages on their way to one peer: order, streams, and credit that prevents drops. [pure]

Pub/sub drops silently what a full queue or a broken connection loses, and without a bound its queue
would hold all that a peer does not read. So each stream counts the bytes it has sent, the receiver
reports the position it has seen, and never more than a window is unacknowledged.
TCP keeps order within a stream: a position implies that everything before it arrived or is lost
for good, so a drop cannot leak credit. What was lost is asked for again by range; what a stream
carried that stands still is sent again on the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from narrows.proto.flow.lanes import Lane, StateDebt
from narrows.proto.flow.path import Delivery, Mark
from narrows.proto.timing import (
    ACKNOWLEDGE_S,
    LATE_STALL_MAX_S,
    ROUND_TRIP_MAX_S,
    ROUND_TRIP_S,
    STALL_S,
    STANDSTILL_S,
)

Item = TypeVar("Item")

DOUBLINGS_MAX: Final = 6
"""The longest pause between two messages to a peer that acknowledges nothing is 64 stalls."""


LATE_FACTOR: Final = 1.5
"""After an acknowledgement that came later than a stall, a stall is this many times its delay, up
to LATE_STALL_MAX_S; once one comes sooner again, as it was."""


class Departure(NamedTuple, Generic[Item]):
    """An item that may leave now, on `stream`, which then stands at `position` bytes."""

    item: Item
    stream: int
    position: int


class _Sent(NamedTuple, Generic[Item]):
    """A message under way."""

    item: Item
    lane: Lane
    size_bytes: int
    position: int
    mark: Mark


@dataclass
class _Stream(Generic[Item]):
    sent: int = 0
    acknowledged: int = 0
    told: int = 0
    """Newest position that the receiver has told; behind `acknowledged` where that was given up."""
    waits_since: float = 0.0
    """Time of the last progress, or of the first message after a pause."""
    renewals: int = 0
    """Since the last progress."""
    under_way: deque[_Sent[Item]] = field(default_factory=lambda: deque())
    given_up: deque[_Sent[Item]] = field(default_factory=lambda: deque())
    """Queued again, but perhaps merely late."""

    @property
    def in_flight(self) -> int:
        return self.sent - self.acknowledged

    @property
    def unknown(self) -> int:
        """Bytes that the receiver has not told to have seen, given up or not."""
        return self.sent - self.told


@dataclass
class Outbox(Generic[Item]):
    """The queue in front of the data connections of one peer.

    Units: bytes for sizes, seconds on the caller's monotonic clock for `now`.
    """

    stream_count: int
    window_bytes: int
    """Unacknowledged bytes per stream, whatever the line would take."""
    stall_s: float = STALL_S
    """A peer without progress for so long has lost what was under way: then one message may leave
    to find out, the next after twice the time; all of the window after progress."""
    delivery: Delivery = field(default_factory=Delivery)
    shared_debt: StateDebt | None = None
    """The debt to states of all peers behind the same line; None: this peer has its own."""
    in_flight: int = field(default=0, init=False)
    """Bytes that are not acknowledged, of all streams."""
    _streams: list[_Stream[Item]] = field(default_factory=list[_Stream[Item]])
    _lanes: tuple[deque[tuple[Item, int]], ...] = ()
    _own_debt: StateDebt = field(default_factory=lambda: StateDebt(), init=False)
    _moved_at: float = -math.inf
    """When anything was acknowledged last."""
    _late_s: float = 0.0
    """How late the last acknowledgement was that came after its messages were given up."""

    def __post_init__(self) -> None:
        assert self.stream_count > 0 and self.window_bytes > 0
        self._streams = [_Stream[Item]() for _ in range(self.stream_count)]
        self._lanes = tuple(deque[tuple[Item, int]]() for _ in Lane)

    def __len__(self) -> int:
        fragments, states = self._lanes
        return len(fragments) + len(states)

    def __iter__(self) -> Iterator[Item]:
        """The items that wait to leave."""
        return (item for lane in self._lanes for item, _ in lane)

    @property
    def _debt(self) -> StateDebt:
        return self._own_debt if self.shared_debt is None else self.shared_debt

    @property
    def holds_states(self) -> bool:
        """A state message waits."""
        return bool(self._lanes[Lane.STATE])

    @property
    def next_lane(self) -> Lane | None:
        """The lane of the item that leaves next; None if nothing waits."""
        fragments, states = self._lanes
        if states and (not fragments or self._debt.is_due(states[0][1])):
            return Lane.STATE
        return Lane.FRAGMENT if fragments else None

    @property
    def next_bytes(self) -> int:
        """Size of what leaves next; 0 if nothing waits."""
        lane = self.next_lane
        return 0 if lane is None else self._lanes[lane][0][1]

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the streams stand."""
        return tuple(stream.sent for stream in self._streams)

    def start_at(self, positions: tuple[int, ...]) -> None:
        """Counts on from where an outbox before this one stood: what is still on its way from it
        must not pass for credit."""
        for stream, position in zip(self._streams, positions, strict=True):
            self.in_flight -= stream.in_flight
            stream.sent = stream.acknowledged = stream.told = position

    @property
    def idle(self) -> bool:
        """Nothing waits to leave, and all that left has arrived or is lost."""
        return not len(self) and not self.in_flight

    @property
    def told_bytes(self) -> int:
        """Bytes that the receiver has told it has seen, whatever was given up meanwhile."""
        return sum(stream.told for stream in self._streams)

    def coming(self, now: float) -> Iterator[Item]:
        """The items that wait to leave, or left so lately that they cannot be missing yet."""
        yield from self
        patience_s = self._patience_s
        for stream in self._streams:
            for sent in stream.under_way:
                if now - sent.mark.sent_at < patience_s:
                    yield sent.item

    def put(self, item: Item, size_bytes: int, lane: Lane = Lane.FRAGMENT) -> None:
        """Queues a message of `size_bytes`."""
        self._lanes[lane].append((item, size_bytes))
        if lane is Lane.STATE:
            self._debt.expect(size_bytes)

    def has_credit(self, now: float) -> bool:
        """Whether `take` would return a message."""
        return len(self) > 0 and self._choose(self.next_bytes, now) is not None

    def take(self, now: float) -> Departure[Item] | None:
        """The next message that the credit lets go, on the emptiest stream that moves."""
        lane = self.next_lane
        if lane is None:
            return None
        item, size_bytes = self._lanes[lane][0]
        index = self._choose(size_bytes, now)
        if index is None:
            return None
        stream = self._streams[index]
        self._lanes[lane].popleft()
        self._debt.settle(lane, size_bytes)
        if self.shared_debt is None and not self.holds_states:
            self._debt.forget()
        mark = self.delivery.leave(now, alone=not self.in_flight)
        if not stream.in_flight:
            stream.waits_since = now
        stream.sent += size_bytes
        self.in_flight += size_bytes
        stream.under_way.append(_Sent(item, lane, size_bytes, stream.sent, mark))
        return Departure(item, index, stream.sent)

    def _choose(self, size_bytes: int, now: float) -> int | None:
        """The stream that takes a message of this size: a dead one to see whether it lives again,
        else the emptiest."""
        moving = [i for i, stream in enumerate(self._streams) if not stream.renewals]
        for index, stream in enumerate(self._streams):
            is_dead = stream.renewals and not stream.in_flight
            if is_dead and (not moving or now >= stream.waits_since + self._stall_s(stream)):
                return index
        if not moving:
            return None
        index = min(moving, key=lambda i: self._streams[i].in_flight)
        stream, total = self._streams[index], self.in_flight
        # What was given up and is merely late is on its way too, once the stream moves again.
        is_full = stream.in_flight and stream.unknown + size_bytes > self.window_bytes
        is_ahead = total and total + size_bytes > self.delivery.window_bytes
        return None if is_full or is_ahead else index

    def _stall_s(self, stream: _Stream[Item]) -> float:
        stall_s = max(self.stall_s, min(LATE_FACTOR * self._late_s, LATE_STALL_MAX_S))
        return stall_s * 2.0 ** min(stream.renewals, DOUBLINGS_MAX)

    def acknowledge(self, positions: tuple[int, ...], now: float) -> None:
        """Takes the receiver's stream positions in; nonsense (the future, too many) is ignored."""
        arrived, newest = 0, None
        for stream, position in zip(self._streams, positions, strict=False):
            if not stream.told < position <= stream.sent:
                continue
            stream.told, stream.renewals = position, 0
            if position <= stream.acknowledged:
                self._forget_late(stream, position, now)
                continue
            stream.given_up.clear()
            arrived += position - stream.acknowledged
            stream.acknowledged = position
            stream.waits_since = now
            while stream.under_way and stream.under_way[0].position <= position:
                mark = stream.under_way.popleft().mark
                newest = max(newest or mark, mark)
        if arrived:
            self._moved_at = now
            self.in_flight -= arrived
        if newest is not None:
            self.delivery.arrive(arrived, newest, now)
            if now - newest.sent_at < self.stall_s:
                self._late_s = 0.0

    def renew_stalled(self, now: float) -> int:
        """Gives up what stands still: all of it if nothing moves any more, the streams that do not
        if others do. It is queued again in front; returns how many bytes that are."""
        lost = 0
        for stream in self._streams:
            if not stream.in_flight:
                continue
            stands_still = stream.waits_since + self._standstill_s <= min(now, self._moved_at)
            if stands_still or now - stream.waits_since >= self._stall_s(stream):
                lost += self._give_up(stream, now)
        return lost

    @property
    def dead(self) -> tuple[int, ...]:
        """Streams that have stood still and have not moved since."""
        return tuple(index for index, stream in enumerate(self._streams) if stream.renewals)

    def reconnect(self, index: int, now: float) -> int:
        """A stream has a new connection: if it is a dead one, what it was tried with last is lost,
        and the next try is due now. Returns how many bytes are queued again."""
        is_dead = index in self.dead and self._streams[index].in_flight
        return self._give_up(self._streams[index], now) if is_dead else 0

    def _give_up(self, stream: _Stream[Item], now: float) -> int:
        """Queues what is under way again, in front."""
        lost = stream.in_flight
        stream.acknowledged = stream.sent
        self.in_flight -= lost
        stream.waits_since, stream.renewals = now, stream.renewals + 1
        self._queue_again(stream)
        return lost

    @property
    def _patience_s(self) -> float:
        """An acknowledgement may be so late."""
        trip_s = self.delivery.round_trip_s
        expected_s = ROUND_TRIP_S if math.isinf(trip_s) else min(trip_s, ROUND_TRIP_MAX_S)
        return 2 * (expected_s + ACKNOWLEDGE_S)

    @property
    def _standstill_s(self) -> float:
        return max(STANDSTILL_S, 2 * self._patience_s)

    def _forget_late(self, stream: _Stream[Item], position: int, now: float) -> None:
        """Drops from the queue what was given up and has arrived after all.

        On a line that takes longer than a stall nothing else would ever get past it.
        """
        late: list[Item] = []
        while stream.given_up and stream.given_up[0].position <= position:
            sent = stream.given_up.popleft()
            late.append(sent.item)
            self._late_s = now - sent.mark.sent_at
        for lane in self._lanes:
            waiting = [entry for entry in lane if not any(entry[0] is item for item in late)]
            lane.clear()
            lane.extend(waiting)

    def _queue_again(self, stream: _Stream[Item]) -> None:
        stream.given_up.extend(stream.under_way)
        while stream.under_way:
            sent = stream.under_way.pop()
            self._lanes[sent.lane].appendleft((sent.item, sent.size_bytes))

    def discard(self, unwanted: Callable[[Item], bool]) -> None:
        """Forgets items, for example the chunks of a settled push: none of them leaves again."""
        for lane in self._lanes:
            kept = [entry for entry in lane if not unwanted(entry[0])]
            lane.clear()
            lane.extend(kept)
        for stream in self._streams:
            stream.under_way = deque(s for s in stream.under_way if not unwanted(s.item))
            stream.given_up = deque(s for s in stream.given_up if not unwanted(s.item))
