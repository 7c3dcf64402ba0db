"""The rule for how long one side waits for the other."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.flow.patience import ROUNDS, SAMPLES, SLOWER, Flow, Patience, Way
from narrows.proto.limits import RATE_MIN

USUAL = 100_000.0
"""Bytes per second in these tests."""


def flow_at(bytes_per_s: float, seconds: int = 30) -> Flow:
    """A flow that came at this rate until the time 0."""
    flow, position = Flow(), 1
    flow.move((position,), -float(seconds))
    flow.expect(-float(seconds))
    for second in range(1 - seconds, 1):
        position += int(bytes_per_s)
        flow.move((position,), float(second))
    return flow


def wait(flow: Flow, outstanding_bytes: float, **fields: float) -> Patience:
    given = {"round_s": 1.0, "least_s": 0.0, **fields}
    return Patience(0.0, given["round_s"], given["least_s"], (Way(flow, outstanding_bytes),))


def given_up_at(patience: Patience, bytes_per_s: float, *, from_s: float = 0.0) -> float:
    """Time at which a peer is given up that sends at this rate, in ever so many small messages;
    infinity if all outstanding bytes came before."""
    (way,) = patience.ways
    start, now = 1 + way.flow.moved, 0.0
    while now < patience.until(now):
        now += 0.05
        sent = int(bytes_per_s * max(0.0, now - from_s))
        way.flow.move((start + sent,), now)
        if sent >= way.outstanding_bytes:
            return math.inf
    return now


def test_without_bytes_it_is_three_usual_rounds() -> None:
    assert wait(flow_at(USUAL), 1e9, round_s=4.0).until(0.0) == ROUNDS * 4.0


def test_nobody_is_given_up_sooner_than_one_that_is_gone() -> None:
    assert wait(flow_at(USUAL), 1e9, round_s=0.1, least_s=10.0).until(0.0) == 10.0


def test_a_line_at_its_usual_rate_is_waited_for_whatever_it_carries() -> None:
    assert given_up_at(wait(flow_at(USUAL), 60 * USUAL), USUAL) == math.inf


def test_a_line_at_a_little_more_than_half_of_its_usual_rate_is_waited_for() -> None:
    assert given_up_at(wait(flow_at(USUAL), 60 * USUAL), 0.55 * USUAL) == math.inf


def test_a_line_below_half_of_its_usual_rate_is_given_up_after_three_rounds() -> None:
    assert given_up_at(wait(flow_at(USUAL), 60 * USUAL), 0.4 * USUAL) < 3.5


def test_a_line_that_stops_is_given_up() -> None:
    patience = wait(flow_at(USUAL), 60 * USUAL)
    (way,) = patience.ways
    position = 1 + way.flow.moved
    for tenth in range(1, 101):
        way.flow.move((position + int(USUAL * tenth / 10),), tenth / 10)
        assert patience.until(tenth / 10) > tenth / 10
    assert 10.0 < patience.until(10.0) <= 20.1


def test_a_trickle_is_nothing() -> None:
    for flow in (flow_at(USUAL), flow_at(1.0), Flow()):
        assert given_up_at(wait(flow, 60 * USUAL), 1.0) < 3.5


def test_a_learner_that_comes_from_a_long_step_is_measured_from_its_first_byte() -> None:
    patience = wait(flow_at(USUAL), 20 * USUAL, round_s=5.0)
    assert given_up_at(patience, USUAL, from_s=12.0) == math.inf


def test_a_peer_of_which_nothing_is_known_has_its_present_rate() -> None:
    assert given_up_at(wait(Flow(), 1e6), RATE_MIN / 8 * 1.1) == math.inf
    # It was fast, then it hung: what came in a second buys a second.
    patience = wait(Flow(), 1e9)
    (way,) = patience.ways
    way.flow.expect(0.0)
    for tenth in range(11):
        way.flow.move((1 + int(1e6 * tenth),), tenth / 10)
        patience.until(tenth / 10)
    assert patience.until(1.0) <= ROUNDS * 1.0 + 0.1


def test_nobody_can_be_faster_than_the_budget_lets_it() -> None:
    patience = wait(flow_at(100 * USUAL), 60 * USUAL)
    patience.ways[0].limit_bytes_per_s = USUAL
    assert given_up_at(patience, 0.9 * USUAL) == math.inf


def test_what_is_sent_again_and_again_does_not_hold_for_ever() -> None:
    """A copy that never fits is fetched anew each time."""
    patience = wait(flow_at(USUAL), 10 * USUAL)
    (way,) = patience.ways
    now, position = 0.0, 1 + way.flow.moved
    while now < patience.until(now):
        now += 0.1
        position += int(USUAL / 10)
        way.flow.move((position,), now)
    assert now <= SLOWER * 10 + 0.2


def test_a_line_far_below_that_of_others_gets_a_multiple_of_their_time() -> None:
    patience = wait(flow_at(USUAL), 60 * USUAL)
    patience.ways[0].others_bytes_per_s = 10 * USUAL
    # The others need 6 s.
    assert 23.9 < given_up_at(patience, USUAL) < 24.2
    # None can be faster than the budget lets it.
    patience = wait(flow_at(USUAL), 60 * USUAL)
    patience.ways[0].others_bytes_per_s = 10 * USUAL
    patience.ways[0].limit_bytes_per_s = USUAL
    assert given_up_at(patience, USUAL) == math.inf


def test_a_line_a_little_below_that_of_others_is_waited_for() -> None:
    patience = wait(flow_at(USUAL), 60 * USUAL)
    patience.ways[0].others_bytes_per_s = 3.5 * USUAL
    assert given_up_at(patience, USUAL) == math.inf


def test_bytes_that_were_counted_by_the_receiver_show_the_rate() -> None:
    flow = Flow()
    flow.add(1000, 0.0)
    assert flow.moved == 1000 and flow.usual_bytes_per_s is None
    flow.expect(0.0)
    flow.add(500, 0.5)
    assert flow.usual_bytes_per_s == 1000.0 and flow.sampled_bytes_per_s is None
    flow.add(1500, 2.0)
    assert flow.usual_bytes_per_s == flow.sampled_bytes_per_s == 1000.0


@given(
    st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.floats(1e4, 1e8), st.floats(0.0, 1e8),
    st.floats(0.0, 1e10),
)  # fmt: skip
def test_the_bound_of_the_rule(
    round_s: float, least_s: float, usual: float, rate: float, outstanding: float
) -> None:
    """Whatever comes: at most three usual rounds, or twice the time that the bytes need."""
    patience = wait(flow_at(usual, 3), outstanding, round_s=round_s, least_s=least_s)
    (way,) = patience.ways
    start = 1 + way.flow.moved
    for now in (0.5, 1.0, 10.0, 1e3, 1e6):
        way.flow.move((start + int(rate * now),), now)
        needed_s = outstanding / max(int(usual), RATE_MIN / 8)
        longest = max(ROUNDS * round_s, least_s, SLOWER * needed_s)
        assert ROUNDS * round_s <= patience.until(now) <= longest * (1 + 1e-9)


def test_the_usual_rate_is_that_of_the_time_in_which_bytes_were_awaited() -> None:
    flow, position = Flow(), 1
    flow.move((position,), 0.0)
    for minute in range(20):
        start = 60.0 * minute
        flow.expect(start)
        for tenth in range(1, 6):
            position += 1000
            flow.move((position,), start + tenth / 10)
        flow.settle()
    assert flow.usual_bytes_per_s == 10_000.0


def test_one_fast_moment_does_not_move_the_usual_rate() -> None:
    flow = flow_at(USUAL, SAMPLES)
    flow.move((10**9,), 0.01)
    assert flow.usual_bytes_per_s == USUAL


def test_a_session_that_begins_anew_has_moved_nothing() -> None:
    flow = Flow()
    flow.move((5000, 5000), 0.0)
    flow.move((6000, 5000), 1.0)
    assert flow.moved == 1000
    flow.move((0, 0), 2.0)
    flow.move((6000, 0), 3.0)
    flow.move((6500, 5000), 4.0)
    assert flow.moved == 1500
