"""The sender: whose turn it is, what is charged to whom, and what a full pipe costs the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from narrows.proto.flow import Entry, Sender
from narrows.proto.flow.budget import LATE_S, RESUME_S
from narrows.proto.flow.sender import PATIENCE_S, RETRY_S, TURN
from narrows.proto.messages import DataKind, Header

PAYLOAD = bytes(4000)


def header(kind: DataKind, chunk: int, *, fragment: int = 0, incarnation: str = "") -> Header:
    return Header("1-00000000", kind, incarnation, fragment, 5, 0, chunk, "int4-zstd", 7, 9)


def put_live(sender: Sender, count: int, *, first: int = 0, streams: int = 1) -> None:
    for chunk in range(first, first + count):
        topic = f"p/{chunk % streams:02d}"
        assert sender.put_live(topic, header(DataKind.PUBLICATION, chunk), PAYLOAD)


def put_asked(sender: Sender, who: str, count: int, *, streams: int = 1) -> None:
    for chunk in range(count):
        about = header(DataKind.STATE, chunk, incarnation=who)
        assert sender.put_asked(who, f"r/{who}/{chunk % streams:02d}", about, PAYLOAD)


def drain(sender: Sender, now: float = 0.0) -> list[Entry]:
    """Sends all that is due at one moment."""
    entries: list[Entry] = []
    while entry := sender.due(now):
        sender.sent(entry, now)
        entries.append(entry)
    return entries


def run(
    sender: Sender,
    until: float,
    room: Callable[[Entry, float], bool] = lambda entry, now: True,
    now: float = 0.0,
) -> list[tuple[float, Entry]]:
    """Messages that leave until a time, woken at the deadlines; `room`: the socket takes one."""
    left = list[tuple[float, Entry]]()
    while now <= until:
        while entry := sender.due(now):
            if room(entry, now):
                sender.sent(entry, now)
                left.append((now, entry))
            else:
                sender.blocked(entry, now)
        if sender.deadline(now) == math.inf:
            break
        assert sender.deadline(now) > now, "a deadline that has come has a message"
        now = sender.deadline(now)
    return left


def names(entries: list[Entry]) -> list[str]:
    return [entry.requester or "live" for entry in entries]


def test_publications_go_first_and_every_eighth_message_was_asked_for() -> None:
    sender = Sender()
    put_asked(sender, "a", 4)
    put_live(sender, 20)
    assert names(drain(sender)) == (["live"] * (TURN - 1) + ["a"]) * 2 + ["live"] * 6 + ["a"] * 2
    assert len(sender) == 0 and sender.deadline(0.0) == math.inf


def test_who_asks_for_much_takes_turns_with_who_asks_for_little() -> None:
    sender = Sender()
    put_asked(sender, "a", 50)
    put_asked(sender, "b", 3)
    put_asked(sender, "c", 2)
    assert names(drain(sender))[:9] == ["a", "b", "c", "a", "b", "c", "a", "b", "a"]


def test_a_chunk_that_waits_is_not_queued_twice() -> None:
    sender = Sender()
    put_live(sender, 1)
    publication = header(DataKind.PUBLICATION, 0)
    assert not sender.put_live("p/00", publication, PAYLOAD)
    mine = header(DataKind.PUBLICATION, 0, incarnation="a")
    assert not sender.put_asked("a", "r/a/00", mine, PAYLOAD), "it comes on the shared topic"
    put_asked(sender, "a", 1)
    put_asked(sender, "b", 1)
    assert not sender.put_asked("a", "r/a/00", header(DataKind.STATE, 0), PAYLOAD)
    assert len(drain(sender)) == 3
    assert sender.put_asked("a", "r/a/00", mine, PAYLOAD), "it has left, and was lost"


def test_what_is_discarded_does_not_leave() -> None:
    sender = Sender()
    put_live(sender, 3)
    sender.put_live("p/00", header(DataKind.PUBLICATION, 0, fragment=1), PAYLOAD)
    sender.discard(lambda about: about.fragment == 0)
    assert [entry.about.fragment for entry in drain(sender)] == [1]
    put_live(sender, 1)


def test_nothing_leaves_while_nobody_listens() -> None:
    sender = Sender()
    sender.ready = False
    put_live(sender, 1)
    assert sender.due(0.0) is None and sender.deadline(0.0) == math.inf
    sender.ready = True
    assert len(drain(sender)) == 1


def busiest(left: list[tuple[float, int]]) -> int:
    """Bytes of the fullest second."""
    return max(sum(size for at, size in left if when <= at < when + 1.0) for when, _ in left)


def test_a_publication_counts_once_per_connection_in_the_total() -> None:
    rate, n = 4e6, 4
    sender = Sender(total=rate)
    sender.fan_out = n
    put_live(sender, 500)
    left = [(at, n * entry.line_bytes) for at, entry in run(sender, 4.0)]
    assert 8 * busiest(left) <= 1.02 * rate
    assert 8 * sum(size for _, size in left) >= 0.95 * rate * 4.0


def test_no_learner_gets_more_than_its_rate_and_the_others_are_not_held_up() -> None:
    """Live data reaches everybody; on top of it a and b fetch, so for them both count."""
    rate = 1e6
    sender = Sender(each=rate)
    sender.fan_out = 3
    put_live(sender, 60)
    put_asked(sender, "a", 200)
    put_asked(sender, "b", 200, streams=4)
    left = run(sender, 4.0)
    for who in ("a", "b", "nobody"):
        own = [(at, each.line_bytes) for at, each in left if each.requester in ("", who)]
        assert 8 * busiest(own) <= 1.02 * rate
        if who != "nobody":
            assert 8 * sum(size for _, size in own) >= 0.94 * rate * 4.0
    last_live = max(at for at, each in left if not each.requester)
    assert last_live <= 60 * 4500 * 8 / (rate * 7 / 8) + 0.3, "fetches take an eighth at most"


def test_a_learner_that_has_fetched_and_rests_is_forgotten() -> None:
    sender = Sender(each=1e6)
    put_asked(sender, "a", 5)
    drain(sender)
    put_live(sender, 300)
    run(sender, 4.0)
    assert not sender._shares


def test_control_and_acknowledgements_are_charged_and_a_lower_rate_holds() -> None:
    sender = Sender(total=1e6)
    put_live(sender, 1000)
    now = 0.0
    sent = Counter[int]()
    while now < 4.0:
        if now >= 2.0:
            sender.set_rate(now, total=5e5)
        sender.charge((4, 1000), now)
        sender.received((4, 100, 28_000), now)
        for entry in drain(sender, now):
            sent[int(now)] += 8 * entry.line_bytes
        now += 0.05
    others = 20 * 8 * (1000 + 31 + 66 + 10 * 66)
    assert 0.9e6 <= sent[1] + others <= 1.02e6
    assert sent[3] + others <= 1.02 * 5e5


# A pipe without room.


def test_an_answer_that_meets_a_full_pipe_holds_nobody_up() -> None:
    sender = Sender()
    put_asked(sender, "a", 3)
    put_asked(sender, "b", 3)
    put_live(sender, 30)
    left = run(sender, 1.0, lambda entry, now: entry.requester != "a" or now > 0.5)
    at_once = [entry for at, entry in left if at == 0.0]
    assert sorted(names(at_once)) == ["b"] * 3 + ["live"] * 30
    late = [(at, entry) for at, entry in left if at > 0.0]
    assert names([entry for _, entry in late]) == ["a"] * 3
    assert all(not entry.lossy and at <= 0.5 + 2 * RETRY_S for at, entry in late)


def test_a_stream_without_room_holds_up_no_other_stream_and_no_answer() -> None:
    sender = Sender()
    put_live(sender, 8, streams=4)
    put_asked(sender, "a", 2)
    left = run(sender, 0.1, lambda entry, now: entry.topic != "p/02")
    assert {at for at, _ in left} == {0.0}
    sent = Counter(entry.topic for _, entry in left)
    assert sent == {"p/00": 2, "p/01": 2, "p/03": 2, "r/a/00": 2}


@pytest.mark.parametrize("total", [0.0, 1e12])
def test_a_frozen_reader_costs_the_others_one_patience(total: float) -> None:
    """Each pipe takes four messages. Once one was lost on it, libzmq skips it."""
    sender, taken, skipped = Sender(total=total), Counter[str](), set[str]()
    sender.fan_out = 2
    put_live(sender, 40, streams=4)

    def room(entry: Entry, now: float) -> bool:
        taken[entry.topic] += 1
        if entry.lossy:
            skipped.add(entry.topic)
        return entry.topic in skipped or taken[entry.topic] <= 4

    left = run(sender, 110.0, room, now=100.0)
    assert len(left) == 40 and skipped == {"p/00", "p/01", "p/02", "p/03"}
    assert sum(entry.lossy for _, entry in left) == 4, "one message per full pipe"
    patience_s = PATIENCE_S + (LATE_S - RESUME_S if total else 0.0)
    assert 100.0 + patience_s <= left[-1][0] <= 100.0 + patience_s + 5 * RETRY_S


def test_a_reader_that_adopts_now_and_then_loses_nothing_and_costs_no_rate() -> None:
    """Five times a second a reader's pipe is full for 80 ms, which the budget makes up for."""
    rate = 4e6
    sender = Sender(total=rate)
    sender.fan_out = 2
    put_live(sender, 1000)
    left = run(sender, 8.0, lambda entry, now: now % 0.2 >= 0.08)
    assert not any(entry.lossy for _, entry in left)
    sent = [(at, 2 * entry.line_bytes) for at, entry in left]
    assert 8 * busiest(sent) <= 1.02 * rate
    assert 8 * sum(size for _, size in sent) >= 0.95 * rate * 8.0


