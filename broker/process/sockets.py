"""The broker's three sockets: bind, receive, send, count bytes. No decisions."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import zmq

from narrows.broker.process.connections import (
    CONTROL_HELD_MAX,
    DOWNLINK_HELD_MAX,
    UPLINK_HELD_MAX,
    Connections,
    Told,
)
from narrows.broker.process.descriptors import FEW_LEARNERS, connections_max, learners_that_fit
from narrows.broker.process.gate import Gate
from narrows.broker.process.origin import MessageOrigin, origin_of
from narrows.broker.process.parts import MessageReader
from narrows.broker.process.subscription_queue import SubscriptionQueue
from narrows.broker.process.subscriptions import Subscriptions
from narrows.proto import socket_options
from narrows.proto.address import Address, parse_listen
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.keys import read_broker_key, read_ring
from narrows.proto.units import counted

_log = logging.getLogger("narrows.broker")

FRAMES_PER_TURN = 64
"""Messages that are read from one socket before the others get their turn. Data must not keep Hello
and Report waiting."""

CONTROL_PARTS_MAX: Final = 3
"""Parts of a control message that are kept: the peer, and one more than it may have, so that a
wrong number is refused by name."""
DATA_PARTS_MAX: Final = 4
"""Parts of a data message that are kept: one more than it has."""


@dataclass
class Traffic:
    """Bytes of ZeroMQ frames with one learner."""

    up_bytes: int = 0
    down_bytes: int = 0


Allowed: TypeAlias = Callable[[MessageOrigin, bytes], bool]
"""True if a connection may listen to a topic."""


@dataclass
class BrokerSockets:
    """ROUTER for control, SUB for the uplink, XPUB for the downlink, and the gate if there are
    keys."""

    context: zmq.Context[zmq.Socket[bytes]]
    gate: Gate | None
    connections: Connections
    control: zmq.Socket[bytes]
    uplink: zmq.Socket[bytes]
    downlink: zmq.Socket[bytes]
    address: str
    uplink_port: int
    downlink_port: int
    subscribed: Subscriptions = field(default_factory=Subscriptions)
    """Topics with listeners. A message to a topic without one is lost."""

    def __post_init__(self) -> None:
        self._controls = MessageReader(
            self.control, CONTROL_PARTS_MAX, lambda frames: self._too_many(frames[1:])
        )
        self._data = MessageReader(self.uplink, DATA_PARTS_MAX, self._too_many)
        self._subscriptions = SubscriptionQueue(
            self.downlink, self.connections, self.subscribed, self._origin
        )

    @classmethod
    def bind(
        cls, listen: str, *, uplink_port: int, downlink_port: int, insecure: bool, keys: str = "",
        streams: int = 1, told: Told = lambda _code, _text: None,
    ) -> BrokerSockets:  # fmt: skip
        """Binds all three. Raises ConfigError for a bad address, a bad key or ring, PORT_IN_USE for
        a taken port."""
        host, port = address = _listen_address(listen, insecure=insecure or bool(keys))
        context = _context()
        try:
            gate = _gate(context, Path(keys)) if keys else None
            most = _connections_max(streams)
            connections = Connections(
                context, with_keys=bool(keys), streams=streams, most=most, told=told
            )
            make = partial(_socket, context, gate, ipv6=address.is_ipv6)
            control = make(zmq.ROUTER, socket_options.ROUTER)
            connections.watch(control, CONTROL_HELD_MAX)
            control_port = _bind(control, host, port, "control")
            up_port = uplink_port or (control_port + 1 if port else 0)
            down_port = downlink_port or (control_port + 2 if port else 0)
            uplink = make(zmq.SUB, socket_options.DATA)
            uplink.setsockopt(zmq.SUBSCRIBE, b"")
            connections.watch(uplink, UPLINK_HELD_MAX)
            up = _bind(uplink, host, up_port, "uplink")
            downlink = make(zmq.XPUB, socket_options.DOWNLINK)
            connections.watch(downlink, DOWNLINK_HELD_MAX)
            down = _bind(downlink, host, down_port, "downlink")
        except NarrowsError:
            context.destroy(linger=0)
            raise
        where = f"tcp://{host}:{control_port}"
        return cls(context, gate, connections, control, uplink, downlink, where, up, down)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """The sockets that a poll loop watches."""
        gate = [self.gate.socket] if self.gate is not None else []
        return [self.control, self.uplink, self.downlink, *gate, *self.connections.sources]

    def attend(self, now: float) -> None:
        """Answers handshakes and looks after the connections."""
        if self.gate is not None:
            for address, holder in self.gate.answer(now):
                self.connections.admitted(address, holder)
        self.connections.read_events(now)
        self.connections.scan(now, time.thread_time)

    @property
    def is_behind(self) -> bool:
        """True if a socket gave None only because a message of too many parts is being dropped."""
        return self._controls.is_behind or self._data.is_behind

    def receive_control(self) -> tuple[bytes, MessageOrigin, list[bytes]] | None:
        """(peer, origin, frames) of the next control message, None if there is none."""
        while (frames := self._controls.receive()) is not None:
            origin = self._origin(frames[1:])
            if origin is not None:
                return frames[0].bytes, origin, [frame.bytes for frame in frames[1:]]
        return None

    def receive_data(self) -> tuple[MessageOrigin, list[bytes]] | None:
        """(origin, frames) of the next data message, None if there is none."""
        while (frames := self._data.receive()) is not None:
            origin = self._origin(frames)
            if origin is not None:
                return origin, [frame.bytes for frame in frames]
        return None

    def _origin(self, frames: list[zmq.Frame]) -> MessageOrigin | None:
        """Origin of a message; None: its key is nobody's any more, so its connection is cut."""
        origin = origin_of(frames[-1], self.gate) if frames else MessageOrigin()
        if self.gate is not None and origin.holder is None:
            self.connections.cut(origin.descriptor)
            return None
        self.connections.delivered(origin, map(len, frames), time.monotonic())
        return origin

    def _too_many(self, frames: list[zmq.Frame]) -> None:
        """Cuts the connection of a message that has these parts and more. The rest is not charged:
        its descriptor may be another connection's by then."""
        origin = self._origin(frames)
        if origin is not None:
            self.connections.refuse(origin, f"a message has more than {len(frames) - 1} parts")

    def read_subscriptions(self, allowed: Allowed) -> set[bytes]:
        """Takes in the subscriptions that have come, a bounded number; returns their topics,
        repeated ones too."""
        topics: set[bytes] = set()
        for frame, origin in self._subscriptions.read(FRAMES_PER_TURN):
            if origin is None:
                topics |= self.subscribed.take(frame)
                continue
            self.connections.subscribed(origin)
            topic = frame[1:]
            if not allowed(origin, topic):
                self.subscribed.ignore(frame)
                continue
            # libzmq leaves the choice to us (XPUB_MANUAL); it is for the connection of this frame.
            what = zmq.SUBSCRIBE if frame[:1] == b"\x01" else zmq.UNSUBSCRIBE
            self.downlink.setsockopt(what, topic)
            self.connections.listens(origin.descriptor, topic, begins=what == zmq.SUBSCRIBE)
            topics |= self.subscribed.take(frame)
        return topics

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
        self.connections.handed(topic, header, payload)

    def close(self) -> None:
        """Closes everything. Queued messages get the linger time of the socket options."""
        self.connections.close()
        for socket in (self.control, self.uplink, self.downlink):
            socket.close()
        if self.gate is not None:
            self.gate.close()
        self.context.term()


def _connections_max(streams: int) -> int:
    most = connections_max()
    if (fit := learners_that_fit(most, streams)) < FEW_LEARNERS:
        _log.warning(
            "the limit of open files has room for %s: raise it (ulimit -n, LimitNOFILE=)",
            counted(fit, "learner"),
        )
    return most


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
  narrows broker --listen {listen} --keys keys --founder NAME
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
