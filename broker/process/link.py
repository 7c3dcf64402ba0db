"""The broker's three sockets, control, uplink and downlink, and how a revoked key is cut off.

Each frame of a connection carries its key, so a message is believed as far as the key goes. libzmq
cannot close one connection: when a key must go, all three sockets are closed and bound again, which
takes milliseconds, and the admitted come back by themselves.
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
        self.sockets: list[Socket] = []
        self._looked_at = 0.0
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
        self._control, self._uplink, self._downlink = self.sockets
        pairs = zip(self.sockets, ports, strict=True)
        self.ports = [bind(socket, Address(self._host, port), until) for socket, port in pairs]
        self._uplink.setsockopt(zmq.SUBSCRIBE, b"")

    def _reopen(self, host: Host) -> None:
        """Ends every connection; those whose keys are admitted come back in tenths of a second."""
        self._close_sockets(linger_s=0.0)
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
        return True

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
        # First: what the other messages lead to may be published to new listeners.
        for descriptor, key, _, (frame, *_) in self._received(self._downlink):
            change, topic, connection = frame.bytes[:1], frame.bytes[1:], _open(descriptor)
            if self.door and change == b"\1" and not self.door.may_hear(key, topic):
                # It would cost the line a second copy, and libzmq cannot refuse it.
                self.door.keep_out(key, f"it listens to {topic[:80]!r}", now)
                self._reopen(host)
                break
            if connection is not None and change in (b"\0", b"\1"):
                text = topic.decode(errors="replace")
                host.downlink.listens(connection, text, change == b"\1", now)
        for socket in (self._control, self._uplink):
            for _, key, site, frames in self._received(socket):
                if self.door is not None and site is None:
                    continue
                parts = [frame.bytes for frame in frames]
                if socket is self._control:
                    is_fine = host.control(parts[0].hex(), site, parts[1:], now)
                else:
                    is_fine = host.data(site, parts, now)
                if self.door is not None and not is_fine:
                    self.door.strike(key, now)
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            host.downlink.keep_listeners(lambda each: _open(each.descriptor) == each)
            if self.door is not None and (revoked := self.door.look(now)) is not None:
                host.revoked(revoked, now)
                self._reopen(host)

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
