"""Many senders behind one line: rates, fair turns, and what survives a session."""

from __future__ import annotations

import pytest
from flow_cases import PAYLOAD_BYTES, header_of, parcel, sender_to

from narrows.proto.flow.hub import Hub
from narrows.proto.flow.sender import Datagram
from narrows.proto.messages import DataKind
from narrows.proto.timing import RATE_BURST_S, RATE_PAUSE_BURST_S

MESSAGE_BYTES = 1600
"""More than any message here takes on the line."""


class Line:
    """A hub, and everything that it has sent."""

    def __init__(self, total: float = 0.0, each: float = 0.0) -> None:
        self.hub = Hub(total=total, each=each)
        self.sent: list[tuple[str, Datagram]] = []
        self.now = 0.0

    def join(self, learner: str, process: int = 0) -> None:
        sender = sender_to(learner, process)
        self.hub.add(sender)

    def queue(self, learner: str, count: int, kind: DataKind = DataKind.PUBLICATION) -> None:
        for offset in range(0, 10 * count, 10):
            self.hub.senders[learner].put(parcel(offset, kind=kind))

    def serve(self, now: float) -> list[str]:
        """Names of those that were sent something at this time, by message."""
        self.now = now
        before = len(self.sent)
        self.sent += self.hub.due(now, most=256)
        return self.names[before:]

    def serve_turns(self, turns: int) -> None:
        """So many times at the first moment at which something may leave."""
        for _ in range(turns):
            self.serve(self.hub.opens_at(self.now) or self.now)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sent]

    @property
    def wire_bytes(self) -> int:
        return sum(datagram.wire_bytes for _, datagram in self.sent)

    def acknowledge(self, learner: str) -> None:
        """Everything that was sent to a learner has come."""
        sender = self.hub.senders[learner]
        sender.acknowledge(sender.positions, self.now)


def test_the_rate_of_a_learner_holds() -> None:
    line = Line(each=1e6)
    line.join("a")
    line.queue("a", 100)
    line.serve(0.0)
    while (now := line.hub.opens_at(line.now)) is not None:
        line.serve(now)
        assert 8 * line.wire_bytes <= 1e6 * (now + RATE_BURST_S) + 8 * MESSAGE_BYTES
    assert len(line.sent) == 100
    assert 8 * line.wire_bytes >= 0.95 * 1e6 * line.now


@pytest.mark.parametrize("rates", [{"each": 1e6}, {"total": 1e6}], ids=["each", "total"])
@pytest.mark.parametrize("what", ["control", "acknowledgements"])
def test_what_does_not_wait_for_the_budget_is_paid_from_it(
    rates: dict[str, float], what: str
) -> None:
    """The rate is a promise for the line, not for the data alone."""

    def waits(learner: str) -> bool:
        line = Line(**rates)
        line.join("a")
        if what == "control":
            line.hub.charge(learner, 62_500, 1.0)
        else:
            line.hub.received(learner, 100_000_000, 1.0)
        line.queue("a", 1)
        return not line.serve(1.0)

    assert waits("a")
    assert waits("one that has left") is ("total" in rates)


@pytest.mark.parametrize("rates", [{"each": 1e6}, {"total": 1e6}], ids=["each", "total"])
def test_after_a_pause_the_line_is_not_flooded(rates: dict[str, float]) -> None:
    """A pause saves nothing up: routers' queues are short."""
    line = Line(**rates)
    line.join("a")
    line.queue("a", 16)
    line.serve_turns(16)
    assert len(line.sent) == 16
    line.acknowledge("a")
    before = line.wire_bytes
    line.queue("a", 80)
    line.serve(30.0)
    assert 0 < 8 * (line.wire_bytes - before) <= 1e6 * RATE_PAUSE_BURST_S + 8 * MESSAGE_BYTES


def test_learners_share_the_total_and_who_had_nothing_gets_no_more_than_its_part() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.queue("a", 100)
    line.serve_turns(40)
    line.join("b", 1)
    line.queue("b", 100)
    before = len(line.sent)
    line.serve_turns(40)
    after = line.names[before:]
    assert len(after) >= 40 and abs(after.count("a") - after.count("b")) <= 2


def test_a_joiner_leaves_seven_eighths_to_the_fragments_of_others() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.join("b", 1)
    line.queue("a", 200)
    line.queue("b", 200, DataKind.STATE)
    line.serve_turns(160)
    first = line.names[:160]
    assert abs(first.count("b") - 20) <= 2


