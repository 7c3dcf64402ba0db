"""Every accepted connection, what it holds of our memory, and how it is cut.

ZeroMQ bounds the messages that wait on a connection, not the bytes of one that never ends. So the
bytes that TCP took in are compared with those that came out of the socket. It does not bound what
waits to leave, and a peer may confirm what it has never read. So the bytes that the socket was
given are compared with those that TCP has got rid of. ZeroMQ cannot close one connection either:
shutdown(2) on its descriptor does, at once, and leaves the others alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import zmq

from narrows.broker.process.accepted import OPEN_BYTES, Accepted, line_bytes
from narrows.broker.process.connection_events import ConnectionEvent, ConnectionEvents
from narrows.broker.process.descriptors import byte_counts, peer_of, shut_down
from narrows.broker.process.half_open import HalfOpen
from narrows.broker.process.listeners import Listeners
from narrows.broker.process.named import Named
from narrows.broker.process.origin import MessageOrigin
from narrows.broker.process.silent import SilentConnections
from narrows.proto.errors import ErrorCode
from narrows.proto.key_holder import KeyHolder
from narrows.proto.limits import CONTROL_UP_BYTES_MAX
from narrows.proto.socket_options import ROUTER, STREAM_WINDOW_BYTES
from narrows.proto.units import counted, format_bytes

UPLINK_HELD_MAX: Final = 2 * STREAM_WINDOW_BYTES
"""Bytes that one uplink connection may hold: a sender keeps to its credit, which is half of it."""
CONTROL_HELD_MAX: Final = 2 * ROUTER["RCVHWM"] * CONTROL_UP_BYTES_MAX
"""Bytes that one control connection may hold: twice the longest messages that may wait."""
DOWNLINK_HELD_MAX: Final = 1 << 16
"""Bytes that one downlink connection may hold: subscriptions, which libzmq keeps in a tree with a
node per byte before the broker sees them."""
QUEUED_MAX: Final = 3 * STREAM_WINDOW_BYTES
"""Bytes that may wait to leave for one downlink connection. A learner's credit is one window of
payload for each stream. A session that begins anew on a connection which stands has a window of its
own. The third is for headers, encryption and the messages with which a stream that stood still is
tried."""
TOGETHER_HELD_MAX: Final = 4 * STREAM_WINDOW_BYTES
"""Bytes that all connections of one key may hold, and all that have never sent a message."""

SUBSCRIPTIONS_MAX: Final = 256
"""Subscription messages of one connection: a learner has one topic for each, and dials again."""

HALF_OPEN_MAX: Final = 512
"""Connections within their handshake. More of them are a flood."""

SCAN_S: Final = 0.05
"""Time between two scans, as long as they are cheap."""
SCAN_SHARE_MAX: Final = 0.02
"""Largest share of the loop's time that goes to scans, up to some thousand connections."""
SCAN_MAX_S: Final = 0.5
"""Longest time between two scans: a fast line brings half a gigabyte in it."""


@dataclass(slots=True)
class _OfHolder:
    """The connections of one holder that have sent a message."""

    most: int  # Connections that it may have.
    descriptors: dict[int, None] = field(default_factory=dict[int, None])  # The oldest first.


Told = Callable[[ErrorCode, str], None]
"""Takes the code of a cut, and a text that is empty if its cause was named before."""


