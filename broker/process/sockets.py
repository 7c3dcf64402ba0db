"""The broker's three sockets: control, uplink and downlink; and how a revoked key is cut off.

libzmq marks each frame with the key of its connection, so the broker believes a message as far as
that key goes. When a key leaves the allow list, the broker ends the connections of that key, and
those that have said nothing yet: they may be of that key, too.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import zmq

from narrows.broker.config import BrokerConfig
from narrows.broker.process.connections import Connections
from narrows.broker.process.door import Door, bind, listening_address
from narrows.broker.process.downlink import TOPICS_MAX, Connection
from narrows.broker.process.host import Host
from narrows.proto.config import Address
from narrows.proto.keys import KeyPair, read_broker_key, serve_keys
from narrows.proto.sockets import Kind, make_socket, send_buffer_bytes

LOOK_S: Final = 1.0
"""Seconds between two looks at the allow list, and for connections that have ended."""

MESSAGES_PER_TURN: Final = 64
"""Messages that are read from one socket before the others have their turn."""

FRAMES_MAX: Final = 8
"""Frames of a message that are handed on; every message of the protocol has three. A message may
have millions of empty ones, and libzmq makes us read them all."""

SURPLUS_PER_TURN: Final = 10_000
"""Frames beyond FRAMES_MAX that are thrown away before the loop goes on: some 10 ms."""

PEERS_MAX: Final = 10_000
"""Connections whose keys are remembered, those that spoke last."""

REBIND_S: Final = 2.0
"""Seconds for which a port that the kernel has not freed yet is tried again."""

Socket: TypeAlias = "zmq.Socket[bytes]"


class Received(NamedTuple):
    """A message as it came, and whose it is."""

    descriptor: int
    """File descriptor of the connection."""
    key: str
    """The connection's key; "" without keys."""
    site: str | None
    """The site for which that key speaks; None: for nobody, or there are no keys."""
    frames: list[zmq.Frame]


