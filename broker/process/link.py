"""The broker's three sockets, control, uplink and downlink, and how a revoked key is cut off.

Each frame of a connection carries its key, so a message is believed as far as the key goes. When a
key must go, its connections are ended, and those that have said nothing yet: they may be its own.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import zmq

from narrows.broker.config import BrokerConfig
from narrows.broker.process.connections import Connections
from narrows.broker.process.door import Door, bind, listening_address
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.proto.config import Address
from narrows.proto.keys import KeyPair, read_broker_key, serve_keys
from narrows.proto.sockets import Kind, make_socket, send_buffer_bytes

LOOK_S: Final = 1.0
"""Seconds between two looks at the allow list, and for connections that have ended."""

FRAMES_PER_TURN: Final = 64
"""Messages that are read from one socket before the others have their turn."""

PEERS_MAX: Final = 10_000
"""Connections whose keys are remembered, those that spoke last."""

REBIND_S: Final = 2.0
"""Seconds for which a port that the kernel has not freed yet is tried again."""

Socket: TypeAlias = "zmq.Socket[bytes]"


class Link:
    """Wires of the broker. One thread uses it."""

    def __init__(self, config: BrokerConfig) -> None:
        """Binds. Raises ConfigError, INSECURE for an address beyond loopback without keys, and
        ADDRESS_IN_USE."""
        keys, insecure = config.broker.keys, config.broker.insecure
        self._host, port = listening_address(
            config.broker.listen, has_keys=bool(keys), insecure=insecure, flag="--keys"
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
        self._asker = "", ""
        self._asker_is_learner = False
        """Connection ("": the uplink) and key of the message that the host is handling."""
        self.sockets: list[Socket] = []
        """The three, and those that tell of their connections."""
        self._looked_at = 0.0
        self._gone: set[str] = set()
        """Keys that have left the allow list at the last look."""
        try:
            if keys:
                folder = Path(keys)
                self._key, self.door = read_broker_key(folder), Door(folder, time.monotonic())
                # Before anything is bound: a handshake that nobody answers is refused for good.
                self._authenticator = serve_keys(self._context, self.door.admits)
            self._open([port, port and port + 1, port and port + 2])
        except BaseException:
            self.close(linger_s=0.0)
            raise

    @property
    def listens_on(self) -> str:
        """The control port's address, with the port that was free if any would do."""
        return str(Address(self._host, self.ports[0]))

    def _open(self, ports: list[int], until: float = 0.0) -> None:
        ipv6, size = Address(self._host, 0).listens_on_ipv6, self._buffer_bytes
        for kind in (Kind.BROKER_CONTROL, Kind.BROKER_UPLINK, Kind.BROKER_DOWNLINK):
            self.sockets.append(
                make_socket(self._context, kind, pair=self._key, send_buffer_bytes=size, ipv6=ipv6)
            )
        self._control, self._uplink, self._downlink = three = tuple(self.sockets)
        self._connections = {
            each: Connections(
                self._context, each, tells_silent=self._key is not None and each is self._control
            )
            for each in three
        }
        self.sockets += [each.monitor for each in self._connections.values()]
        pairs = zip(three, ports, strict=True)
        self.ports = [bind(socket, Address(self._host, port), until) for socket, port in pairs]
        self._uplink.setsockopt(zmq.SUBSCRIBE, b"")

    def _reopen(self, host: Host) -> None:
        """After the end of all connections; the admitted come back in tenths of a second."""
        # libzmq closes them a moment later: until then a descriptor would look like a listener.
        host.downlink.keep_listeners(lambda _: False)
        self._open(self.ports, until=time.monotonic() + REBIND_S)

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
        asker, key = self._asker
        if peer == asker and self.door is not None:
            self.door.answered(key, sum(map(len, frames)), is_learner=self._asker_is_learner)
        return True

    def fault(self, peer: str, now: float) -> None:
        """The host has refused a message of a connection; "": the one that it is handling."""
        key = self._keys.get(peer, self._asker[1])
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
        # First: what the other messages lead to may be published to new listeners.
        for descriptor, key, _, (frame, *_) in self._received(self._downlink):
            change, topic, connection = frame.bytes[:1], frame.bytes[1:], _open(descriptor)
            if self.door and change == b"\1" and not self.door.may_hear(key, topic):
                # It would cost the line a second copy, and libzmq cannot refuse it.
                self.door.keep_out(key, f"it listens to {topic[:80]!r}", now)
                self._end_connections({key})
                continue
            if connection is not None and change in (b"\0", b"\1"):
                text = topic.decode(errors="replace")
                host.downlink.listens(connection, text, change == b"\1", now)
        for socket in (self._control, self._uplink):
            for _, key, site, frames in self._received(socket):
                if self.door is not None and site is None:
                    continue
                parts = [frame.bytes for frame in frames]
                if socket is self._uplink:
                    self._asker = "", key
                    host.data(site, parts, now)
                else:
                    self._read_control(host, parts, key, site, now)
        self._asker = "", ""
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            host.downlink.keep_listeners(lambda each: _open(each.descriptor) == each)
            for connections in self._connections.values():
                connections.look()
            if self.door is not None:
                self._look(self.door, host, now)

    def _read_control(
        self, host: Host, parts: list[bytes], key: str, site: str | None, now: float
    ) -> None:
        peer = parts[0].hex()
        self._asker = peer, key
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
        host.control(peer, site, parts[1:], now)

    def _look(self, door: Door, host: Host, now: float) -> None:
        """Ends the connections of keys that have left the allow list."""
        gone, sites = door.look(now)
        if door.lacks_descriptor:
            # Strangers may hold them all, together with somebody who was revoked: their connections
            # end first, then there is one to read the list with.
            self._close_sockets(linger_s=0.0)
            until = time.monotonic() + REBIND_S
            while door.lacks_descriptor and time.monotonic() < until:
                time.sleep(0.002)  # libzmq closes them a moment later.
                gone, sites = door.look(now)
            self._reopen(host)
        if gone or self._gone:
            # One that has said nothing may be of the key that goes; others come back by themselves.
            # Once more at the next look: a thread of libzmq may tell late of a new connection.
            self._end_connections(gone | self._gone, is_silent_ended=True)
            host.revoked(sites, now)
        self._gone = gone

    def _end_connections(self, keys: set[str], *, is_silent_ended: bool = False) -> None:
        for connections in self._connections.values():
            connections.end(
                lambda spoken: not keys.isdisjoint(spoken) or (is_silent_ended and not spoken)
            )

    def _received(self, socket: Socket) -> Iterator[tuple[int, str, str | None, list[zmq.Frame]]]:
        """Messages that wait at a socket: the connection's file descriptor, its key ("" without
        keys), the site for which that speaks (None: nobody), and the frames."""
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                descriptor = int(frames[-1].get(zmq.SRCFD))
            except zmq.ZMQError:
                continue  # A connection has ended, and libzmq takes its subscriptions back.
            key = str(frames[-1].get("User-Id")) if self.door else ""
            self._connections[socket].heard(descriptor, key)
            yield descriptor, key, self.door.site(key) if self.door else None, frames

    # -- the end

    def close(self, linger_s: float = 1.0) -> None:
        """Closes everything; what is queued, such as a Bye, has `linger_s` to leave."""
        self._close_sockets(linger_s)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _close_sockets(self, linger_s: float) -> None:
        for socket in self.sockets:
            socket.close(linger=round(1000 * linger_s))
        self.sockets.clear()


def _open(descriptor: int) -> Connection | None:
    """The connection behind a file descriptor: its number is used again after its end, but not
    together with its inode. None: it has ended."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return Connection(descriptor, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None
