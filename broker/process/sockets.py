"""The broker's three sockets: bind, receive, send, count bytes. No decisions."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from narrows.broker.process.gate import Gate
from narrows.broker.process.subscriptions import Subscriptions
from narrows.proto import socket_options
from narrows.proto.address import Address, parse_listen
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.key_holder import KeyHolder
from narrows.proto.keys import read_broker_key, read_ring

FRAMES_PER_TURN = 64
"""Messages that are read from one socket before the others get their turn. Data must not keep Hello
and Report waiting."""


@dataclass
class Traffic:
    """Bytes of ZeroMQ frames with one learner."""

    up_bytes: int = 0
    down_bytes: int = 0


class Origin(NamedTuple):
    """The connection from which a message came."""

    descriptor: int = -1
    """Its file descriptor; another connection may have it by now."""
    address: str = ""
    key: str = ""
    """Public key that it has proved; empty: the broker has no keys."""
    holder: KeyHolder | None = None
    """None: the broker has no keys, or the key is nobody's any more."""


@dataclass
class BrokerSockets:
    """ROUTER for control, SUB for the uplink, XPUB for the downlink, and the gate if there are
    keys."""

    context: zmq.Context[zmq.Socket[bytes]]
    gate: Gate | None
    control: zmq.Socket[bytes]
    uplink: zmq.Socket[bytes]
    downlink: zmq.Socket[bytes]
    address: str
    uplink_port: int
    downlink_port: int
    subscribed: Subscriptions = field(default_factory=Subscriptions)
    """Topics with listeners. A message to a topic without one is lost."""

    @classmethod
    def bind(
        cls, listen: str, *, uplink_port: int, downlink_port: int, insecure: bool, keys: str = ""
    ) -> BrokerSockets:
        """Binds all three. Raises ConfigError for a bad address, a bad key or ring, PORT_IN_USE for
        a taken port."""
        host, port = address = _listen_address(listen, insecure=insecure or bool(keys))
        context = _context()
        try:
            gate = _gate(context, Path(keys)) if keys else None
            make = partial(_socket, context, gate, ipv6=address.is_ipv6)
            control = make(zmq.ROUTER, socket_options.ROUTER)
            control_port = _bind(control, host, port, "control")
            up_port = uplink_port or (control_port + 1 if port else 0)
            down_port = downlink_port or (control_port + 2 if port else 0)
            uplink = make(zmq.SUB, socket_options.DATA)
            uplink.setsockopt(zmq.SUBSCRIBE, b"")
            up = _bind(uplink, host, up_port, "uplink")
            downlink = make(zmq.XPUB, socket_options.XPUB)
            down = _bind(downlink, host, down_port, "downlink")
        except NarrowsError:
            context.destroy(linger=0)
            raise
        where = f"tcp://{host}:{control_port}"
        return cls(context, gate, control, uplink, downlink, where, up, down)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """The sockets that a poll loop watches."""
        return [
            self.control,
            self.uplink,
            self.downlink,
            *([self.gate.socket] if self.gate else []),
        ]

    def receive_control(self) -> tuple[bytes, Origin, list[bytes]] | None:
        """(peer, origin, frames) of the next control message, None if there is none."""
        try:
            frames = self.control.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return frames[0].bytes, self._origin(frames[-1]), [frame.bytes for frame in frames[1:]]

    def receive_data(self) -> tuple[Origin, list[bytes]] | None:
        """(origin, frames) of the next data message, None if there is none."""
        try:
            frames = self.uplink.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return self._origin(frames[-1]), [frame.bytes for frame in frames]

    def _origin(self, frame: zmq.Frame) -> Origin:
        """Origin of a message by one of its frames."""
        try:
            descriptor, address = int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
            if self.gate is None:
                return Origin(descriptor, address)
            key = str(frame.get("User-Id"))
        except (zmq.ZMQError, KeyError):
            # A peer of ZMTP 1 has no properties; a CURVE server does not talk to it.
            return Origin()
        return Origin(descriptor, address, key, self.gate.holder(key))

    def read_subscriptions(self) -> set[bytes]:
        """Takes in the subscriptions that have come; returns their topics, repeated ones too."""
        topics: set[bytes] = set()
        while True:
            try:
                frame = self.downlink.recv(zmq.NOBLOCK)
            except zmq.Again:
                return topics
            topics |= self.subscribed.take(frame)

    def send_control(self, peer: bytes, frame: bytes) -> bool:
        """False if the peer's connection is gone."""
        try:
            self.control.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            # The queue is full, so the peer reads nothing. It becomes late, then lost.
            return True
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def send_data(self, topic: bytes, header: bytes, payload: bytes | memoryview) -> None:
        """Queues a data message. The payload is not copied: a publication has many addressees."""
        self.downlink.send_multipart([topic, header, payload], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Closes everything. Queued messages get the linger time of the socket options."""
        for socket in self.sources:
            socket.close()
        self.context.term()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    # libzmq numbers the connections of a ROUTER from rand() on, which nothing seeds: a peer could
    # claim the number that comes next, and an assertion of libzmq would end the process.
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    return zmq.Context(io_threads=2)


def _gate(context: zmq.Context[zmq.Socket[bytes]], keys: Path) -> Gate:
    return Gate.bind(context, read_broker_key(keys), read_ring(keys), time.time())


def _listen_address(listen: str, *, insecure: bool) -> Address:
    """The address to listen on; without keys and --insecure only on loopback."""
    address = parse_listen(listen)
    if not address.is_loopback and not insecure:
        raise NarrowsError(
            ErrorCode.INSECURE,
            "anybody who reaches this address could read and change the model",
            expected="keys, or a loopback address",
            got=listen,
            remedy=f"""make keys with these three commands:
  narrows keys new
  narrows keys invite NAME --address tcp://HOST:{address.port}
  narrows broker --listen {listen} --keys keys
or pass --insecure on a network that you trust""",
        )
    return address


def _socket(
    context: zmq.Context[zmq.Socket[bytes]],
    gate: Gate | None,
    kind: int,
    options: dict[str, int],
    *,
    ipv6: bool,
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, ipv6)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    if gate is not None:
        gate.protect(socket)
    return socket


_NOT_OURS: Final = "listen on an address of this machine"
_CANNOT_BIND: Final[Mapping[int | None, tuple[ErrorCode, str]]] = {
    errno.EADDRINUSE: (
        ErrorCode.PORT_IN_USE,
        "stop the other process (is a broker running already?) or choose another --listen port; a "
        "broker uses that port and the two after it",
    ),
    errno.EACCES: (ErrorCode.CONFIG, "choose a port from 1024 on: this user may not take the port"),
}


def _bind(socket: zmq.Socket[bytes], host: str, port: int, what: str) -> int:
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        code, remedy = _CANNOT_BIND.get(error.errno, (ErrorCode.CONFIG, _NOT_OURS))
        raise NarrowsError(
            code, f"cannot bind the {what} port",
            expected=f"tcp://{host}:{port} to be free and local", got=str(error), remedy=remedy,
        ) from error  # fmt: skip
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rstrip("\0").rsplit(":", 1)[1])
