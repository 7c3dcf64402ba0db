"""Messages in parts that no honest peer sends: they hold up nobody and move no subscription."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from running import HANG_S, wait_until

from narrows.broker.process.origin import MessageOrigin
from narrows.broker.process.sockets import DATA_PARTS_MAX, BrokerSockets
from narrows.proto.frames import downlink_topic, topic_name
from narrows.proto.key_holder import KeyHolder
from narrows.proto.keys import KeyPair, Keyring, new_broker_key, new_pair
from narrows.proto.keys.ring import write_ring

Socket = zmq.Socket[bytes]

STREAMS = 40
"""So many that a holder may have the connections of these tests."""
MANY = 20_000


@dataclass
class Ends:
    """Sockets of a broker without its state machines, and of peers."""

    wires: BrokerSockets
    server: str
    pairs: dict[str, KeyPair]
    context: zmq.Context[Socket] = field(default_factory=zmq.Context)
    dialled: list[Socket] = field(default_factory=list[Socket])

    def dial(self, kind: int, name: str, port: int, *topics: bytes) -> Socket:
        """A socket of a peer; returns after its handshake."""
        socket = self.context.socket(kind)
        self.dialled.append(socket)
        socket.setsockopt(zmq.SNDHWM, 0)
        if self.server:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pairs[name].public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.pairs[name].secret.encode())
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(f"tcp://127.0.0.1:{port}")
        wait_until(lambda: self.attend() and monitor.poll(1), "the handshake")
        socket.disable_monitor()
        monitor.close()
        return socket

    @property
    def control_port(self) -> int:
        return int(self.wires.address.rsplit(":", 1)[1])

    def attend(self) -> bool:
        """Does what a turn of the loop does beside reading."""
        self.wires.attend(time.monotonic())
        return True

    def let_in(self) -> bool:
        """Takes what has come on the downlink into libzmq's queue, and reads nothing. True if
        something waits."""
        self.attend()
        return self.wires.downlink.poll(0) != 0

    def listen(self) -> bool:
        """One turn of the downlink. True if nothing more waits."""
        self.attend()
        self.wires.read_subscriptions(_allowed)
        return self.wires.downlink.poll(0) == 0

    def hears(self, listener: Socket, topic: bytes) -> bool:
        """Sends a message to a topic; True once the listener has one of them."""
        self.listen()
        self.wires.send_data(topic, b"header", b"payload")
        return listener.poll(10) != 0 and listener.recv_multipart()[0] == topic


def _allowed(origin: MessageOrigin, topic: bytes) -> bool:
    name = topic_name(topic)
    return name is not None and (origin.holder is None or origin.holder.speaks_for(name))


def _topics_of(listener: Socket) -> set[bytes]:
    topics: set[bytes] = set()
    while listener.poll(0):
        topics.add(listener.recv_multipart()[0])
    return topics


@pytest.fixture(params=["keys", "open"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Ends]:
    server, keys, pairs = "", "", dict[str, KeyPair]()
    if request.param == "keys":
        keys = str(tmp_path / "keys")
        server = new_broker_key(Path(keys)).current.public
        ring = Keyring()
        for name in ("victim", "mallory"):
            pairs[name] = new_pair()
            ring = ring.allow(KeyHolder(name), pairs[name].public, now=time.time())
        write_ring(Path(keys), ring)
    wires = BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False, keys=keys,
        streams=STREAMS,
    )  # fmt: skip
    made = Ends(wires, server, pairs)
    try:
        yield made
    finally:
        made.context.destroy(linger=0)
        wires.close()


@pytest.mark.parametrize("port", ["control", "uplink"])
def test_a_message_of_very_many_parts_holds_up_nobody(
    ends: Ends, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrows.broker.process.parts.PARTS_PER_TURN", 500)
    wires, on_control = ends.wires, port == "control"
    kind, number = (zmq.DEALER, ends.control_port) if on_control else (zmq.XPUB, wires.uplink_port)
    assert wires.receive_data() is None  # Its socket subscribes when it is looked at.
    mallory, victim = (ends.dial(kind, name, number) for name in ("mallory", "victim"))
    others = ends.dial(zmq.DEALER, "victim", ends.control_port)
    if not on_control:

        def subscribed() -> bool:
            return not wires.receive_data() and bool(mallory.poll(10) and victim.poll(10))

        wait_until(subscribed, "the subscriptions")
    for _ in range(MANY):
        mallory.send(b"", zmq.SNDMORE)
    mallory.send(b"")
    behind, frames = 0, list[bytes]()
    heard = 0

    def has_read_all() -> bool:
        nonlocal behind, heard
        ends.attend()
        if not on_control:
            others.send(b"meanwhile")
            while (control := wires.receive_control()) is not None:
                assert control[2] == [b"meanwhile"]
                heard += wires.is_behind
        message = wires.receive_control() if on_control else wires.receive_data()
        if message is not None:
            frames.extend(message[-1])
        behind += wires.is_behind
        return wires.connections.cuts["bad_frame"] == 1 and not wires.is_behind

    wait_until(has_read_all, "the end of the parts")
    assert frames == [] and behind > 10
    assert on_control or heard > 0, "no control message came through meanwhile"
    victim.send_multipart([b"u"] * (1 if on_control else 3))
    wait_until(
        lambda: wires.receive_control() if on_control else wires.receive_data(), "the victim"
    )


def test_one_part_too_many_is_a_message_still(ends: Ends) -> None:
    """It is refused by name. Beyond that the connection is cut."""
    wires = ends.wires
    assert wires.receive_data() is None
    peer = ends.dial(zmq.XPUB, "victim", wires.uplink_port)
    wait_until(lambda: not wires.receive_data() and peer.poll(10), "the subscription")
    got: list[list[bytes]] = []

    def read() -> int:
        ends.attend()
        if (message := wires.receive_data()) is not None:
            got.append(message[1])
        return len(got)

    for parts in (DATA_PARTS_MAX, DATA_PARTS_MAX + 1, 1):
        peer.send_multipart([b"%d" % parts] * parts)
    wait_until(lambda: read() == 2, "the messages around")
    assert [len(frames) for frames in got] == [DATA_PARTS_MAX, 1]
    assert wires.connections.cuts == {"bad_frame": 1}


@pytest.mark.parametrize("parts_per_turn", [1, 4096])
def test_messages_of_a_subscriber_move_no_subscription(
    ends: Ends, parts_per_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "narrows.broker.process.subscription_queue.PARTS_PER_TURN"
    monkeypatch.setattr(name, parts_per_turn)
    port = ends.wires.downlink_port
    for round_number in range(5):
        victim = ends.dial(zmq.SUB, "victim", port)
        noise, thief = (ends.dial(zmq.XSUB, "mallory", port) for _ in range(2))
        wait_until(ends.listen, "an empty queue")
        mine = downlink_topic("mallory", f"{round_number:032x}", 0)
        theirs = downlink_topic("victim", f"{round_number:032x}", 0)
        noise.send_multipart([b"x", b"\1" + mine, b"y"] if round_number % 2 else [b"x"])
        wait_until(ends.let_in, "the noise")
        victim.setsockopt(zmq.SUBSCRIBE, theirs)
        thief.send(b"\1" + mine)
        wait_until(lambda: ends.hears(victim, theirs), "the victim to hear")  # noqa: B023
        wait_until(lambda: ends.hears(thief, mine), "the other to hear")  # noqa: B023
        assert _topics_of(thief) | _topics_of(noise) <= {mine}
        for socket in (victim, noise, thief):
            socket.close(0)
    assert ends.wires.connections.cuts["bad_frame"] > 0


def test_a_new_connection_inherits_no_subscription(ends: Ends) -> None:
    """libzmq may give it the memory of one that ended while its subscription waited."""
    wires = ends.wires
    port, connections = wires.downlink_port, wires.connections
    for round_number in range(3):
        topics = [downlink_topic("victim", f"{round_number:032x}", n) for n in range(STREAMS)]
        victims = [ends.dial(zmq.SUB, "victim", port, topic) for topic in topics]
        wait_until(ends.let_in, "the subscriptions")
        for victim in victims:
            victim.close(int(HANG_S * 1000))
        wait_until(lambda: ends.let_in() and len(connections) == 0, "the ends")
        thieves = [ends.dial(zmq.XSUB, "mallory", port) for _ in range(STREAMS)]
        ends.let_in()
        wait_until(ends.listen, "an empty queue")
        mine = [downlink_topic("mallory", f"{round_number:032x}", n) for n in range(STREAMS)]
        for topic in topics:
            wires.send_data(topic, b"header", b"secret")
        for thief, topic in zip(thieves, mine, strict=True):
            thief.send(b"\1" + topic)
        for thief, topic in zip(thieves, mine, strict=True):

            def is_heard(thief: Socket = thief, topic: bytes = topic) -> bool:
                ends.listen()
                thief.poll(0)  # libzmq subscribes again in a call of the owner.
                return wires.subscribed.has({topic})

            wait_until(is_heard, "the subscription of the other")
            # What was sent to the victim before would have come first.
            wires.send_data(topic, b"header", b"last")
            assert thief.poll(int(HANG_S * 1000))
            assert _topics_of(thief) == {topic}
        for thief in thieves:
            thief.close(0)
        wait_until(lambda: ends.listen() and len(connections) == 0, "the ends of all")