class Connections:
    """The connections of the broker's sockets, by file descriptor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        with_keys: bool,
        streams: int,
        most: int,
        told: Told,
    ) -> None:
        """`most`: connections that are kept at the same time."""
        self._with_keys, self._streams, self._most = with_keys, streams, most
        self._events, self._told = ConnectionEvents(context), told
        self._all: dict[int, Accepted] = {}  # In the order in which they were accepted.
        self._half_open = HalfOpen()
        self._by_name: dict[str, _OfHolder] = {}  # By the holder's account.
        self._listeners = Listeners()
        self._silent = SilentConnections()
        self._cut_at: dict[str, float] = {}
        """Keys whose connections are cut later, when their answer has left."""
        self._named = Named()
        self.scan_at = math.inf
        self.cuts: Counter[str] = Counter()
        """Connections cut, by code."""
        self.ended: set[tuple[zmq.Socket[bytes], int]] = set()
        """Connections that ended before a subscription of theirs was read; the reader clears it."""

    def __len__(self) -> int:
        return len(self._all)

    # Sockets and their events.

    def watch(self, source: zmq.Socket[bytes], held_max: int) -> None:
        """Follows the connections of a socket. Call it before the socket binds."""
        self._events.watch(source, held_max)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return self._events.sources

    def read_events(self, now: float) -> None:
        """Takes in which connections have come and gone."""
        for event in self._events.read():
            if event.has_come:
                self._accepted(event, now)
                continue
            known = self._all.get(event.descriptor)
            if known is None or known.source is not event.source or not known.subscriptions:
                self.ended.add((event.source, event.descriptor))
            if known is not None and known.source is event.source:
                self._forget(event.descriptor)

    def close(self) -> None:
        self._events.close()

    def _accepted(self, event: ConnectionEvent, now: float) -> None:
        descriptor = event.descriptor
        self._forget(descriptor)
        peer = peer_of(descriptor)
        if peer is None:
            return  # It is gone already.
        self._all[descriptor] = Accepted(event.source, event.held_max, peer)
        self._half_open.add(peer[0], descriptor)
        self.scan_at = min(self.scan_at, now + SCAN_S)
        if len(self._half_open) > HALF_OPEN_MAX:
            self._cut_half_open()
        if len(self._all) > self._most:
            self._cut_one_too_many()

    def _forget(self, descriptor: int) -> None:
        connection = self._all.pop(descriptor, None)
        if connection is None:
            return
        self._opened(descriptor, connection)
        self._listeners.forget(descriptor, connection)
        # Refused handshakes come in hundreds per second, and belong to nobody.
        by_name = self._by_name if connection.keys else {}
        for name, those in list(by_name.items()):
            if those.descriptors.pop(descriptor, self) is None and not those.descriptors:
                del self._by_name[name]
        if not self._all:
            self.scan_at = math.inf

    def _opened(self, descriptor: int, connection: Accepted) -> None:
        if not connection.is_open:
            connection.is_open = True
            self._half_open.remove(connection.peer[0], descriptor)

    # Messages.

    def delivered(self, origin: MessageOrigin, frames: Iterable[int], now: float) -> None:
        """A message has come out of a socket; `frames` are the lengths of its frames."""
        if origin.descriptor not in self._all:
            self.read_events(now)
        connection = self._all.get(origin.descriptor)
        if connection is None:
            return
        connection.delivered += line_bytes(frames, with_keys=self._with_keys)
        self._opened(origin.descriptor, connection)
        if origin.key and origin.key not in connection.keys:
            connection.keys.add(origin.key)
            if origin.holder is not None:
                self._count(origin.descriptor, origin.holder)

    def subscribed(self, origin: MessageOrigin) -> None:
        """A subscription or its end has come out of the socket."""
        connection = self._all.get(origin.descriptor)
        if connection is not None:
            connection.subscriptions += 1
            if connection.subscriptions > SUBSCRIPTIONS_MAX:
                self._cut_for(
                    origin.descriptor, ErrorCode.QUOTA, f"more than {SUBSCRIPTIONS_MAX} topics"
                )

    def listens(self, descriptor: int, topic: bytes, *, begins: bool) -> None:
        """From now on the messages of a topic go to a connection, or no more."""
        connection = self._all.get(descriptor)
        if connection is not None:
            change = self._listeners.add if begins else self._listeners.remove
            change(descriptor, connection, topic)

    def handed(self, topic: bytes, *frames: bytes | memoryview) -> None:
        """The socket was given a data message."""
        size_bytes = line_bytes(map(len, (topic, *frames)), with_keys=self._with_keys)
        for connection in self._listeners.of(topic):
            connection.handed += size_bytes

    def _count(self, descriptor: int, holder: KeyHolder) -> None:
        most = self._most_of(holder)
        those = self._by_name.setdefault(holder.account, _OfHolder(most))
        those.most = most
        those.descriptors[descriptor] = None
        if len(those.descriptors) > most:
            # The oldest goes: after an outage the new ones work, and the old ones are dead.
            oldest = next(iter(those.descriptors))
            self._cut_for(oldest, ErrorCode.QUOTA, f"more than {counted(most, 'connection')}")
            those.descriptors.pop(oldest, None)

    def admitted(self, address: str, holder: KeyHolder) -> None:
        """A handshake from `address` has proved a key. Read the events before the next scan."""
        self._silent.admitted(address, holder.account, self._most_of(holder))

    def _most_of(self, holder: KeyHolder) -> int:
        """Connections that a holder may have."""
        return 2 * self._streams * max(1, len(holder.carries)) + 4

    # Cutting.

    def cut(self, descriptor: int, source: zmq.Socket[bytes] | None = None) -> bool:
        """Ends a connection at once; its messages that wait are still read. With `source` only one
        of that socket: another may have the descriptor of one that has ended."""
        connection = self._all.get(descriptor)
        if connection is None or source not in (None, connection.source):
            return False
        return shut_down(descriptor, connection.peer)

    def cut_keys(self, gone: Mapping[str, KeyHolder]) -> int:
        """Ends the connections of keys that had these holders. Those that have never sent anything
        may be theirs if they come from an address at which one of the holders has proved a key:
        they go too, and the honest ones dial again. Returns their number."""
        names = {holder.account for holder in gone.values()}
        those = [
            descriptor
            for descriptor, c in self._all.items()
            if c.keys & gone.keys() or (c.is_silent and self._silent.has(c.peer[0], names))
        ]
        return sum(map(self.cut, those))

    def cut_later(self, key: str, at: float) -> None:
        """Ends the connections of a key at the time `at`."""
        self._cut_at[key] = at

    def refuse(self, origin: MessageOrigin, reason: str) -> None:
        """Ends a connection for a message that no honest peer sends, and tells of it."""
        if origin.descriptor in self._all:
            self._cut_for(origin.descriptor, ErrorCode.BAD_FRAME, reason)
        else:
            self._told(ErrorCode.BAD_FRAME, "")

    def _cut_for(self, descriptor: int, code: ErrorCode, reason: str) -> None:
        connection = self._all.get(descriptor)
        if connection is None or not self.cut(descriptor):
            return
        self.cuts[code] += 1
        names = [name for name, of in self._by_name.items() if descriptor in of.descriptors]
        cause = names[0] if names else connection.peer[0]
        text = f"connections of {cause} are cut: {reason}"
        self._told(code, text if self._named.is_due(f"{code} {cause}", time.monotonic()) else "")

    def _cut_half_open(self) -> None:
        """Cuts the oldest connection within its handshake, of the address that has most."""
        for descriptor in self._half_open.of_worst():
            connection = self._all[descriptor]
            counts = byte_counts(descriptor)
            self._opened(descriptor, connection)  # In any case it is not counted any more.
            if counts is not None and counts[0] >= OPEN_BYTES[self._with_keys]:
                continue
            reason = f"more than {HALF_OPEN_MAX} handshakes at the same time"
            self._cut_for(descriptor, ErrorCode.QUOTA, reason)
            return

    def _cut_one_too_many(self) -> None:
        """Makes room: silent connections go before the newest one. They are forgotten at once,
        because the next one may be accepted before their ends are reported."""
        silent = ((c.peer[0], d) for d, c in self._all.items() if c.is_silent)
        reason = f"more than {self._most} connections in all"
        for descriptor in self._silent.for_room(silent) or [next(reversed(self._all))]:
            self._cut_for(descriptor, ErrorCode.QUOTA, reason)
            self._forget(descriptor)

    # Scans.

    def scan(self, now: float, clock: Callable[[], float]) -> None:
        """Looks at what each connection holds; cuts those that hold too much. `clock` tells the
        processor time of the thread: a scan that had to wait is not a dear one."""
        if now < self.scan_at:
            return
        begun = clock()
        for key in [key for key, at in self._cut_at.items() if now >= at]:
            del self._cut_at[key]
            for descriptor in [d for d, c in self._all.items() if key in c.keys]:
                self.cut(descriptor)
        self._silent.keep({each.peer[0] for each in self._all.values()})
        self._measure()
        self._cut_silent(now)
        cost_s = clock() - begun
        self.scan_at = now + min(max(SCAN_S, cost_s / SCAN_SHARE_MAX), SCAN_MAX_S)

    def _measure(self) -> None:
        together: dict[str, int] = {}
        for descriptor, connection in list(self._all.items()):
            counts = byte_counts(descriptor)
            if counts is None:
                continue
            if not connection.is_open and counts[0] >= OPEN_BYTES[self._with_keys]:
                self._opened(descriptor, connection)
            connection.measure(*counts)
            if connection.queued > QUEUED_MAX:
                self._cut_queued(descriptor, connection.queued)
            elif connection.held > connection.held_max:
                self._cut_holding(descriptor, connection.held)
            elif connection.held > DOWNLINK_HELD_MAX:
                for key in self._owners(connection):
                    together[key] = together.get(key, 0) + connection.held
        for key, held in together.items():
            if held > TOGETHER_HELD_MAX:
                of_key = [d for d, c in self._all.items() if key in self._owners(c)]
                self._cut_holding(max(of_key, key=lambda d: self._all[d].held), held)
        for of_holder in self._by_name.values():
            queued = {d: self._all[d].queued for d in of_holder.descriptors}
            # Half of its connections are downlinks, and two of these more than it has streams.
            if sum(queued.values()) > of_holder.most // 2 * STREAM_WINDOW_BYTES:
                self._cut_queued(max(queued, key=queued.__getitem__), sum(queued.values()))

    def _cut_silent(self, now: float) -> None:
        if not self._with_keys:
            return  # Nobody knows whose they are.
        silent = ((c.peer[0], d) for d, c in self._all.items() if c.is_silent and c.is_open)
        for descriptor in self._silent.due(silent, now):
            self._cut_for(descriptor, ErrorCode.QUOTA, "too many that have never sent a message")

    def _owners(self, connection: Accepted) -> Iterable[str]:
        """Keys to which held bytes are charged; "" stands for all that have never sent a message.
        Without keys nobody knows which of the others belong together."""
        return connection.keys or (("",) if connection.is_silent else ())

    def _cut_queued(self, descriptor: int, queued: int) -> None:
        reason = f"{format_bytes(queued)} wait that it does not read, more than its credit"
        self._cut_for(descriptor, ErrorCode.QUOTA, reason)

    def _cut_holding(self, descriptor: int, held: int) -> None:
        reason = f"a message of more than {format_bytes(held)}"
        self._cut_for(descriptor, ErrorCode.TOO_LARGE, reason)
