"""The budget in virtual time: the cost of a message, no second above the rate, no rate unused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.proto.flow import Budget, wire_bytes
from narrows.proto.flow.budget import LATE_S, RESUME_S


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


def saturated(
    budget: Budget, size: int, seconds: float, late_s: list[float], control: int = 0
) -> list[tuple[float, int]]:
    """Departures of a sender that always has a message of `size` waiting, wakes up late by these
    times in turn, and sends `control` bytes every 100 ms that never wait."""
    now, control_at, left = 0.0, 0.0, list[tuple[float, int]]()
    while now < seconds:
        opens_at = budget.opens_at(size, now)
        if control and control_at <= opens_at:
            now, control_at = max(now, control_at), control_at + 0.1
            budget.charge(control, now)
            left.append((now, control))
        elif opens_at <= now:
            budget.charge(size, now)
            left.append((now, size))
        else:
            now = opens_at + late_s[len(left) % len(late_s)]
    return left


@settings(max_examples=40, deadline=None)
@given(
    rate=st.sampled_from([1e5, 1e6, 1e7, 1e9]),
    share_s=st.floats(0.001, 0.02),
    late_s=st.lists(st.floats(0.0, 0.01), min_size=1, max_size=5),
    control_share=st.sampled_from([0.0, 0.05]),
)
def test_no_second_above_the_rate_and_95_percent_used(
    rate: float, share_s: float, late_s: list[float], control_share: float
) -> None:
    """Messages of 10 ms of the rate, to half or twice as many learners as expected; a loop that
    wakes up late by as much."""
    size = max(100, int(share_s * rate / 8))
    left = saturated(Budget(rate), size, 12.0, late_s, int(control_share * rate / 80))
    assert 8 * busiest_second(left) <= 1.02 * rate
    steady = sum(bytes_ for at, bytes_ in left if 2.0 <= at < 12.0)
    assert 8 * steady >= 0.95 * rate * 10


@pytest.mark.parametrize("late_s", [0.3, 5.0])
def test_a_sender_that_was_very_late_makes_up_for_little(late_s: float) -> None:
    left = saturated(Budget(8e6), 10_000, 30.0, [late_s])
    assert busiest_second(left) <= 1.02e6
    at_once = max(sum(size for at, size in left if at == when) for when, _ in left)
    assert at_once <= 1e6 * LATE_S + 10_000


def test_work_that_begins_after_a_pause_begins_slowly() -> None:
    budget, sent = Budget(8e6), 0
    budget.charge(1, 0.0)
    budget.resume(50.0)
    while budget.opens_at(1000, 50.0) <= 50.0:
        budget.charge(1000, 50.0)
        sent += 1000
    assert sent <= 1e6 * RESUME_S + 1000


def test_a_message_cut_for_a_larger_rate_leaves_between_control_messages() -> None:
    left = saturated(Budget(1e5), 30_000, 100.0, [0.0], control=300)
    assert sum(size == 30_000 for _, size in left) >= 25
    assert sum(8 * size for _, size in left) <= 1.02e5 * 100 + 8 * 30_000


def test_a_debt_is_one_of_bytes() -> None:
    budget = Budget(1e6)
    budget.charge(125_000, 10.0)
    budget.set_rate(2e6, 10.0)
    assert 10.4 < budget.opens_at(0, 10.0) < 10.6
    budget.set_rate(0.0, 10.0)
    assert budget.opens_at(10**12, 10.0) <= 10.0


def test_acknowledgements_are_charged_and_take_half_of_the_rate_at_most() -> None:
    budget = Budget(1e6)
    budget.acknowledge(28_960, 1.0)
    assert budget.in_window(1.0) == 10 * 66
    for hundredth in range(1, 201):
        budget.acknowledge(10**9, 1.0 + hundredth / 100)
    assert budget.in_window(3.0) == pytest.approx(62_500, rel=0.02)
    assert budget.opens_at(0, 3.0) <= 3.0


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.integers(1, 40), min_size=1, max_size=30), rate=st.floats(1e5, 1e9))
def test_acknowledgements_of_a_batch_cost_as_much_as_one_by_one(
    batches: list[int], rate: float
) -> None:
    """A loop that was late reads many messages at the same moment: their acknowledgements left
    when they came. Here they take a quarter of the rate."""
    budget, segments, charged = Budget(rate), 2, 0
    size_bytes, now = segments * 1448, 1.0
    for batch in batches:
        now += batch * 66 / (0.25 * rate / 8)
        before = budget.in_window(now)
        for _ in range(batch):
            budget.acknowledge(size_bytes, now)
        charged += budget.in_window(now) - before
    assert charged == 66 * sum(batches)


def test_a_message_costs_its_headers_down_to_ethernet() -> None:
    frames = (4, 100, 98_000)
    plain = sum(frames) + 3 * 9
    assert wire_bytes(frames, curve=False) == plain + 66 * math.ceil(plain / 1448)
    assert wire_bytes(frames, curve=True) == plain + 99 + 66 * math.ceil((plain + 99) / 1448)