@pytest.mark.parametrize(("total", "held_s"), [(1e12, 1.0), (0.0, 5.0)])
def test_a_reader_that_is_always_full_shares_one_allowance_under_a_budget(
    total: float, held_s: float
) -> None:
    """Every message meets a full pipe. For 30 s of trying, a budget allows 0.25 s and 25 ms a
    second of waiting; without one each message may wait 0.25 s."""
    sender = Sender(total=total)
    sender.fan_out = 2
    put_live(sender, 100)
    now = held = 0.0
    for _ in range(100):
        began = now
        while (entry := sender.due(now)) is None or not entry.lossy:
            if entry is None:
                now = sender.deadline(now)
            else:
                sender.blocked(entry, now)
        sender.sent(entry, now)
        held += now - began
        now += 0.2
    assert (held < held_s) if total else (held > held_s)
    assert held >= PATIENCE_S


def test_a_single_reader_loses_nothing_because_he_holds_nobody_up() -> None:
    sender = Sender(total=1e12)
    put_live(sender, 3)
    left = run(sender, 30.0, lambda entry, now: now >= 20.0)
    assert [entry.lossy for _, entry in left] == [False] * 3


def test_the_uplink_never_loses() -> None:
    sender = Sender(may_lose=False)
    put_live(sender, 2)
    left = run(sender, 30.0, lambda entry, now: now >= 20.0)
    assert [entry.lossy for _, entry in left] == [False, False]
    assert all(at >= 20.0 for at, _ in left)
