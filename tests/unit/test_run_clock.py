"""The run's clock: monotone, robust against repeated, wild and missing reports."""

from __future__ import annotations

import pytest

from narrows.broker.syncer.clock import RunClock


def clock() -> RunClock:
    """Learner a has joined at 0 and reported 100 tokens per second until 10."""
    run = RunClock()
    run.join("a", 0, 0.0)
    for second in range(1, 11):
        run.report("a", 100 * second, float(second))
    return run


def test_tokens_of_all_learners_are_counted() -> None:
    run = clock()
    run.join("b", 0, 10.0)
    run.report("b", 50, 11.0)
    assert run.run_tokens == 1050


def test_a_repeated_or_older_report_changes_nothing() -> None:
    run = clock()
    run.report("a", 1000, 10.5)
    run.report("a", 500, 11.0)
    assert run.run_tokens == 1000


def test_a_wild_report_is_accepted_at_eight_times_the_average_rate() -> None:
    run = clock()
    run.report("a", 10**9, 11.0)
    grown = run.run_tokens - 1000
    # Eight times 100/s for the second, and what piled up before.
    assert 800 <= grown <= 8 * 100 * 11
    run.report("a", 10**9, 12.0)
    assert run.run_tokens > 1000 + grown


def test_a_delayed_report_is_accepted_in_full() -> None:
    run = clock()
    run.report("a", 4000, 40.0)
    assert run.run_tokens == 4000


def test_a_learner_that_comes_back_is_counted_from_its_own_tokens_on() -> None:
    run = RunClock(run_tokens=5000)
    run.join("a", 700, 0.0)
    run.report("a", 800, 1.0)
    run.join("a", 0, 2.0)
    run.report("a", 900, 2.0)
    assert run.run_tokens == 5200


def test_rate_is_the_sum_of_the_averages() -> None:
    run = clock()
    assert run.tokens_per_s(["a", "unknown"], 10.0) == 100.0
    run.keep({"b"})
    assert run.tokens_per_s(["a"], 10.0) == 0.0


def test_a_first_report_cannot_reach_any_goal() -> None:
    run = RunClock()
    run.join("a", 0, 0.0)
    run.report("a", 1 << 62, 0.001)
    assert run.run_tokens <= 1 << 24


def test_the_rate_of_a_learner_that_has_just_begun_is_bounded() -> None:
    run = RunClock()
    run.join("a", 0, 0.0)
    run.report("a", 1000, 500.0)
    assert run.tokens_per_s(["a"], 500.0) == 0.0, "nobody knows what the first tokens took"
    run.report("a", 2000, 500.0005)
    assert run.tokens_per_s(["a"], 500.0005) == 1000.0


@pytest.mark.parametrize("idle_s", [0.0, 60.0, 1800.0])
def test_a_learner_that_waited_for_others_counts_from_its_first_tokens_on(idle_s: float) -> None:
    """It was counted at an eighth of its tokens, half an hour long, and then all at once."""
    run = RunClock()
    run.join("a", 0, 0.0)
    for second in range(int(idle_s)):
        run.report("a", 0, float(second))
    for step in range(1, 100):
        run.report("a", 10_000 * step, idle_s + step)
        assert run.run_tokens == 10_000 * step
    assert run.tokens_per_s(["a"], idle_s + 99) == 10_000.0


def test_a_learner_that_evaluates_makes_no_tokens_and_goes_on_at_its_rate() -> None:
    run = clock()
    for second in range(11, 611):
        run.report("a", 1000, float(second))
    assert run.tokens_per_s(["a"], 610.0) == 0.0, "the others' clocks would run ahead"
    for second in range(1, 11):
        run.report("a", 1000 + 100 * second, 610.0 + second)
        assert run.run_tokens == 1000 + 100 * second
    assert run.tokens_per_s(["a"], 620.0) == pytest.approx(100.0, rel=0.5)


def test_a_wild_count_that_was_a_mistake_is_taken_back() -> None:
    run = clock()
    run.report("a", 1 << 62, 11.0)
    before = run.run_tokens
    for second in range(12, 100):
        run.report("a", 100 * second, float(second))
    assert run.run_tokens == max(before, 9900)


def test_what_honest_reports_did_not_need_does_not_pile_up_for_a_wild_one() -> None:
    """An hour of honest reports used to leave eight minutes' worth of tokens to a wild one."""
    run = RunClock()
    run.join("a", 0, 0.0)
    for second in range(1, 3601):
        run.report("a", 100 * second, float(second))
    run.report("a", 1 << 62, 3601.0)
    assert run.run_tokens <= 360_000 + 8 * 100 * 1.01
