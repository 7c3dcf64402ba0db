"""Budget, sender and transfer in virtual time: no second above the rate and no rate unused, whose
turn it is, what is charged to whom, what a full pipe costs the others, and what loss costs."""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.flow import Budget, Entry, Sender, Transfer, wire_bytes
from narrows.proto.flow.budget import LATE_S, RESUME_S
from narrows.proto.flow.sender import PATIENCE_S, RETRY_S, TURN
from narrows.proto.messages import RANGES_MAX, DataKind, Header


def busiest_second(left: list[tuple[float, int]]) -> int:
    """Bytes of the fullest half-open second that begins at a departure."""
    busiest = window = first = 0
    for at, size in left:
        window += size
        while left[first][0] <= at - 1.0:
            window -= left[first][1]
            first += 1
        busiest = max(busiest, window)
    return busiest


# The budget.


def saturated(
    budget: Budget, size: int, seconds: float, late_s: list[float], control: int = 0
) -> list[tuple[float, int]]:
    """Departures of a sender that always has a message of `size` waiting, wakes up late by these
    times in turn, and sends `control` bytes every 100 ms that never wait."""
    now = 0.0
    control_at = 0.0
    left = list[tuple[float, int]]()
    while now < seconds:
        opens_at = budget.opens_at(size, now)
        if control and control_at <= opens_at:
            now = max(now, control_at)
            control_at += 0.1
            budget.charge(control, now)
            left.append((now, control))
        elif opens_at <= now:
            budget.charge(size, now)
            left.append((now, size))
        else:
            now = opens_at + late_s[len(left) % len(late_s)]
    return left


@given(
    rate=st.sampled_from([1e5, 1e6, 1e7, 1e9]),
    share_s=st.floats(0.001, 0.02),
    late_s=st.lists(st.floats(0.0, 0.01), min_size=1, max_size=5),
    very_late_s=st.sampled_from([0.0, 0.3, 5.0]),
    control_share=st.sampled_from([0.0, 0.05]),
)
def test_no_second_above_the_rate_and_95_percent_used(
    rate: float, share_s: float, late_s: list[float], very_late_s: float, control_share: float
) -> None:
    """Messages of 10 ms of the rate, to half or twice as many learners as expected; a loop that
    wakes up late by as much, or once in six times so late that it cannot make up for it."""
    size = max(100, int(share_s * rate / 8))
    late_s = [*late_s, very_late_s] if very_late_s else late_s
    control = int(control_share * rate / 80)
    left = saturated(Budget(rate), size, 12.0, late_s, control)
    assert 8 * busiest_second(left) <= 1.02 * rate
    if not very_late_s:
        steady = sum(bytes_ for at, bytes_ in left if 2.0 <= at < 12.0)
        assert 8 * steady >= 0.95 * rate * 10
    at_once = Counter(at for at, bytes_ in left if bytes_ == size)
    assert size * max(at_once.values()) <= rate / 8 * LATE_S + size


def test_a_message_cut_for_a_larger_rate_leaves_between_control_messages() -> None:
    """Holds `Budget.opens_at`."""
    left = saturated(Budget(1e5), 30_000, 100.0, [0.0], control=300)
    assert sum(size == 30_000 for _, size in left) >= 25
    assert sum(8 * size for _, size in left) <= 1.02e5 * 100 + 8 * 30_000


def test_a_debt_is_one_of_bytes() -> None:
    """Holds `Budget.set_rate`."""
    budget = Budget(1e6)
    budget.charge(125_000, 10.0)
    budget.set_rate(2e6, 10.0)
    assert 10.4 < budget.opens_at(0, 10.0) < 10.6
    budget.set_rate(0.0, 10.0)
    assert budget.opens_at(10**12, 10.0) <= 10.0


@given(batches=st.lists(st.integers(1, 40), min_size=1, max_size=30), rate=st.floats(1e5, 1e9))
def test_acknowledgements_cost_as_much_in_a_batch_as_one_by_one_and_half_of_the_rate_at_most(
    batches: list[int], rate: float
) -> None:
    """A loop that was late reads many messages at the same moment: their acknowledgements left
    when they came. Here they take a quarter of the rate, and then more than all of it."""
    budget = Budget(rate)
    size_bytes = 2 * 1448
    charged = 0
    now = 1.0
    for batch in batches:
        now += batch * 66 / (0.25 * rate / 8)
        before = budget.in_window(now)
        for _ in range(batch):
            budget.acknowledge(size_bytes, now)
        charged += budget.in_window(now) - before
    assert charged == 66 * sum(batches)
    for _ in range(200):
        now += 0.01
        budget.acknowledge(int(rate), now)
    assert budget.in_window(now) == pytest.approx(rate / 16, rel=0.03)
    assert budget.opens_at(0, now) <= now


