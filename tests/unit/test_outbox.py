"""The queue in front of the data connections: lanes, streams, credit."""

from __future__ import annotations

from narrows.proto.outbox import Lane, Outbox


def drain(outbox: Outbox[str], now: float = 0.0) -> list[tuple[str, int, int]]:
    departures: list[tuple[str, int, int]] = []
    while (departure := outbox.take(now)) is not None:
        departures.append((departure.item, departure.stream, departure.position))
    return departures


def test_fragments_go_before_states_each_in_order() -> None:
    outbox = Outbox[str](1, 1000)
    outbox.put("s", 10, Lane.STATE)
    outbox.put("f1", 10)
    outbox.put("f2", 10)
    assert [item for item, _, _ in drain(outbox)] == ["f1", "f2", "s"]


def test_messages_spread_over_the_streams_and_positions_add_up() -> None:
    outbox = Outbox[str](2, 1000)
    for item in "abcd":
        outbox.put(item, 10)
    assert drain(outbox) == [("a", 0, 10), ("b", 1, 10), ("c", 0, 20), ("d", 1, 20)]
    assert outbox.bytes_sent == 40


def test_no_more_than_the_window_is_unacknowledged() -> None:
    outbox = Outbox[str](1, 25)
    for item in "abc":
        outbox.put(item, 10)
    assert len(drain(outbox)) == 2
    outbox.acknowledge((4,), 1.0)
    assert drain(outbox) == []
    outbox.acknowledge((10,), 1.0)
    assert drain(outbox) == [("c", 0, 30)]


def test_a_message_larger_than_the_window_may_leave_alone() -> None:
    outbox = Outbox[str](1, 25)
    outbox.put("large", 100)
    outbox.put("next", 1)
    assert drain(outbox) == [("large", 0, 100)]


def test_acknowledgements_from_the_future_or_the_past_are_ignored() -> None:
    outbox = Outbox[str](1, 20)
    for item in "abc":
        outbox.put(item, 10)
    drain(outbox)
    outbox.acknowledge((10, 99, 99), 1.0)
    outbox.acknowledge((5,), 1.0)
    outbox.acknowledge((1000,), 1.0)
    assert len(drain(outbox)) == 1
    outbox.acknowledge((10,), 1.0)
    outbox.put("d", 10)
    assert drain(outbox) == []


def test_a_stalled_stream_is_written_off() -> None:
    outbox = Outbox[str](1, 20, stall_s=5.0)
    for item in "abc":
        outbox.put(item, 10)
    drain(outbox, now=0.0)
    assert outbox.renew_stalled(4.9) == 0
    assert outbox.renew_stalled(5.0) == 20
    assert drain(outbox, now=5.0) == [("c", 0, 30)]


def test_a_peer_that_acknowledges_nothing_gets_ever_fewer_single_messages() -> None:
    outbox = Outbox[str](1, 1000, stall_s=5.0)
    for _ in range(200):
        outbox.put("x", 10)
    assert len(drain(outbox, now=0.0)) == 100
    left: list[int] = []
    for now in range(1, 1000):
        outbox.renew_stalled(float(now))
        left += [now] * len(drain(outbox, now=float(now)))
    assert left == [5, 15, 35, 75, 155, 315, 635, 955]
    outbox.acknowledge((outbox.bytes_sent,), 1000.0)
    assert len(drain(outbox, now=1000.0)) == 92


def test_progress_keeps_a_stream_from_stalling() -> None:
    outbox = Outbox[str](1, 20, stall_s=5.0)
    outbox.put("a", 10)
    outbox.put("b", 10)
    drain(outbox, now=0.0)
    outbox.acknowledge((10,), 4.0)
    assert outbox.renew_stalled(8.0) == 0


def test_discard_removes_from_every_lane() -> None:
    outbox = Outbox[str](1, 1000)
    outbox.put("keep", 10)
    outbox.put("drop", 10)
    outbox.put("drop", 10, Lane.STATE)
    outbox.discard(lambda item: item == "drop")
    assert len(outbox) == 1
    assert drain(outbox) == [("keep", 0, 10)]
