"""When a round is due, and the pace: numbers in, numbers out."""

from __future__ import annotations

import pytest

from narrows.broker.syncer.clock import Clock
from narrows.broker.syncer.grace import has_quorum, pace_s, spacing_s, window_s
from narrows.proto.messages import RunSettings

SETTINGS = RunSettings(fragments=4, sync_period_steps=10, overlap_steps=2)


@pytest.mark.parametrize(
    ("quorum", "here", "awaited", "absent", "enough"),
    [
        (1, 0, 3, 3, False),
        (1, 0, 0, 0, False),
        (1, 1, 3, 2, True),
        (1, 2, 0, 0, True),
        (2, 1, 3, 2, False),
        (2, 2, 3, 1, True),
        (2, 1, 1, 0, True),
        (0, 2, 3, 1, False),
        (0, 3, 3, 1, False),
        (0, 3, 3, 0, True),
    ],
)
def test_a_quorum_is_of_those_who_can_come(
    quorum: int, here: int, awaited: int, absent: int, enough: bool
) -> None:
    assert has_quorum(quorum, here=here, awaited=awaited, absent=absent) is enough


@pytest.mark.parametrize(
    ("xi_s", "quorum_after_s", "sync_s", "window"),
    [
        (1.0, 0.0, 0.0, 2.5),  # One spacing, 10 * 1 / 4, is more than 0.9 * 2 * 1.
        (1.0, 9.0, 9.0, 2.5),
        (4.0, 0.0, 0.0, 10.0),
    ],
)
def test_a_window_is_at_least_one_spacing(
    xi_s: float, quorum_after_s: float, sync_s: float, window: float
) -> None:
    found = window_s(SETTINGS, xi_s, quorum_after_s=quorum_after_s, sync_s=sync_s)
    assert found == pytest.approx(window)


def test_a_window_is_what_the_overlap_hides() -> None:
    settings = RunSettings(fragments=10, sync_period_steps=10, overlap_steps=8)
    found = window_s(settings, 1.0, quorum_after_s=2.0, sync_s=1.0)
    assert found == pytest.approx(0.9 * (8 - 2 - 1))


def test_all_together_make_n_times_h_steps_per_version() -> None:
    steps_s = [0.01, 0.5, 0.5, 0.5]
    period_s = SETTINGS.sync_period_steps * pace_s(steps_s)
    assert sum(period_s / each for each in steps_s) == pytest.approx(4 * 10)
    assert spacing_s(SETTINGS, pace_s(steps_s)) == pytest.approx(period_s / 4)


@pytest.mark.parametrize("learners", [2, 3, 10])
def test_a_hung_learner_stretches_the_period_by_n_of_n_minus_1_at_most(learners: int) -> None:
    without = pace_s([0.1] * (learners - 1))
    assert pace_s([0.1] * (learners - 1) + [1e9]) <= without * learners / (learners - 1) * 1.0001


def test_the_clock_counts_each_token_once() -> None:
    clock = Clock(fragments=4)
    for at in range(4):
        clock.count(1000, 10.0 + at)
    assert clock.run_tokens == 1000
    assert clock.tokens_per_s(13.0) == pytest.approx(250.0)
    assert clock.tokens_per_s(13.0 + 2 + 2 * 1.0) > 0
    assert clock.tokens_per_s(13.0 + 2 + 2 * 1.0 + 0.1) == 0.0
