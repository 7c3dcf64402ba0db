"""Everything that waits to leave on the data sockets of one process, and what leaves next.

The broker has one Sender for all its learners, a learner has one for its uplink. Data that goes to
everybody is `live`, data that one learner fetches is `asked`. Live data goes first, every eighth
message is asked data, and those who ask take turns. Each topic has a lane of its own: a connection
without room holds up its own lane and no other.

Three things decide when a message leaves: the budgets (the total of all learners, and the share of
each), the room in its pipe, and, once a slow reader costs the others, patience.

The host does, in a loop: `entry = due(now)`, send it, then `sent(entry, now)`, or
`blocked(entry, now)` if the socket had no room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from narrows.proto.flow.budget import Budget, wire_bytes
from narrows.proto.messages import DataKind, Header
from narrows.proto.wire import encode_header

TURN: Final = 8
"""While both wait, every so many messages one is asked data: a learner that fetches falls behind no
further."""

RETRY_S: Final = 0.002
"""A lane without room is tried again after this long; an XPUB cannot say when it has room."""

PATIENCE_S: Final = 0.25
"""Time for which live data waits for a reader that does not keep up."""

PATIENCE_REFILL: Final = 0.025
"""With a budget that time is one allowance for all messages, and it grows by this share of the
time: a reader that is always slow must not take a quarter of everybody's. Only rate that is lost
for good counts; a budget makes up for short waits, such as a learner's adoption."""


@dataclass(eq=False)
class Entry:
    """A data message that waits."""

    topic: str
    about: Header
    header: bytes
    payload: bytes
    requester: str
    """Incarnation that asked for it; "" for live data."""
    place: tuple[object, ...]
    """Equal for two messages that carry the same chunk to the same reader."""
    line_bytes: int
    lossy: bool = False
    """It has waited long enough: send it with NODROP off. Readers without room lose it and fetch it
    later, and libzmq skips their pipes until they have room again."""


@dataclass(eq=False)
class _Lane:
    """Messages that wait on one topic, never empty."""

    entries: deque[Entry] = field(default_factory=deque[Entry])
    retry_at: float = -math.inf
    """When the head is tried again: it met a full pipe."""
    loses_from: float | None = None
    """The time from which the wait of that head costs the others; None: it met no full pipe."""


_Lanes: TypeAlias = dict[str, _Lane]
"""Lanes by topic, in the order of their turns."""


@dataclass(eq=False)
class _Patience:
    """Time for which live data may still wait for readers that do not keep up.

    Lanes that wait side by side use it once: each is charged from when the last one was.
    """

    _left_s: float = PATIENCE_S
    _charged_at: float = 0.0

    def left_s(self, loses_from: float, now: float) -> float:
        """The rest of it after a wait that costs the others since `loses_from`."""
        refilled_s = self._left_s + PATIENCE_REFILL * (now - self._charged_at)
        used_s = max(0.0, now - max(loses_from, self._charged_at))
        return min(PATIENCE_S, refilled_s) - used_s

    def charge(self, loses_from: float, now: float) -> None:
        """Such a wait is over."""
        self._left_s = max(0.0, self.left_s(loses_from, now))
        self._charged_at = now