class BrokerSockets:
    """The broker's `Wires`. One thread uses them."""

    def __init__(self, config: BrokerConfig) -> None:
        """Binds. Raises ConfigError, INSECURE for an address beyond loopback without keys, and
        ADDRESS_IN_USE."""
        keys = config.broker.keys
        self._host, port = listening_address(
            config.broker.listen,
            has_keys=bool(keys),
            insecure=config.broker.insecure,
            flag="--keys",
        )
        self._buffer_bytes = send_buffer_bytes(config.down_rate, config.shared.streams)
        # libzmq numbers the connections of a ROUTER from rand() on, which nothing seeds: a peer
        # could claim the next number, and an assertion of libzmq would end the process.
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=2)
        self.door: Door | None = None
        self._key: KeyPair | None = None
        self._authenticator = None
        self._keys: dict[str, str] = {}
        """Connection -> key, of control messages; who spoke last stands at the end."""
        # The message that the host is handling:
        self._asker = ""
        """Its connection; "": the uplink, or no message."""
        self._asker_key = ""
        self._asker_is_learner = False
        self.pollable: list[Socket] = []
        """The three, and those that tell of their connections."""
        self._in_surplus: set[Socket] = set()
        """Sockets at which the rest of a message that is too long waits to be thrown away."""
        self._looked_at = 0.0
        self._gone: set[str] = set()
        """Keys that have left the allow list at the last look."""
        try:
            if keys:
                folder = Path(keys)
                self._key = read_broker_key(folder)
                self.door = Door(folder, time.monotonic())
                # Before anything is bound: a handshake that nobody answers is refused for good.
                self._authenticator = serve_keys(self._context, self.door.admits)
            # Port 0 leaves all three to the system.
            self._open([port, port + 1, port + 2] if port else [0, 0, 0])
            self.listens_on = str(Address(self._host, self.ports[0]))
            """The control port's address, with the port that was free if any would do."""
        except BaseException:
            self.close(linger_s=0.0)
            raise

    def _open(self, ports: list[int], until: float = 0.0) -> None:
        """Makes the three sockets and binds them, if need be again and again `until`."""
        ipv6 = Address(self._host, 0).listens_on_ipv6
        for kind in (Kind.BROKER_CONTROL, Kind.BROKER_UPLINK, Kind.BROKER_DOWNLINK):
            self.pollable.append(
                make_socket(
                    self._context,
                    kind,
                    pair=self._key,
                    send_buffer_bytes=self._buffer_bytes,
                    ipv6=ipv6,
                )
            )
        three = list(self.pollable)
        self._control, self._uplink, self._downlink = three
        self._connections: dict[Socket, Connections] = {}
        for socket in three:
            tells_silent = self._key is not None and socket is self._control
            connections = Connections(self._context, socket, tells_silent=tells_silent)
            self._connections[socket] = connections
            self.pollable.append(connections.monitor)
        self.ports = [
            bind(socket, Address(self._host, port), until)
            for socket, port in zip(three, ports, strict=True)
        ]
        self._uplink.setsockopt(zmq.SUBSCRIBE, b"")

    # -- the way out

    def control(self, peer: str, frames: list[bytes]) -> bool:
        """Sends to a connection; a peer that reads nothing of a thousand messages is lost anyway,
        and so is one that is gone."""
        try:
            self._control.send_multipart([bytes.fromhex(peer), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        if peer == self._asker and self.door is not None:
            size_bytes = sum(len(frame) for frame in frames)
            self.door.answered(self._asker_key, size_bytes, is_learner=self._asker_is_learner)
        return True

    def fault(self, peer: str, now: float) -> None:
        """The host has refused a message of a connection; "": the one that it is handling."""
        key = self._keys.get(peer, self._asker_key)
        if self.door is not None and key:
            self.door.strike(key, now)

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        """Sends to all who listen to the topic. A connection without room holds the message back,
        unless it is `lossy`: then libzmq skips that connection until it has read half its queue."""
        parts = [topic.encode(), header, payload]
        try:
            self._downlink.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if not lossy:
                return False
            self._downlink.setsockopt(zmq.XPUB_NODROP, 0)
            self._downlink.send_multipart(parts, zmq.NOBLOCK, copy=False)
            self._downlink.setsockopt(zmq.XPUB_NODROP, 1)
        return True

    # -- the way in

    def receive(self, host: Host, now: float) -> None:
        """Hands the host what waits at the sockets, a bounded number of messages of each."""
        for connections in self._connections.values():
            connections.follow()
        # Subscriptions first, so that a new listener misses nothing the messages below publish.
        for received in self._received(self._downlink):
            self._read_subscription(host, received, now)
        for received in self._admitted(self._control):
            self._read_control(host, received, now)
        for received in self._admitted(self._uplink):
            self._asker = ""
            self._asker_key = received.key
            host.data(received.site, [frame.bytes for frame in received.frames], now)
        self._asker = self._asker_key = ""
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            host.downlink.keep_listeners(lambda each: _open_connection(each.descriptor) == each)
            for connections in self._connections.values():
                connections.look()
            if self.door is not None:
                self._look(self.door, host, now)

    def _read_subscription(self, host: Host, received: Received, now: float) -> None:
        """The first byte of a subscription is 1, that of its end is 0; the topic follows."""
        frame = received.frames[0].bytes
        change = frame[:1]
        topic = frame[1:]
        is_on = change == b"\1"
        if self.door and is_on and not self.door.may_hear(received.key, topic):
            # It would cost the line a second copy, and libzmq cannot refuse it.
            self._keep_out(self.door, received.key, f"it listens to {topic[:80]!r}")
            return
        connection = _open_connection(received.descriptor)
        if connection is None or change not in (b"\0", b"\1"):
            return
        has_room = host.downlink.listens(connection, topic.decode(errors="replace"), is_on, now)
        if self.door is not None and not has_room:
            self._keep_out(self.door, received.key, f"it listens to more than {TOPICS_MAX} topics")

    def _read_control(self, host: Host, received: Received, now: float) -> None:
        key = received.key
        parts = [frame.bytes for frame in received.frames]
        peer = parts[0].hex()
        self._asker = peer
        self._asker_key = key
        if self.door is not None:
            # A name that a connection has chosen may have been another's before.
            self._keys.pop(peer, None)
            self._keys[peer] = key
            if len(self._keys) > PEERS_MAX:
                del self._keys[next(iter(self._keys))]
            self._asker_is_learner = host.is_learner(peer)
            if not self.door.hears(key, host.learners, now, is_learner=self._asker_is_learner):
                # Who only watches the run is not answered. A strike could cut its learners off.
                if self._asker_is_learner:
                    self.fault(peer, now)
                return
        host.control(peer, received.site, parts[1:], now)

    def _look(self, door: Door, host: Host, now: float) -> None:
        """Ends the connections of keys that have left the allow list."""
        gone, sites = door.look(now)
        if door.lacks_descriptor:
            # Strangers and somebody who was revoked may hold every file descriptor. The broker ends
            # all connections first; then it has a descriptor to read the list with. The admitted
            # come back in tenths of a second.
            self._close_sockets(linger_s=0.0)
            until = time.monotonic() + REBIND_S
            while door.lacks_descriptor and time.monotonic() < until:
                time.sleep(0.002)  # libzmq closes them a moment later.
                gone, sites = door.look(now)
            # No connection is left, though a descriptor may still look like a listener's.
            host.downlink.keep_listeners(lambda _: False)
            self._open(self.ports, until=time.monotonic() + REBIND_S)
        if gone or self._gone:
            # One that has said nothing may be of the key that goes; others come back by themselves.
            # Once more at the next look: a thread of libzmq may tell late of a new connection.
            self._end_connections(gone | self._gone, is_silent_ended=True)
            host.revoked(sites, now)
        self._gone = gone

    def _keep_out(self, door: Door, key: str, why: str) -> None:
        door.keep_out(key, why, time.monotonic())
        self._end_connections({key})

    def _end_connections(self, keys: set[str], *, is_silent_ended: bool = False) -> None:
        for connections in self._connections.values():
            connections.end(
                lambda spoken: not keys.isdisjoint(spoken) or (is_silent_ended and not spoken)
            )

    def _admitted(self, socket: Socket) -> Iterator[Received]:
        """Messages that wait at a socket, without those of keys that speak for nobody."""
        for received in self._received(socket):
            if self.door is None or received.site is not None:
                yield received

    def _received(self, socket: Socket) -> Iterator[Received]:
        """Messages that wait at a socket, a bounded number."""
        room = SURPLUS_PER_TURN
        for _ in range(MESSAGES_PER_TURN):
            while socket in self._in_surplus:
                if room == 0:
                    return
                room -= 1
                self._throw_away(socket)
            try:
                frames = [socket.recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more and len(frames) < FRAMES_MAX:
                frames.append(socket.recv(copy=False))
            is_too_long = frames[-1].more
            if is_too_long:
                self._in_surplus.add(socket)
            try:
                descriptor = int(frames[-1].get(zmq.SRCFD))
            except zmq.ZMQError:
                continue  # A connection has ended, and libzmq takes its subscriptions back.
            key = ""
            site = None
            if self.door is not None:
                key = str(frames[-1].get("User-Id"))
                site = self.door.site(key)
            self._connections[socket].heard(descriptor, key)
            # The host refuses what is left of a message that is too long: none has so many frames.
            yield Received(descriptor, key, site, frames)
            if is_too_long and self.door is not None:
                why = f"it sent a message of more than {FRAMES_MAX} frames"
                self._keep_out(self.door, key, why)

    def _throw_away(self, socket: Socket) -> None:
        """Reads a frame of a message that is too long."""
        if socket.getsockopt(zmq.RCVMORE):
            socket.recv()
        else:
            self._in_surplus.remove(socket)

    # -- the end

    def close(self, linger_s: float = 1.0) -> None:
        """Closes everything; what is queued, such as a Bye, has `linger_s` to leave."""
        self._close_sockets(linger_s)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _close_sockets(self, linger_s: float) -> None:
        for socket in self.pollable:
            socket.close(linger=round(1000 * linger_s))
        self.pollable.clear()
        self._in_surplus.clear()


def _open_connection(descriptor: int) -> Connection | None:
    """The connection behind a file descriptor; None: it has ended. The system uses the number again
    after that, but not together with the inode."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return Connection(descriptor, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None
