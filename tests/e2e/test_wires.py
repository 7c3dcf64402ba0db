"""Both ends of the sockets, without the state machines."""

from __future__ import annotations

import pytest
from running import wait_until

from narrows.broker.process import sockets as broker_wires
from narrows.learner.transport import sockets as learner_wires
from narrows.proto.frames import downlink_topic
from narrows.proto.limits import STREAMS_MAX


def test_a_new_dial_replaces_every_connection() -> None:
    broker = broker_wires.BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False
    )
    learner = learner_wires.LearnerSockets(broker.address, "a", "0" * 32)
    ports = broker.uplink_port, broker.downlink_port
    subscribed = 0
    heard: list[bytes] = []

    def all_stand() -> bool:
        nonlocal subscribed
        learner.wait(0.05)
        assert broker.receive_data() is None  # Its socket subscribes when it is looked at.
        subscribed += len(broker.read_subscriptions(lambda _origin, _topic: True))
        return learner.uplink_open and subscribed == 2

    def control_stands() -> bool:
        learner.wait(0.05)
        return learner.has_connected()

    def has_heard() -> bool:
        received = broker.receive_control()
        heard.extend(received[2] if received else ())
        return received is not None

    try:
        for message in (b"first", b"second"):
            wait_until(control_stands, "the control connection")
            learner.send_control(message)
            wait_until(has_heard, "the message")
            subscribed = 0
            learner.open_streams(2, *ports)
            wait_until(all_stand, "the data connections")
            assert learner.take_reconnected() == [0, 1] and not learner.take_reconnected()
            learner.open_streams(2, *ports)  # Once more changes nothing.
            assert learner.uplink_open
            learner.redial()
            assert not learner.has_connected()
        assert heard == [b"first", b"second"]
    finally:
        learner.close()
        broker.close()


def test_new_streams_know_nothing_of_those_before_them() -> None:
    broker = broker_wires.BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False
    )
    learner = learner_wires.LearnerSockets(broker.address, "a", "0" * 32)

    def uplinks_stand() -> bool:
        learner.wait(0.05)
        assert broker.receive_data() is None  # Its socket subscribes when it is looked at.
        return learner.uplink_open

    try:
        learner.open_streams(2, broker.uplink_port, broker.downlink_port)
        wait_until(uplinks_stand, "the uplinks")
        learner.open_streams(1, broker.uplink_port, broker.downlink_port)
        assert learner.take_reconnected() == []  # Else stream 1, which is gone, would be among it.
    finally:
        learner.close()
        broker.close()


@pytest.mark.parametrize("streams", [1, 12, STREAMS_MAX])
def test_what_leaves_on_a_stream_arrives_there_alone(streams: int) -> None:
    broker = broker_wires.BrokerSockets.bind(
        "tcp://127.0.0.1:0", uplink_port=0, downlink_port=0, insecure=False
    )
    learner = learner_wires.LearnerSockets(broker.address, "a", "0" * 32)
    topics = {downlink_topic("a", "0" * 32, stream) for stream in range(streams)}
    received: list[list[bytes]] = []

    def all_subscribed() -> bool:
        broker.read_subscriptions(lambda _origin, _topic: True)
        return broker.subscribed.has(topics)

    def last_arrived() -> bool:
        learner.wait(0.05)
        received.extend(learner.receive_data())
        return sum(frames[1] == b"last" for frames in received) >= streams

    try:
        learner.open_streams(streams, broker.uplink_port, broker.downlink_port)
        wait_until(all_subscribed, "the subscriptions")
        # A stream is in order: after its last message nothing of the first is on its way.
        for header in (b"first", b"last"):
            for topic in sorted(topics):
                broker.send_data(topic, header, b"")
        wait_until(last_arrived, "what was sent")
        assert sorted(frames[:2] for frames in received) == sorted(
            [topic, header] for topic in topics for header in (b"first", b"last")
        )
    finally:
        learner.close()
        broker.close()