class Sender:
    """Two queues in front of the budgets `total` (all learners) and `each` (one learner), in bit/s.

    A publication leaves once and reaches `fan_out` connections: it is charged so often to the
    total, and once to the share of each learner. Times are seconds on the caller's monotonic clock.
    """

    def __init__(self, *, total: float = 0.0, each: float = 0.0, curve: bool = False) -> None:
        self.fan_out = 1
        """Connections that live data goes to."""
        self.ready = True
        """False: the other side does not listen yet, and nothing leaves."""
        self.sent_bytes = self.received_bytes = 0
        """Bytes on the line: frames and the overhead of every layer, without acknowledgements."""
        self.total = Budget(total)
        """The rate of all learners together. Its owner may set it anew."""
        self._live_share = Budget(each)
        """The share of a learner that gets live data alone."""
        self._shares: dict[str, Budget] = {}
        """Shares of the learners that fetched within the last second."""
        self._live: _Lanes = {}
        self._asked: _Lanes = {}
        self._places: set[tuple[object, ...]] = set()
        """The places of all waiting entries."""
        self._curve = curve
        self._patience = _Patience()
        self._live_in_row = 0
        self._paused = True
        """Nothing waits, or nothing did until now."""

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._places)

    # What is to be sent.

    def put(self, topic: str, about: Header, payload: bytes, *, requester: str = "") -> bool:
        """Queues a message to everybody, or to the incarnation that asked for it. False: its chunk
        waits already, here or live."""
        # In a STATE the push id tells the outcome of a push: the chunk is the same with any other.
        push_id = about.push_id if about.kind is DataKind.PUSH else 0
        chunk = (about.epoch, about.kind, about.fragment, about.version, push_id, about.chunk)
        place = (requester, *chunk)
        if place in self._places or ("", *chunk) in self._places:
            return False
        self._places.add(place)
        header = encode_header(about)
        line_bytes = wire_bytes((len(topic), len(header), len(payload)), self._curve)
        entry = Entry(topic, about, header, payload, requester, place, line_bytes)
        self._lanes(requester).setdefault(topic, _Lane()).entries.append(entry)
        return True

    def discard(self, unwanted: Callable[[Header], bool]) -> None:
        """Drops what waits and is of no use any more."""
        for lanes in (self._live, self._asked):
            for topic, lane in list(lanes.items()):
                gone = {entry.place for entry in lane.entries if unwanted(entry.about)}
                self._places -= gone
                lane.entries = deque(each for each in lane.entries if each.place not in gone)
                if not lane.entries:
                    del lanes[topic]
        self._paused = self._paused or not self._places

    # What leaves without waiting.

    def charge(self, frame_sizes: Iterable[int], now: float) -> None:
        """A control message leaves."""
        line_bytes = wire_bytes(frame_sizes, self._curve)
        self.sent_bytes += line_bytes
        self.total.charge(line_bytes, now)

    def received(self, frame_sizes: Iterable[int], now: float) -> None:
        """A message has come; its acknowledgements leave."""
        line_bytes = wire_bytes(frame_sizes, self._curve)
        self.received_bytes += line_bytes
        self.total.acknowledge(line_bytes, now)

    # What leaves next.

    def due(self, now: float) -> Entry | None:
        """The message to send now, if one may leave."""
        if self._paused and self._places:
            self._paused = False
            for budget in (self.total, self._live_share, *self._shares.values()):
                budget.resume(now)
        at, entry = self._next(now)
        return entry if at <= now else None

    def deadline(self, now: float) -> float:
        """When `due` has a message; infinite: not before another one is put."""
        at, _ = self._next(now)
        return at

    def sent(self, entry: Entry, now: float) -> None:
        """The socket took the message that was due."""
        lanes = self._lanes(entry.requester)
        lane = lanes.pop(entry.topic)
        assert lane.entries[0] is entry, "another message than the one that was due"
        if lane.loses_from is not None:
            self._patience.charge(lane.loses_from, now)
        lane.entries.popleft()
        if lane.entries:
            # Behind the other lanes: they take turns.
            lanes[entry.topic] = _Lane(lane.entries)
        self._places.remove(entry.place)
        self._paused = not self._places
        self._live_in_row = 0 if entry.requester else self._live_in_row + 1

        if entry.requester and self._live_share.bits_per_s and entry.requester not in self._shares:
            self._shares[entry.requester] = deepcopy(self._live_share)
        total_bytes = self._total_bytes(entry)
        self.sent_bytes += total_bytes
        self.total.charge(total_bytes, now)
        for share in self._shares_of(entry):
            share.charge(entry.line_bytes, now)
        # Once what a learner asked for is out of the window, its history is that of live data.
        live_bytes = self._live_share.in_window(now)
        for requester, share in list(self._shares.items()):
            if share.in_window(now) == live_bytes:
                del self._shares[requester]

    def blocked(self, entry: Entry, now: float) -> None:
        """The socket had no room. The lane is tried again in RETRY_S; live data for several readers
        is, once patience is used up, due at once and lossy."""
        lane = self._lanes(entry.requester)[entry.topic]
        assert lane.entries[0] is entry, "another message than the one that was due"
        lane.retry_at = now + RETRY_S
        if entry.requester or self.fan_out < 2:
            return  # A single reader holds up nobody but itself.
        if lane.loses_from is None:
            budgets = (self.total, *self._shares_of(entry))
            lane.loses_from = max(now, *(budget.loses_from() for budget in budgets))
        left_s = lane.loses_from + PATIENCE_S - now
        if self.total.bits_per_s or self._live_share.bits_per_s:
            # Patience is one allowance for all messages.
            left_s = self._patience.left_s(lane.loses_from, now)
        if left_s <= 0:
            entry.lossy = True
            lane.retry_at = now

    def _next(self, now: float) -> tuple[float, Entry | None]:
        """The message that leaves next, and when."""
        if not self.ready:
            return math.inf, None
        live_at, live = self._first(self._live, now)
        asked_at, asked = self._first(self._asked, now)
        # A message that waits for its budget keeps its turn: else a smaller one of the other queue
        # would overtake it again and again. One that waits for its pipe does not.
        if asked and asked.retry_at <= now and (not live or self._live_in_row >= TURN - 1):
            return asked_at, asked.entries[0]
        if live and (live.retry_at <= now or live_at < asked_at):
            return live_at, live.entries[0]
        return asked_at, asked.entries[0] if asked else None

    def _first(self, lanes: _Lanes, now: float) -> tuple[float, _Lane | None]:
        """The lane that may send first, and when; of those that may now, the next in turn."""
        first_at = math.inf
        first = None
        for lane in lanes.values():
            head = lane.entries[0]
            # The total is the same for all: while it is closed one lane is looked at, not all.
            shares_at = [share.opens_at(head.line_bytes, now) for share in self._shares_of(head)]
            at = max(lane.retry_at, *shares_at)
            if at < first_at:
                first_at = at
                first = lane
            if at <= now:
                break
        if first is None:
            return math.inf, None
        total_at = self.total.opens_at(self._total_bytes(first.entries[0]), now)
        return max(first_at, total_at), first

    def _lanes(self, requester: str) -> _Lanes:
        return self._asked if requester else self._live

    def _total_bytes(self, entry: Entry) -> int:
        """Bytes of a message that the total is charged with; a share is charged with one copy."""
        return entry.line_bytes if entry.requester else entry.line_bytes * self.fan_out

    def _shares_of(self, entry: Entry) -> list[Budget]:
        """The shares of the learners that a message goes to; of those that do not fetch, one."""
        if entry.requester:
            return [self._shares.get(entry.requester, self._live_share)]
        return [self._live_share, *self._shares.values()]