def test_a_message_costs_its_headers_down_to_ethernet() -> None:
    frames = (4, 230, 98_000)
    plain, coded = sum(frames) + 2 + 2 + 9, sum(frames) + 3 * 33 + 2 + 9 + 9
    assert wire_bytes(frames, curve=False) == plain + 66 * math.ceil(plain / 1448)
    assert wire_bytes(frames, curve=True) == coded + 66 * math.ceil(coded / 1448)


@pytest.mark.parametrize(("every_s", "acknowledged"), [(0.0, 50), (0.001, 100)])
def test_acknowledgements_are_those_of_every_second_segment_and_of_what_comes_alone(
    every_s: float, acknowledged: int
) -> None:
    """The small messages of a slow line come one by one: Linux acknowledges each as it is read."""
    budget = Budget(1e9)
    charged = 0
    for index in range(100):
        now = 10.0 + index * every_s
        before = budget.in_window(now)
        budget.acknowledge(1448, now)
        charged += budget.in_window(now) - before
    assert charged == pytest.approx(66 * acknowledged, abs=66)


# The sender: whose turn it is.

PAYLOAD = bytes(4000)


def header(kind: DataKind, chunk: int, *, fragment: int = 0, incarnation: str = "") -> Header:
    return Header("1-00000000", kind, incarnation, fragment, 5, 0, chunk, "int4-zstd", 7, 9)


def put_live(sender: Sender, count: int, *, streams: int = 1) -> None:
    for chunk in range(count):
        topic = f"p/{chunk % streams:02d}"
        assert sender.put(topic, header(DataKind.PUBLICATION, chunk), PAYLOAD)


def put_asked(sender: Sender, who: str, count: int, *, streams: int = 1) -> None:
    for chunk in range(count):
        about = header(DataKind.STATE, chunk, incarnation=who)
        assert sender.put(f"r/{who}/{chunk % streams:02d}", about, PAYLOAD, requester=who)


def run(
    sender: Sender,
    until: float,
    room: Callable[[Entry, float], bool] = lambda entry, now: True,
    now: float = 0.0,
) -> list[tuple[float, Entry]]:
    """Messages that leave until a time, woken at the deadlines; `room`: the pipe takes one. A lossy
    one always leaves, and from then on libzmq skips the pipe."""
    left = list[tuple[float, Entry]]()
    skipped = set[str]()
    while now <= until:
        while entry := sender.due(now):
            skipped |= {entry.topic} if entry.lossy else set()
            if entry.topic in skipped or room(entry, now):
                sender.sent(entry, now)
                left.append((now, entry))
            else:
                sender.blocked(entry, now)
                assert entry.lossy or sender.due(now) is not entry, "it would be tried for ever"
        if sender.deadline(now) == math.inf:
            break
        assert sender.deadline(now) > now, "a deadline that has come has a message"
        now = sender.deadline(now)
    return left


@given(
    live=st.integers(0, 40),
    asked=st.dictionaries(st.sampled_from("abc"), st.integers(1, 20)),
    streams=st.sampled_from([1, 4]),
)
def test_all_that_waits_leaves_in_its_turn(live: int, asked: dict[str, int], streams: int) -> None:
    """While both wait, every eighth message was asked for. Who asks for much takes turns with who
    asks for little. A stream keeps its order."""
    sender = Sender()
    put_live(sender, live, streams=streams)
    for who, count in asked.items():
        put_asked(sender, who, count)
    left = run(sender, 0.0)
    waiting = {"live": live} | asked
    assert len(left) == sum(waiting.values())
    assert len(sender) == 0 and sender.deadline(0.0) == math.inf
    for place, who in enumerate(entry.requester or "live" for _, entry in left):
        if waiting["live"] and sum(waiting.values()) > waiting["live"]:
            assert (who != "live") is (place % TURN == TURN - 1)
        sent = {each: asked[each] - waiting[each] for each in asked if waiting[each]}
        assert who == "live" or sent[who] == min(sent.values())
        waiting[who] -= 1
    for topic in {entry.topic for _, entry in left}:
        chunks = [entry.about.chunk for _, entry in left if entry.topic == topic]
        assert chunks == sorted(set(chunks))


