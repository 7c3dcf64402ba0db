"""The broker's three sockets: bind, receive, send, count bytes. No decisions."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import zmq

from narrows.broker.process.subscriptions import Subscriptions
from narrows.proto import socket_options
from narrows.proto.address import Address, parse_listen
from narrows.proto.errors import ErrorCode, NarrowsError

FRAMES_PER_TURN = 64
"""Messages that are read from one socket before the others get their turn. Data must not keep Hello
and Report waiting."""


@dataclass
class Traffic:
    """Bytes of ZeroMQ frames with one learner."""

    up_bytes: int = 0
    down_bytes: int = 0


@dataclass
class BrokerSockets:
    """ROUTER for control, SUB for the uplink, XPUB for the downlink."""

    context: zmq.Context[zmq.Socket[bytes]]
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
        cls, listen: str, *, uplink_port: int, downlink_port: int, insecure: bool
    ) -> BrokerSockets:
        """Binds all three. Raises ConfigError for a bad address, PORT_IN_USE for a taken port."""
        host, port = address = _listen_address(listen, insecure=insecure)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        try:
            control = _socket(context, zmq.ROUTER, socket_options.ROUTER, ipv6=address.is_ipv6)
            control_port = _bind(control, host, port, "control")
            up_port = uplink_port or (control_port + 1 if port else 0)
            down_port = downlink_port or (control_port + 2 if port else 0)
            uplink = _socket(context, zmq.SUB, socket_options.DATA, ipv6=address.is_ipv6)
            uplink.setsockopt(zmq.SUBSCRIBE, b"")
            up = _bind(uplink, host, up_port, "uplink")
            downlink = _socket(context, zmq.XPUB, socket_options.XPUB, ipv6=address.is_ipv6)
            down = _bind(downlink, host, down_port, "downlink")
        except NarrowsError:
            context.destroy(linger=0)
            raise
        return cls(context, control, uplink, downlink, f"tcp://{host}:{control_port}", up, down)

    def receive_control(self) -> tuple[bytes, str, list[bytes]] | None:
        """(peer, address, frames) of the next control message, None if there is none."""
        try:
            frames = self.control.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            address = str(frames[-1].get("Peer-Address"))
        except (zmq.ZMQError, KeyError):
            address = ""
        return frames[0].bytes, address, [frame.bytes for frame in frames[1:]]

    def receive_data(self) -> list[bytes] | None:
        """The frames of the next data message, None if there is none."""
        try:
            return self.uplink.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

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
        for socket in (self.control, self.uplink, self.downlink):
            socket.close()
        self.context.term()


def _listen_address(listen: str, *, insecure: bool) -> Address:
    """The address to listen on; beyond loopback only with --insecure, since there are no keys."""
    address = parse_listen(listen)
    if not address.is_loopback and not insecure:
        raise NarrowsError(
            ErrorCode.INSECURE,
            "anybody who reaches this address could read and change the model",
            expected="a loopback address, or --insecure",
            got=listen,
            remedy="listen on tcp://127.0.0.1:PORT behind a tunnel (WireGuard, ssh), or pass "
            "--insecure on a network that you trust",
        )
    return address


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, options: dict[str, int], *, ipv6: bool
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, ipv6)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
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
