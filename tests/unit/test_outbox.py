"""The queue in front of the data connections: lanes, streams, credit."""

from __future__ import annotations

from narrows.proto.flow.lanes import Lane
from narrows.proto.flow.outbox import Departure, Outbox
from narrows.proto.flow.path import Mark


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
    assert outbox.positions == (20, 20)


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
    assert drain(outbox, now=5.0) == [("a", 0, 30)]


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
    outbox.acknowledge(outbox.positions, 1000.0)
    assert len(drain(outbox, now=1000.0)) == 100


def test_a_dead_stream_is_tried_at_once_over_a_new_connection() -> None:
    outbox = Outbox[str](2, 1000, stall_s=5.0)
    for item in "abcd":
        outbox.put(item, 10)
    drain(outbox, now=0.0)
    assert outbox.reconnect(0, 1.0) == 0, "it may be merely late"
    assert outbox.renew_stalled(5.0) == 40 and list(outbox.dead) == [0, 1]
    tried = [stream for _, stream, _ in drain(outbox, now=5.0)]
    assert sorted(tried) == [0, 1]
    assert drain(outbox, now=9.0) == []
    assert outbox.reconnect(0, 9.0) == 10
    ((_, stream, position),) = drain(outbox, now=9.0)
    assert stream == 0
    outbox.acknowledge((position,), 9.1)
    assert list(outbox.dead) == [1] and len(drain(outbox, now=9.1)) == 2
    assert outbox.reconnect(0, 9.2) == 0


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


def filled(streams: int, count: int, size_bytes: int = 10) -> Outbox[int]:
    outbox = Outbox[int](streams, 1 << 20)
    for item in range(count):
        outbox.put(item, size_bytes)
    return outbox


def positions(outbox: Outbox[int], taken: list[Departure[int]], dead: int) -> tuple[int, ...]:
    """Positions that a receiver reports if it gets nothing on one stream."""
    told = [0] * outbox.stream_count
    for departure in taken:
        if departure.stream != dead:
            told[departure.stream] = departure.position
    return tuple(told)


def take_all(outbox: Outbox[int], now: float) -> list[Departure[int]]:
    taken: list[Departure[int]] = []
    while (departure := outbox.take(now)) is not None:
        taken.append(departure)
    return taken


def test_what_a_dead_stream_carried_leaves_on_the_others() -> None:
    outbox = filled(4, 40)
    taken = take_all(outbox, 0.0)
    lost = {each.item for each in taken if each.stream == 2}
    outbox.acknowledge(positions(outbox, taken, dead=2), 0.1)
    outbox.put(100, 10)
    later = take_all(outbox, 1.9)
    outbox.acknowledge(positions(outbox, taken + later, dead=2), 2.0)
    assert outbox.renew_stalled(2.0) > 0
    again = take_all(outbox, 2.0)
    assert {each.item for each in again} >= lost
    assert all(each.stream != 2 for each in again)


def test_a_dead_stream_is_tried_now_and_then_and_used_again_once_it_moves() -> None:
    outbox = filled(2, 4)
    first = take_all(outbox, 0.0)
    told = list(positions(outbox, first, dead=1))
    for second in range(1, 300):
        outbox.put(second, 10)
        for each in take_all(outbox, float(second)):
            if each.stream == 0 or second > 100:
                told[each.stream] = each.position
        outbox.acknowledge(tuple(told), second + 0.05)
        outbox.renew_stalled(second + 0.06)
    for item in range(10):
        outbox.put(item, 10)
    assert {each.stream for each in take_all(outbox, 300.0)} == {0, 1}


def test_states_get_an_eighth_while_fragments_never_end() -> None:
    outbox = Outbox[str](1, 1 << 30)
    outbox.delivery.arrive(1 << 30, Mark(0.0, 0, 0.0), 0.001)
    for _ in range(1000):
        outbox.put("fragment", 10)
        outbox.put("state", 10, Lane.STATE)
    left = [departure[0] for departure in drain(outbox)][:800]
    assert abs(left.count("state") - 100) <= 1


def test_what_left_lately_is_coming_and_after_a_while_it_is_not() -> None:
    outbox = filled(1, 3)
    taken = take_all(outbox, 0.0)
    outbox.put(7, 10)
    assert sorted(outbox.coming(0.01)) == [0, 1, 2, 7]
    outbox.acknowledge((taken[0].position,), 0.02)
    assert sorted(outbox.coming(0.02)) == [1, 2, 7]
    assert sorted(outbox.coming(100.0)) == [7]