def test_a_chunk_that_waits_is_not_queued_twice() -> None:
    """Holds `Sender.put`."""
    sender = Sender()
    put_live(sender, 1)
    publication = header(DataKind.PUBLICATION, 0)
    assert not sender.put("p/00", publication, PAYLOAD)
    mine = header(DataKind.PUBLICATION, 0, incarnation="a")
    assert not sender.put("r/a/00", mine, PAYLOAD, requester="a"), "it comes on the shared topic"
    put_asked(sender, "a", 1)
    put_asked(sender, "b", 1)
    assert not sender.put("r/a/00", header(DataKind.STATE, 0), PAYLOAD, requester="a")
    assert len(run(sender, 0.0)) == 3
    assert sender.put("r/a/00", mine, PAYLOAD, requester="a"), "it has left, and was lost"


def test_what_is_discarded_does_not_leave_and_nothing_does_while_nobody_listens() -> None:
    """Holds `Sender.discard`."""
    sender = Sender()
    sender.ready = False
    put_live(sender, 3)
    sender.put("p/00", header(DataKind.PUBLICATION, 0, fragment=1), PAYLOAD)
    sender.discard(lambda about: about.fragment == 0)
    assert sender.due(0.0) is None and sender.deadline(0.0) == math.inf
    sender.ready = True
    assert [entry.about.fragment for _, entry in run(sender, 0.0)] == [1]
    put_live(sender, 1)


@pytest.mark.parametrize(("total", "each"), [(4e6, 0.0), (0.0, 1e6), (4e6, 1e6), (2e6, 1e6)])
def test_neither_all_together_nor_a_learner_gets_more_than_the_rate(
    total: float, each: float
) -> None:
    """Live data reaches three learners, and counts so often in the total. On top of it two fetch,
    an eighth at most while live data waits; what remains is for them, and they use it."""
    sender = Sender(total=total, each=each)
    live = 60
    sender.fan_out = 3
    put_live(sender, live)
    put_asked(sender, "a", 400)
    put_asked(sender, "b", 400, streams=4)
    left = run(sender, 4.0)
    lines = [(total, [(at, e.line_bytes * (1 if e.requester else 3)) for at, e in left])]
    for who in ("a", "b", "nobody"):
        lines += [(each, [(at, e.line_bytes) for at, e in left if e.requester in ("", who)])]
    for rate, line in lines:
        assert not rate or 8 * busiest_second(line) <= 1.02 * rate
    used = [8 * sum(size for _, size in line) / (4.0 * rate) for rate, line in lines[:3] if rate]
    assert max(used) >= 0.94, used
    slowest = min(total / 3 or math.inf, each or math.inf)
    last_live = max(at for at, e in left if not e.requester)
    assert last_live <= live * 4500 * 8 / (slowest * 7 / 8) + 0.3


def test_a_learner_that_has_fetched_and_rests_is_forgotten() -> None:
    """Holds `Sender.sent`."""
    sender = Sender(each=1e6)
    put_asked(sender, "a", 5)
    run(sender, 0.0)
    put_live(sender, 300)
    run(sender, 4.0)
    assert not sender._shares


def test_control_and_acknowledgements_are_charged_and_a_lower_rate_holds() -> None:
    """Holds `Sender.charge`."""
    sender = Sender(total=1e6)
    put_live(sender, 1000)
    now = 0.0
    sent = Counter[int]()
    while now < 4.0:
        if now >= 2.0:
            sender.total.set_rate(5e5, now)
        sender.charge((4, 1000), now)
        sender.received((4, 100, 28_000), now)
        while entry := sender.due(now):
            sender.sent(entry, now)
            sent[int(now)] += 8 * entry.line_bytes
        now += 0.05
    others = 20 * 8 * (1000 + 31 + 66 + 10 * 66)
    assert 0.9e6 <= sent[1] + others <= 1.02e6
    assert sent[3] + others <= 1.02 * 5e5


