"""The run's clock keeps up with honest learners, and wild reports do not drive it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.syncer.clock import FIRST_REPORTS, FIRST_TOKENS_MAX, RATE_RATIO_MAX, RunClock

IDLE_REPORT_S = 1.0

steps = st.floats(0.01, 60.0)
tokens_of_a_step = st.integers(1, 1 << 17)
waits = st.floats(0.0, 100_000.0)
pauses = st.dictionaries(st.integers(0, 60), st.floats(0.0, 3600.0), max_size=3)
"""Seconds by the number of steps before the pause."""


def test_a_wild_first_report_lets_in_no_more_than_its_allowance() -> None:
    clock = RunClock()
    clock.join("a", 0, 0.0)
    clock.report("a", 1, 1.0)
    clock.report("a", 1 << 62, 2.0)
    assert clock.run_tokens == 1 + FIRST_TOKENS_MAX


def logged(
    waits_s: float, step_s: float, tokens: int, pauses_s: dict[int, float], count: int = 200
) -> list[tuple[float, int]]:
    """Time and cumulative tokens of each step of a learner that has joined at 0."""
    made: list[tuple[float, int]] = []
    now = waits_s
    for number in range(count):
        now += step_s + pauses_s.get(number, 0.0)
        made.append((now, tokens * (number + 1)))
    return made


def reports(
    made: Sequence[tuple[float, int]], spacing_s: Sequence[float]
) -> Iterator[tuple[float, int]]:
    """Time and tokens of each report: news after `spacing_s`, in turn, else every second."""
    now, told, at, sent = 0.0, 0, 0, 0
    while at < len(made):
        wait_s = spacing_s[sent % len(spacing_s)]
        due = max(now + wait_s, min(made[at][0], max(now + IDLE_REPORT_S, now + wait_s)))
        if made[at][0] - due > 3 * IDLE_REPORT_S:
            due = made[at][0] - IDLE_REPORT_S  # The idle reports before it are all alike.
        now = due
        while at < len(made) and made[at][0] <= now:
            told, at = made[at][1], at + 1
        sent += 1
        yield now, told


@given(waits, steps, tokens_of_a_step, st.floats(0.01, 300.0))
def test_what_an_honest_learner_reports_is_counted_at_once(
    waits_s: float, step_s: float, tokens: int, spacing_s: float
) -> None:
    """However long it waits for its first step, whatever its rate and the spacing of reports: the
    clock lags by what was made since the last report, by nothing else."""
    clock = RunClock()
    clock.join("a", 0, 0.0)
    per_report = (spacing_s / step_s + 1) * tokens
    if per_report > FIRST_TOKENS_MAX:
        return
    for now, told in reports(logged(waits_s, step_s, tokens, {}), [spacing_s]):
        clock.report("a", told, now)
        assert clock.run_tokens == told


@given(waits, steps, tokens_of_a_step, pauses)
def test_a_learner_that_pauses_goes_on_where_it_was(
    waits_s: float, step_s: float, tokens: int, pauses_s: dict[int, float]
) -> None:
    """Evaluations, compilations: steps that took much longer than the others, at any time."""
    clock = RunClock()
    clock.join("a", 0, 0.0)
    for now, told in reports(logged(waits_s, step_s, tokens, pauses_s), [0.1]):
        clock.report("a", told, now)
        assert clock.run_tokens == told


@given(waits, steps, tokens_of_a_step, st.floats(0.1, 200.0), st.integers(2, 150))
def test_reports_that_are_lost_are_made_up_for_by_the_next(
    waits_s: float, step_s: float, tokens: int, lost_s: float, after: int
) -> None:
    """A learner that was cut off trains on; the report that gets through counts in full."""
    clock = RunClock()
    clock.join("a", 0, 0.0)
    spacing_s = [0.1] * 2000
    spacing_s[after] = lost_s
    if (lost_s / step_s + 1) * tokens > FIRST_TOKENS_MAX:
        return
    for now, told in reports(logged(waits_s, step_s, tokens, {}), spacing_s):
        clock.report("a", told, now)
        assert clock.run_tokens == told


@given(waits, steps, tokens_of_a_step)
def test_the_rate_is_known_from_the_second_step_on(
    waits_s: float, step_s: float, tokens: int
) -> None:
    clock = RunClock()
    clock.join("a", 0, 0.0)
    made = logged(waits_s, step_s, tokens, {})
    begins = made[0][0] + max(2 * step_s, 1.0)
    for now, told in reports(made, [0.1]):
        clock.report("a", told, now)
        if now >= begins + 1.0:
            rate = clock.tokens_per_s(["a"], now)
            assert 0.4 * tokens / step_s <= rate <= 2.5 * tokens / step_s


@given(st.lists(st.tuples(st.floats(0.01, 60.0), st.integers(0, 1 << 62)), min_size=1, max_size=50))
def test_the_clock_never_exceeds_what_was_reported_and_never_falls(
    told: list[tuple[float, int]],
) -> None:
    clock = RunClock()
    clock.join("a", 0, 0.0)
    now, before = 0.0, 0
    for wait_s, tokens in told:
        now += wait_s
        clock.report("a", tokens, now)
        assert before <= clock.run_tokens <= max(count for _, count in told)
        before = clock.run_tokens


@given(
    waits,
    steps,
    st.integers(1, 1000),
    st.integers(FIRST_REPORTS + 1, 150),
    st.integers(1 << 40, 1 << 62),
)
def test_a_wild_report_drives_the_clock_at_eight_times_the_average_rate(
    waits_s: float, step_s: float, tokens: int, number: int, wild: int
) -> None:
    """It is told again and again: nothing but time lets more of it in."""
    clock = RunClock()
    clock.join("a", 0, 0.0)
    made = logged(waits_s, step_s, tokens, {})
    for now, told in made[:number]:
        clock.report("a", told, now)
    now, told = made[number - 1]
    average = tokens / step_s
    for second in range(1, 1000):
        clock.report("a", wild, now + second)
        # The wild report itself raises the average, by at most eight steps or seconds of it.
        learned = 1 + RATE_RATIO_MAX * max(1.0, 1.0 / step_s) / max(1, number - 1)
        most = RATE_RATIO_MAX * average * learned * (second + 1 + step_s)
        assert clock.run_tokens - told <= most + RATE_RATIO_MAX * tokens