def test_discarded_items_do_not_come_back_from_a_dead_stream() -> None:
    outbox = filled(1, 3)
    take_all(outbox, 0.0)
    outbox.discard(lambda item: item == 1)
    outbox.renew_stalled(5.0)
    assert sorted(outbox) == [0, 2]


def test_a_line_is_not_filled_far_beyond_what_it_holds() -> None:
    """A line of 1 MB/s with a round trip of 0.1 s: some 0.3 s of it wait, not 32 MiB."""
    outbox = filled(4, 20_000, 1000)
    in_flight: list[tuple[float, Departure[int]]] = []
    told, now, free_at, most = [0] * 4, 0.0, 0.0, 0
    while now < 15.0:
        now += 0.01
        for departure in take_all(outbox, now):
            free_at = max(free_at, now) + 1000 / 1e6
            in_flight.append((free_at + 0.1, departure))
        while in_flight and in_flight[0][0] <= now:
            departure = in_flight.pop(0)[1]
            told[departure.stream] = departure.position
        outbox.acknowledge(tuple(told), now)
        if now > 3.0:
            most = max(most, outbox.in_flight)
    assert outbox.delivery.delivered > 0.97e6 * (now - 0.5)
    assert most < 1e6 * 2 * (0.1 + 0.1 + 0.3)


def test_a_stream_that_was_only_late_is_used_again_at_once() -> None:
    outbox = filled(2, 4)
    taken = take_all(outbox, 0.0)
    outbox.acknowledge(positions(outbox, taken, dead=1), 0.1)
    outbox.put(5, 10)
    taken += take_all(outbox, 1.4)
    outbox.acknowledge(positions(outbox, taken, dead=1), 1.5)
    assert outbox.renew_stalled(1.5) > 0
    outbox.acknowledge(positions(outbox, taken, dead=-1), 1.6)
    for item in range(10):
        outbox.put(item, 10)
    assert {each.stream for each in take_all(outbox, 1.7)} == {0, 1}


def test_what_is_merely_late_takes_its_part_of_the_window() -> None:
    outbox = Outbox[str](1, 40)
    for item in "abcdef":
        outbox.put(item, 10)
    assert len(drain(outbox, now=0.0)) == 4
    assert outbox.renew_stalled(5.0) == 40
    outbox.acknowledge((10,), 5.1)
    assert drain(outbox, now=5.1) == [("b", 0, 50)], "c and d are perhaps on their way"
    outbox.acknowledge((40,), 5.2)
    assert drain(outbox, now=5.2) == [("e", 0, 60), ("f", 0, 70)]


def test_an_outbox_counts_on_from_the_one_before() -> None:
    before = filled(2, 4)
    take_all(before, 0.0)
    outbox = filled(2, 4)
    outbox.start_at(before.positions)
    taken = take_all(outbox, 1.0)
    outbox.acknowledge(before.positions, 1.1)
    assert outbox.in_flight == 10 * len(taken)


def test_a_round_trip_over_an_outage_does_not_make_the_sender_patient() -> None:
    outbox = filled(1, 1)
    taken = take_all(outbox, 0.0)
    outbox.acknowledge((taken[0].position,), 60.0)
    outbox.put(7, 10)
    take_all(outbox, 60.0)
    assert list(outbox.coming(61.0)) == [7]
    assert list(outbox.coming(63.0)) == []


def test_a_line_that_takes_longer_than_a_stall_gets_everything_all_the_same() -> None:
    """Nine seconds until an acknowledgement, five until what is under way is given up."""
    outbox = Outbox[int](3, 40)
    for item in range(60):
        outbox.put(item, 10)
    got, left = set[int](), 0
    told: list[tuple[float, int, int]] = []
    for second in range(600):
        now = float(second)
        for _, stream, position in [each for each in told if each[0] == now]:
            places = [0, 0, 0]
            places[stream] = position
            outbox.acknowledge(tuple(places), now)
        outbox.renew_stalled(now)
        while (departure := outbox.take(now)) is not None:
            left += 1
            got.add(departure.item)
            told.append((now + 9.0, departure.stream, departure.position))
    assert got == set(range(60))
    assert outbox.idle
    assert left <= 2 * 60