# A pipe without room.


def test_a_full_pipe_holds_up_no_answer_to_others_and_no_other_stream() -> None:
    """Holds `Sender.blocked`."""
    sender = Sender()
    put_asked(sender, "a", 3)
    put_asked(sender, "b", 3)
    put_live(sender, 32, streams=4)
    full = {"r/a/00", "p/02"}
    left = run(sender, 1.0, lambda entry, now: entry.topic not in full or now > 0.5)
    at_once = Counter(entry.topic for at, entry in left if at == 0.0)
    assert at_once == {"r/b/00": 3, "p/00": 8, "p/01": 8, "p/03": 8}
    late = Counter(entry.topic for at, entry in left if 0.5 < at <= 0.5 + 2 * RETRY_S)
    assert late == {"r/a/00": 3, "p/02": 8} and not any(entry.lossy for _, entry in left)


@pytest.mark.parametrize("total", [0.0, 1e12])
def test_a_frozen_reader_costs_the_others_one_patience(total: float) -> None:
    """Each pipe takes four messages."""
    sender = Sender(total=total)
    taken = Counter[str]()
    sender.fan_out = 2
    put_live(sender, 40, streams=4)

    def room(entry: Entry, now: float) -> bool:
        taken[entry.topic] += 1
        return taken[entry.topic] <= 4

    left = run(sender, 110.0, room, now=100.0)
    assert len(left) == 40
    assert sorted(entry.topic for _, entry in left if entry.lossy) == [f"p/0{i}" for i in range(4)]
    patience_s = PATIENCE_S + (LATE_S - RESUME_S if total else 0.0)
    assert 100.0 + patience_s <= left[-1][0] <= 100.0 + patience_s + 5 * RETRY_S


def test_lanes_that_wait_side_by_side_use_patience_once_and_it_is_refilled() -> None:
    """Holds `Sender.blocked`."""
    sender = Sender(total=1e12)
    made_up_s = LATE_S - RESUME_S
    sender.fan_out = 2
    put_live(sender, 2, streams=2)
    run(sender, 101.0, lambda entry, now: now > 100.2, now=100.0)
    # They have used 0.12 of 0.25 s, and 25 ms come back each second; then all of it is used.
    for began, patience_s in ((102.0, 0.18), (106.0, 0.1)):
        put_live(sender, 1)
        ((at, _),) = run(sender, began + 1.0, lambda entry, now: False, now=began)
        assert at - began - made_up_s == pytest.approx(patience_s, abs=3 * RETRY_S)


@pytest.mark.parametrize(("total", "readers"), [(0.0, 2), (1e12, 2), (1e12, 1)])
@given(full_s=st.lists(st.sampled_from([0.0, 0.1, 0.4]), min_size=20, max_size=30))
def test_a_pipe_that_is_often_full_costs_the_others_no_more_than_the_reserve_of_time(
    total: float, readers: int, full_s: list[float]
) -> None:
    """Each message meets a pipe that is full for so long. Under a budget all of them together may
    wait 0.25 s and 25 ms for each second, besides what the budget makes up for once, at the begin;
    without one each may wait 0.25 s; then it is lossy. A single reader holds nobody up: there
    nothing is, as for a push, which the broker alone reads."""
    sender = Sender(total=total)
    sender.fan_out = readers
    put_live(sender, len(full_s))
    now = held = 0.0
    for full in full_s:
        began = now
        while (entry := sender.due(now)) is None or not (entry.lossy or now - began >= full):
            if entry:
                sender.blocked(entry, now)
                assert entry.lossy or sender.due(now) is not entry
            else:
                now = sender.deadline(now)
        waited, patience = now - began, PATIENCE_S + RETRY_S
        if readers == 1:
            assert not entry.lossy and waited >= full
        elif not total:
            assert waited <= patience and entry.lossy is (full > PATIENCE_S)
        else:
            held += waited
            made_up = LATE_S - RESUME_S
            assert held <= patience + made_up + 0.025 * now + RETRY_S * len(full_s)
            assert held >= min(PATIENCE_S, max(full_s[: full_s.index(full) + 1]))
        sender.sent(entry, now)
        now += 0.2


# A transfer at its receiver: everything comes, and questions stay few.


