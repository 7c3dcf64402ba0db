"""Real sockets over loopback: who is let in, who is told why not, and the largest message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from narrows.proto.errors import BrokerUnreachable, Refused
from narrows.proto.keys import KeyPair, SiteKey, new_pair, serve_keys
from narrows.proto.messages import PAYLOAD_BYTES_MAX
from narrows.proto.sockets import (
    Handshake,
    HandshakeMonitor,
    Kind,
    make_socket,
    send_buffer_bytes,
)

pytestmark = pytest.mark.real

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Broker:
    """A context with an authenticator, and the keys that it admits."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self.pair, self.allowed = new_pair(), set[str]()
        self.authenticator = serve_keys(self.context, lambda key: key in self.allowed)
        self.opened: list[Socket] = []

    def bind(self, kind: Kind, *, pair: KeyPair | None) -> Socket:
        socket = self.keep(make_socket(self.context, kind, pair=pair))
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def dial(
        self, kind: Kind, server: Socket, key: SiteKey | None
    ) -> tuple[Socket, HandshakeMonitor]:
        pair, servers = (key.pair, key.servers) if key else (None, ("",))
        socket = self.keep(make_socket(self.context, kind, pair=pair, server=servers[0]))
        address = server.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        monitor = HandshakeMonitor(socket, address.rstrip(b"\0").decode(), key)
        socket.connect(address.rstrip(b"\0").decode())
        return socket, monitor

    def keep(self, socket: Socket) -> Socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.opened.append(socket)
        return socket

    def site(self, name: str) -> SiteKey:
        key = SiteKey(name, new_pair(), (self.pair.public,))
        self.allowed.add(key.pair.public)
        return key


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.authenticator.stop()
    broker.context.destroy(linger=0)


def outcome(monitor: HandshakeMonitor) -> Handshake:
    while (found := monitor.take()) is None:
        assert monitor.socket.poll(30_000), "no outcome"
    return found


def test_the_admitted_speak_under_their_key_and_another_broker_is_told(broker: Broker) -> None:
    server = broker.bind(Kind.BROKER_CONTROL, pair=broker.pair)
    admitted = broker.site("site-a")
    dealer, monitor = broker.dial(Kind.LEARNER_CONTROL, server, admitted)
    assert outcome(monitor) is Handshake.CONNECTED and monitor.error(Handshake.CONNECTED) is None
    dealer.send_multipart([b"hello", b"a"])
    frames = server.recv_multipart(copy=False)
    assert [frame.bytes for frame in frames[1:]] == [b"hello", b"a"]
    assert frames[1].get("User-Id") == admitted.pair.public

    other = SiteKey("site-a", admitted.pair, (new_pair().public,))
    _, broken = broker.dial(Kind.LEARNER_CONTROL, server, other)
    assert [outcome(broken) for _ in range(2)] == [Handshake.BROKEN_OFF] * 2, "it dials again"
    error = broken.error(Handshake.BROKEN_OFF)
    assert isinstance(error, BrokerUnreachable) and other.servers[0] in str(error)

    server.close(linger=0)
    assert outcome(monitor) is Handshake.DISCONNECTED


@pytest.mark.parametrize(("with_key", "told"), [(True, "has no keys"), (False, "only those who")])
def test_one_side_without_keys_is_told(broker: Broker, with_key: bool, told: str) -> None:
    server = broker.bind(Kind.BROKER_CONTROL, pair=None if with_key else broker.pair)
    key = broker.site("site-a") if with_key else None
    _, monitor = broker.dial(Kind.LEARNER_CONTROL, server, key)
    while (seen := outcome(monitor)) is Handshake.BROKEN_OFF:
        pass  # The broker may close before the reason can be seen.
    assert seen is Handshake.MISMATCH
    error = monitor.error(Handshake.MISMATCH)
    assert isinstance(error, Refused) and told in error.message and error.remedy


def test_without_an_authenticator_a_socket_admits_nobody(broker: Broker) -> None:
    broker.authenticator.stop()
    broker.context.destroy(linger=0)
    broker.context = zmq.Context()
    server = broker.bind(Kind.BROKER_CONTROL, pair=broker.pair)
    _, monitor = broker.dial(Kind.LEARNER_CONTROL, server, broker.site("site-a"))
    assert outcome(monitor) is not Handshake.CONNECTED


def test_the_largest_payload_passes_and_a_full_pipe_answers(broker: Broker) -> None:
    """MAXMSGSIZE counts what CURVE adds. With NODROP a pipe without room loses nothing."""
    uplink_in = broker.bind(Kind.BROKER_UPLINK, pair=broker.pair)
    uplink_in.subscribe(b"u/")
    uplink, _ = broker.dial(Kind.LEARNER_UPLINK, uplink_in, broker.site("site-a"))
    for _ in range(10_000):  # A SUB sends its subscription when its owner polls it.
        if uplink.poll(2) or uplink_in.poll(0):
            break
    assert uplink.recv() == b"\1u/"
    payload, sent = bytes(PAYLOAD_BYTES_MAX), 0
    with pytest.raises(zmq.Again):
        while sent < 1000:
            uplink.send_multipart([b"u/00", b"%d" % sent, payload], zmq.NOBLOCK, copy=False)
            sent += 1
    for number in range(sent):
        frames = uplink_in.recv_multipart()
        assert frames[1] == b"%d" % number and len(frames[2]) == PAYLOAD_BYTES_MAX


def test_the_send_buffer_is_a_tenth_of_a_second_of_a_learners_share() -> None:
    assert send_buffer_bytes(0.0, 4) == 0
    assert send_buffer_bytes(1e6, 1) == 32 << 10
    assert send_buffer_bytes(100e6, 4) == 312_500
    assert send_buffer_bytes(5e9, 4) == 0