def test_a_joiner_is_owed_nothing_for_the_time_before_it_came() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.queue("a", 300)
    line.serve_turns(200)
    line.join("b", 1)
    line.queue("b", 200, DataKind.STATE)
    before = len(line.sent)
    line.serve_turns(80)
    after = line.names[before : before + 80]
    assert abs(after.count("b") - 10) <= 2


def test_a_joiner_that_is_cut_off_saves_nothing_up_for_the_next_one() -> None:
    line = Line(total=1e6)
    for number, name in enumerate("abc"):
        line.join(name, number)
    line.queue("a", 6000)
    line.queue("b", 200, DataKind.STATE)
    line.hub.senders["b"].set_rate(1e-3, 0.0)
    line.serve_turns(1500)
    line.acknowledge("a")
    line.queue("c", 200, DataKind.STATE)
    before = len(line.sent)
    line.serve_turns(80)
    after = line.names[before : before + 80]
    assert abs(after.count("c") - 10) <= 2


def test_a_state_of_its_own_does_not_hold_back_a_learners_fragments() -> None:
    line = Line(total=1e6)
    for number, name in enumerate("abcdef"):
        line.join(name, number)
    for name in "ab":
        line.queue(name, 2000)
    for name in "acdef":
        line.queue(name, 2000, DataKind.STATE)
    for _ in range(800):
        line.serve_turns(1)
        for name in "abcdef":
            line.acknowledge(name)
    sent = [(name, datagram.parcel.kind) for name, datagram in line.sent]
    share = {name: sent.count((name, DataKind.PUBLICATION)) / len(sent) for name in "ab"}
    assert min(share.values()) > 0.35


def test_who_had_no_credit_does_not_get_what_it_missed() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.join("b", 1)
    for second in range(1, 40):
        for name in "ab":
            line.queue(name, 200)
        line.serve(second / 2)
        line.acknowledge("b")
        if second >= 30:
            line.acknowledge("a")
    assert line.names[-40:].count("b") >= 10


def test_a_turn_is_bounded_and_the_next_one_is_due_at_once() -> None:
    line = Line()
    line.join("a")
    line.queue("a", 300)
    assert len(line.serve(5.0)) == 256
    assert line.hub.next_deadline(5.0) == 5.0


def test_a_learner_that_does_not_listen_holds_nobody_up() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.join("b", 1)
    line.hub.senders["a"].is_heard = False
    line.queue("a", 10)
    line.queue("b", 10)
    line.serve_turns(20)
    assert line.names == ["b"] * 10
    assert line.hub.opens_at(line.now) is None


def test_the_rate_and_the_positions_of_a_process_survive_its_session() -> None:
    line = Line(each=1e6)
    line.join("a")
    line.queue("a", 4)
    line.serve_turns(4)
    line.hub.charge("a", 125_000, line.now)
    line.hub.remove("a")
    line.join("a")
    line.queue("a", 1)
    assert line.serve(line.now + 0.9) == [], "a debt is not forgotten with the session"
    assert line.serve(line.now + 0.2) == ["a"]
    assert header_of(line.sent[-1][1]).position == 5 * PAYLOAD_BYTES
    line.join("a", 1)
    line.queue("a", 1)
    line.serve_turns(1)
    assert header_of(line.sent[-1][1]).position == PAYLOAD_BYTES, "another process counts anew"


def test_what_a_dead_stream_carried_is_charged_to_the_line_again() -> None:
    line = Line(total=1e6)
    line.join("a")
    line.join("b", 1)
    line.queue("a", 50)
    line.serve_turns(50)
    line.serve(line.now + 6.0)  # Nothing was acknowledged: all is queued again, one is tried.
    line.queue("b", 1)
    assert line.serve(line.now) == []
    opens_at = line.hub.opens_at(line.now)
    assert (
        opens_at is not None and opens_at > line.now + 50 * PAYLOAD_BYTES * 8 / 1e6 - RATE_BURST_S
    )


def test_new_rates_hold_for_learners_that_come_back_too() -> None:
    line = Line()
    line.join("a")
    line.hub.remove("a")
    line.hub.set_rates(total=0.0, each=1e6, now=0.0)
    line.join("a")
    line.join("b", 1)
    for name in "ab":
        line.queue(name, 100)
    assert len(line.serve(0.0)) < 50