@given(
    chunks=st.integers(1, 400),
    window=st.integers(1, 64),
    loss=st.sampled_from([0.0, 0.02, 0.3]),
    unasked=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_chunk_comes_however_many_are_lost(
    chunks: int, window: int, loss: float, unasked: bool, seed: int
) -> None:
    """The owner calls `ask` at `deadline` and after each arrival, as the machines do."""
    rng = random.Random(seed)
    transfer = Transfer(chunks, 0.0, unasked=unasked)
    now = 0.0
    heard_at = 0.0
    arriving = dict[int, float]()
    asked = 0

    def send(wanted: list[int]) -> None:
        for chunk in wanted:
            if rng.random() >= loss:
                arriving[chunk] = now + rng.uniform(0.01, 0.3)

    if unasked:
        send(list(range(chunks)))
    while not transfer.complete:
        for chunk in sorted(each for each, at in arriving.items() if at <= now):
            del arriving[chunk]
            heard_at = now
            transfer.add(chunk, now)
        while ranges := transfer.ask(now, heard_at, window):
            wanted = [chunk for first, count in ranges for chunk in range(first, first + count)]
            asked += len(wanted)
            assert 0 <= wanted[0] and wanted[-1] < chunks
            assert transfer.asked <= window
            send(wanted)
        if not transfer.complete:
            now = max(now, min([transfer.deadline(now), *arriving.values()]))
        assert now < 3600.0
    assert transfer.deadline(now) == float("inf") and transfer.ask(now, now, window) == ()
    assert transfer.here == chunks and transfer.asked == 0 and not transfer.add(0, now)
    if not loss:
        assert asked == (0 if unasked else chunks), "nothing was asked for twice"


@pytest.mark.parametrize(
    ("chunks", "unasked", "course"),
    [
        (
            12,
            True,
            [
                (0.1, [0, 1, 3, 2, 4], ()),  # Streams may overtake each other.
                (0.2, [8], ((6, 1),)),
                (0.3, [7], ((5, 1),)),
                (0.4, [6], ()),  # An answer is no hole.
                *((0.5, [chunk], ()) for chunk in (10, 9, 11, 5)),
            ],
        ),
        (100, False, [(0.5, [], ((0, 32),)), (1.25, range(7), ()), (1.5, [7], ((32, 8),))]),
    ],
    ids=["a hole in a stream at once", "a quarter of the window when a quarter has come"],
)
def test_what_is_missing_is_asked_for(
    chunks: int, unasked: bool, course: list[tuple[float, list[int], tuple[tuple[int, int], ...]]]
) -> None:
    """Holds `Transfer.ask`."""
    transfer = Transfer(chunks, 0.0, unasked=unasked, streams=2)
    for now, come, asked in course:
        for chunk in come:
            assert transfer.add(chunk, now)
        assert (transfer.deadline(now) == now) is bool(asked)
        assert transfer.ask(now, now, 32) == asked
        assert transfer.deadline(now) == (math.inf if transfer.complete else now + 1.0)


@pytest.mark.parametrize(
    ("talks", "asked_at"), [(False, [1.0, 3.0, 7.0, 15.0, 23.0]), (True, [1.0, 2.0, 3.0, 4.0, 5.0])]
)
def test_the_wait_doubles_only_while_nothing_at_all_comes(
    talks: bool, asked_at: list[float]
) -> None:
    """Holds `Transfer.deadline`."""
    transfer = Transfer(4, 0.0, unasked=True)
    now = 0.0
    times = list[float]()
    while len(times) < len(asked_at):
        now = transfer.deadline(now)
        if transfer.ask(now, now - 0.1 if talks else 0.0, 32):
            times.append(now)
    assert times == asked_at
    transfer.add(0, now)
    assert transfer.deadline(now) == now + 1.0, "progress ends the waiting"


def test_a_question_has_no_more_ranges_than_a_message_may() -> None:
    """Holds `Transfer.ask`."""
    transfer = Transfer(1000, 0.0, unasked=True)
    for chunk in range(0, 1000, 2):
        transfer.add(chunk, 0.0)
    first, second, third = (transfer.ask(1.0, 0.0, 1000) for _ in range(3))
    assert len(first) == RANGES_MAX and len(second) == 500 - RANGES_MAX and third == ()
