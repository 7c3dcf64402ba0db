"""Every accepted connection, what it holds of our memory, and how it is cut.

ZeroMQ bounds the messages that wait on a connection, not the bytes of one that never ends. So the
bytes that TCP took in are compared with those that came out of the socket. ZeroMQ cannot close one
connection either: shutdown(2) on its descriptor does, at once, and leaves the others alone.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import zmq

from narrows.broker.process.descriptors import byte_counts, peer_of, shut_down
from narrows.broker.process.origin import MessageOrigin
from narrows.broker.process.silent import SilentConnections
from narrows.proto.errors import ErrorCode
from narrows.proto.key_holder import KeyHolder
from narrows.proto.limits import CONTROL_BYTES_MAX
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.units import counted, format_bytes

UPLINK_HELD_MAX: Final = 2 * STREAM_WINDOW_BYTES
"""Bytes that one uplink connection may hold: a sender keeps to its credit, which is half of it."""
CONTROL_HELD_MAX: Final = 2 * CONTROL_BYTES_MAX
"""Bytes that one control connection may hold."""
DOWNLINK_HELD_MAX: Final = 1 << 16
"""Bytes that one downlink connection may hold: subscriptions, which libzmq keeps in a tree with a
node per byte before the broker sees them."""
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

NAMED_MAX: Final = 1024
"""Holders and addresses that are named in the log for what was cut."""

_OPEN_BYTES: Final = {True: 274, False: 84}
"""Bytes that a peer has acknowledged once its handshake is over, with keys and without. With keys:
greeting 64, WELCOME 170, READY at least 54; an ERROR is shorter."""
_FRAME_BYTES: Final = {True: 33, False: 0}
"""Bytes that each frame is longer on the wire, beside its length."""


@dataclass(slots=True)
class Accepted:
    """One accepted TCP connection."""

    source: zmq.Socket[bytes]  # The broker's socket that it belongs to.
    held_max: int
    peer: tuple[str, int]
    """Address and port of the other end. They tell whether the descriptor is still its own."""
    delivered: int = 0
    """Bytes on the wire of all messages that came out of the socket."""
    held: int = 0
    is_open: bool = False  # The handshake is over.
    subscriptions: int = 0
    keys: set[str] = field(default_factory=set[str])
    """Keys of its messages. One as a rule; a message that was read late may show that of the
    connection which had the descriptor before."""


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
        self._context, self._told = context, told
        self._monitors: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes], int]] = []
        self._all: dict[int, Accepted] = {}
        """In the order in which they were accepted."""
        self._half_open: dict[str, dict[int, None]] = {}
        """Descriptors by address, the oldest first."""
        self._half_open_count = 0
        self._by_name: dict[str, dict[int, None]] = {}
        """Descriptors by the holder's name, the oldest first."""
        self._silent = SilentConnections()
        self._cut_at: dict[str, float] = {}
        """Keys whose connections are cut later, when their answer has left."""
        self._named: set[tuple[ErrorCode, str]] = set()
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
        where = f"inproc://connections-{len(self._monitors)}"
        source.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        # Without a limit: a full queue would stop the thread that serves all connections.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(where)
        self._monitors.append((monitor, source, held_max))

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return [monitor for monitor, _, _ in self._monitors]

    def read_events(self, now: float) -> None:
        """Takes in which connections have come and gone."""
        for monitor, source, held_max in self._monitors:
            while True:
                try:
                    frames = monitor.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                event, descriptor = struct.unpack("=Hi", frames[0])
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted(descriptor, source, held_max, now)
                    continue
                known = self._all.get(descriptor)
                if known is None or known.source is not source or not known.subscriptions:
                    self.ended.add((source, descriptor))
                if known is not None and known.source is source:
                    self._forget(descriptor)

    def close(self) -> None:
        for monitor, source, _ in self._monitors:
            source.disable_monitor()
            monitor.close()

    def _accepted(
        self, descriptor: int, source: zmq.Socket[bytes], held_max: int, now: float
    ) -> None:
        self._forget(descriptor)
        peer = peer_of(descriptor)
        if peer is None:
            return  # It is gone already.
        self._all[descriptor] = Accepted(source, held_max, peer)
        self._half_open.setdefault(peer[0], {})[descriptor] = None
        self._half_open_count += 1
        self.scan_at = min(self.scan_at, now + SCAN_S)
        if self._half_open_count > HALF_OPEN_MAX:
            self._cut_half_open()
        if len(self._all) > self._most:
            self._cut_one_too_many()

    def _forget(self, descriptor: int) -> None:
        connection = self._all.pop(descriptor, None)
        if connection is None:
            return
        self._opened(descriptor, connection)
        # Refused handshakes come in hundreds per second, and belong to nobody.
        by_name = self._by_name if connection.keys else {}
        for name in [name for name, those in by_name.items() if descriptor in those]:
            del self._by_name[name][descriptor]
            if not self._by_name[name]:
                del self._by_name[name]
        if not self._all:
            self.scan_at = math.inf

    def _opened(self, descriptor: int, connection: Accepted) -> None:
        if connection.is_open:
            return
        connection.is_open = True
        self._half_open_count -= 1
        those = self._half_open[connection.peer[0]]
        del those[descriptor]
        if not those:
            del self._half_open[connection.peer[0]]

    # Messages.

    def delivered(self, origin: MessageOrigin, frames: Iterable[int], now: float) -> None:
        """A message has come out of a socket; `frames` are the lengths of its frames."""
        if origin.descriptor not in self._all:
            self.read_events(now)
        connection = self._all.get(origin.descriptor)
        if connection is None:
            return
        more = _FRAME_BYTES[self._with_keys]
        connection.delivered += sum(n + more + (2 if n + more < 256 else 9) for n in frames)
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

    def _count(self, descriptor: int, holder: KeyHolder) -> None:
        those = self._by_name.setdefault(holder.name, {})
        those[descriptor] = None
        most = self._most_of(holder)
        if len(those) > most:
            # The oldest goes: after an outage the new ones work, and the old ones are dead.
            oldest = next(iter(those))
            reason = f"more than {counted(most, 'connection')}"
            self._cut_for(oldest, ErrorCode.QUOTA, reason)
            those.pop(oldest, None)

    def admitted(self, address: str, holder: KeyHolder) -> None:
        """A handshake from `address` has proved a key. Read the events before the next scan."""
        self._silent.admitted(address, holder.name, self._most_of(holder))

    def _most_of(self, holder: KeyHolder) -> int:
        """Connections that a holder may have."""
        return 2 * self._streams * max(1, len(holder.carries)) + 4

    # Cutting.

    def cut(self, descriptor: int) -> bool:
        """Ends a connection at once; its messages that wait are still read."""
        connection = self._all.get(descriptor)
        return connection is not None and shut_down(descriptor, connection.peer)

    def cut_keys(self, keys: Iterable[str]) -> int:
        """Ends the connections of these keys, and those that have never sent anything: they may be
        theirs. The others dial again. Returns their number."""
        gone = set(keys)
        if not gone:
            return 0
        those = [d for d, c in self._all.items() if not c.keys or c.keys & gone]
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
        names = [name for name, those in self._by_name.items() if descriptor in those]
        cause = names[0] if names else connection.peer[0]
        text = ""
        if (code, cause) not in self._named and len(self._named) < NAMED_MAX:
            self._named.add((code, cause))
            text = f"connections of {cause} are cut: {reason}"
        self._told(code, text)

    def _cut_half_open(self) -> None:
        """Cuts the oldest connection within its handshake, of the address that has most."""
        those = max(self._half_open.values(), key=len)
        for descriptor in list(those):
            connection = self._all[descriptor]
            counts = byte_counts(descriptor)
            self._opened(descriptor, connection)  # In any case it is not counted any more.
            if counts is not None and counts[0] >= _OPEN_BYTES[self._with_keys]:
                continue
            reason = f"more than {HALF_OPEN_MAX} handshakes at the same time"
            self._cut_for(descriptor, ErrorCode.QUOTA, reason)
            return

    def _cut_one_too_many(self) -> None:
        """Makes room: silent connections go before the newest one. They are forgotten at once,
        because the next one may be accepted before their ends are reported."""
        silent = ((c.peer[0], d) for d, c in self._all.items() if not c.keys and not c.delivered)
        reason = f"more than {self._most} connections in all"
        for descriptor in self._silent.too_many(silent) or [next(reversed(self._all))]:
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
        together: dict[str, int] = {}
        enough = _OPEN_BYTES[self._with_keys]
        for descriptor, connection in list(self._all.items()):
            counts = byte_counts(descriptor)
            if counts is None:
                continue
            acknowledged, received = counts
            if not connection.is_open and acknowledged >= enough:
                self._opened(descriptor, connection)
            connection.held = received - connection.delivered
            if connection.held > connection.held_max:
                self._cut_holding(descriptor, connection.held)
            elif connection.held > DOWNLINK_HELD_MAX:
                for key in self._owners(connection):
                    together[key] = together.get(key, 0) + connection.held
        for key, held in together.items():
            if held > TOGETHER_HELD_MAX:
                of_key = [d for d, c in self._all.items() if key in self._owners(c)]
                self._cut_holding(max(of_key, key=lambda d: self._all[d].held), held)
        cost_s = clock() - begun
        self.scan_at = now + min(max(SCAN_S, cost_s / SCAN_SHARE_MAX), SCAN_MAX_S)

    def _owners(self, connection: Accepted) -> Iterable[str]:
        """Keys to which held bytes are charged; "" stands for all that have never sent a message.
        Without keys nobody knows which of the others belong together."""
        return connection.keys or (() if connection.delivered else ("",))

    def _cut_holding(self, descriptor: int, held: int) -> None:
        self._cut_for(
            descriptor, ErrorCode.TOO_LARGE, f"a message of more than {format_bytes(held)}"
        )
