"""The broker's three sockets: ROUTER for control, SUB for the uplink, XPUB for the downlink.

Each frame of a connection carries its key, so a message is believed as far as the key goes. libzmq
cannot close one connection: when a key must go, all three sockets are closed and bound again, which
takes milliseconds, and the admitted come back by themselves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Final, TypeAlias

import zmq

from narrows.broker.config import BrokerConfig
from narrows.broker.process.door import Door
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.keys import KeyPair, read_broker_key, serve_keys
from narrows.proto.sockets import Kind, make_socket, send_buffer_bytes

FRAMES_PER_TURN: Final = 64
"""Messages that are read from one socket before the others have their turn."""

LOOK_S: Final = 1.0
"""Seconds between two looks for connections that have ended."""

REBIND_S: Final = 2.0
"""Seconds for which a port that the kernel has not freed yet is tried again."""

Socket: TypeAlias = "zmq.Socket[bytes]"


class Link:
    """Wires of the broker. One thread uses it."""

    def __init__(self, config: BrokerConfig) -> None:
        """Binds. Raises ConfigError, INSECURE for an address beyond loopback without keys, and
        ADDRESS_IN_USE."""
        self._config = config
        self._address = _listen_address(config)
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
            if config.broker.keys:
                folder = Path(config.broker.keys)
                self._key, self.door = read_broker_key(folder), Door(folder, time.monotonic())
                # Before anything is bound: a handshake that nobody answers is refused for good.
                self._authenticator = serve_keys(self._context, self.door.admits)
            port = self._address.port
            self._open([port, port and port + 1, port and port + 2], wait_s=0.0)
        except BaseException:
            self.close(linger_s=0.0)
            raise

    @property
    def listens_on(self) -> str:
        """The control port's address, with the port that was free if any would do."""
        return str(Address(self._address.host, self.ports[0]))

    def _open(self, ports: list[int], wait_s: float) -> None:
        for kind in (Kind.BROKER_CONTROL, Kind.BROKER_UPLINK, Kind.BROKER_DOWNLINK):
            buffer = send_buffer_bytes(self._config.down_rate, self._config.shared.streams)
            self.sockets.append(
                make_socket(
                    self._context,
                    kind,
                    pair=self._key,
                    send_buffer_bytes=buffer,
                    ipv6=self._address.host.startswith("["),
                )
            )
        until = time.monotonic() + wait_s
        self.ports = [
            _bind(socket, self._address.host, port, until)
            for socket, port in zip(self.sockets, ports, strict=True)
        ]
        self._control, self._uplink, self._downlink = self.sockets
        self._uplink.setsockopt(zmq.SUBSCRIBE, b"")

    def _reopen(self) -> None:
        """Ends every connection; those whose keys are admitted come back in tenths of a second."""
        self._close_sockets(linger_s=0.0)
        self._open(self.ports, wait_s=REBIND_S)

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
        self._subscriptions(host, now)  # First: what comes next may publish to new listeners.
        for _ in range(FRAMES_PER_TURN):
            if (frames := _receive(self._control)) is None:
                break
            site, key = self._site(frames)
            if key is None or site is not None:
                peer, *rest = (frame.bytes for frame in frames)
                self._judge(key, host.control(peer.hex(), site, rest, now), now)
        for _ in range(FRAMES_PER_TURN):
            if (frames := _receive(self._uplink)) is None:
                break
            site, key = self._site(frames)
            if key is None or site is not None:
                fine = host.data(site, [frame.bytes for frame in frames], now)
                self._judge(key, fine, now)
        if self.door is not None and self.door.look(now):
            self._reopen()
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            host.downlink.keep_listeners(lambda each: _identity(each[0]) == each)

    def _subscriptions(self, host: Host, now: float) -> None:
        """Tells the host who listens to what. Who listens to what another asked for is cut off: it
        would cost the line a second copy, and libzmq has no other way to refuse it."""
        for _ in range(FRAMES_PER_TURN):
            if (frames := _receive(self._downlink)) is None:
                return
            change, topic = frames[0].bytes[:1], frames[0].bytes[1:]
            try:
                connection = _identity(int(frames[0].get(zmq.SRCFD)))
            except zmq.ZMQError:  # libzmq takes the topics of a connection back that has ended.
                continue
            if change == b"\x01" and self.door is not None:
                _, key = self._site(frames)
                if key is not None and not self.door.may_hear(key, topic):
                    self.door.keep_out(key, f"it listens to {topic[:80]!r}", now)
                    self._reopen()
                    return
            if connection is not None and change in (b"\x00", b"\x01"):
                text = topic.decode(errors="replace")
                host.downlink.listens(connection, text, change == b"\x01", now)

    def _site(self, frames: list[zmq.Frame]) -> tuple[str | None, str | None]:
        """(site, key) of a message: (None, None) without keys, (None, key) for a key that nobody
        holds or that is kept out."""
        if self.door is None:
            return None, None
        key = str(frames[-1].get("User-Id"))
        return self.door.site(key), key

    def _judge(self, key: str | None, fine: bool, now: float) -> None:
        if key is not None and self.door is not None and not fine:
            self.door.strike(key, now)

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


def _identity(descriptor: int) -> Connection | None:
    """The connection behind a file descriptor: its number is used again after its end, but not
    together with its inode. None: it has ended."""
    try:
        return descriptor, os.fstat(descriptor).st_ino
    except OSError:
        return None


def _receive(socket: Socket) -> list[zmq.Frame] | None:
    """The frames of the next message, with their properties; None: there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _listen_address(config: BrokerConfig) -> Address:
    """The address to listen on. Beyond loopback it needs keys, or the word of the operator."""
    listen = config.broker.listen
    address = parse_address(listen, listen=True)
    if not (address.is_loopback or config.broker.keys or config.broker.insecure):
        raise NarrowsError(
            ErrorCode.INSECURE,
            "anybody who reaches this address could read and change the model",
            expected="--keys, or a loopback address",
            got=listen,
            remedy="`narrows keys new --keys FOLDER` makes one, `narrows keys allow` admits sites; "
            "or set broker.insecure on a network that you trust",
        )
    return address


def _bind(socket: Socket, host: str, port: int, until: float) -> int:
    """Binds, if need be again and again `until`; the port. Raises ADDRESS_IN_USE, CONFIG."""
    while True:
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
            break
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.002)
                continue
            in_use = error.errno == errno.EADDRINUSE
            raise NarrowsError(
                ErrorCode.ADDRESS_IN_USE if in_use else ErrorCode.CONFIG,
                f"cannot listen on tcp://{host}:{port}",
                expected="three free ports in a row of this machine",
                got=str(error),
                remedy="is a broker running already? Choose another port with --listen"
                if in_use
                else "choose an address of this machine, and a port from 1024 on",
            ) from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rstrip("\0").rpartition(":")[2])
