"""The run's clock: monotone, bounded per name, exact, whatever is claimed, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.syncer.clock import Claim, RunClock
from narrows.proto.limits import TOKENS_MAX

FRAGMENTS = 3
NAMES = "abcx"


@dataclass(frozen=True)
class Merge:
    wait_s: float
    fragment: int
    tokens: dict[str, int]
    worked: float
    """Share of the time since the last version that the contributors worked."""


claims = st.dictionaries(
    st.sampled_from(NAMES), st.integers(1, 1 << 70) | st.integers(1, 10_000), min_size=1
)
rounds = st.lists(
    st.builds(
        Merge, st.floats(0.0, 100.0), st.integers(0, FRAGMENTS - 1), claims, st.floats(0.0, 1.0)
    ),
    max_size=60,
)


def run(course: Sequence[Merge], *, limit: float = 0.0, backwards: bool = False) -> RunClock:
    clock, now = RunClock(limit), 0.0
    clock.begin(FRAGMENTS, now)
    for merge in course:
        now += merge.wait_s
        seconds = merge.worked * clock.age(merge.fragment, now)
        names = sorted(merge.tokens, reverse=backwards)
        told = [Claim(name, merge.tokens[name], seconds) for name in names]
        before = clock.units
        counted = clock.count(merge.fragment, told, names, now)
        assert clock.units == before, "nothing counts before it is durable"
        clock.merged(merge.fragment, counted, now)
        assert before <= clock.units <= TOKENS_MAX * FRAGMENTS
        assert 0.0 <= clock.tokens_per_s(now) <= 1e18
    return clock


@given(rounds)
def test_the_clock_is_the_sum_of_what_counts_and_never_falls(course: list[Merge]) -> None:
    clock = run(course)
    assert clock.run_tokens == clock.units // FRAGMENTS


@given(rounds)
def test_the_order_of_arrival_changes_nothing(course: list[Merge]) -> None:
    assert run(course).units == run(course, backwards=True).units


@given(rounds, st.floats(1.0, 1e6))
def test_no_name_counts_more_than_its_limit_times_the_time(
    course: list[Merge], limit: float
) -> None:
    seconds = sum(merge.wait_s for merge in course)
    names = {name for merge in course for name in merge.tokens}
    clock = run(course, limit=limit)
    assert clock.run_tokens <= len(names) * limit * seconds * (1 + 1e-9) + 1


@given(
    st.lists(st.integers(1, 1 << 70), min_size=1, max_size=40),
    st.lists(st.floats(0.25, 1.0), min_size=1, max_size=4),
    st.floats(0.5, 500.0),
)
def test_what_one_insider_claims_counts_four_times_an_honest_learner_at_most(
    wild: list[int], speeds: list[float], round_s: float
) -> None:
    """From its first push on, beside any number of honest learners."""
    made = {f"l{i}": max(1, int(speed * 1000 * round_s)) for i, speed in enumerate(speeds)}
    course = [
        Merge(round_s if i % FRAGMENTS == 0 else 0.0, i % FRAGMENTS, made | {"x": claim}, 1.0)
        for i, claim in enumerate(wild)
    ]
    seconds = sum(merge.wait_s for merge in course)
    most = (len(speeds) + 4) * max(made.values()) / round_s * seconds
    assert run(course).run_tokens <= most * (1 + 1e-9) + 1


@given(
    st.integers(1, 1 << 30),
    st.lists(st.floats(0.3, 3.0), min_size=2, max_size=5),
    st.floats(0.1, 1000.0),
    st.integers(1, 40),
)
def test_honest_learners_of_similar_speed_count_in_full(
    tokens_per_s: int, speeds: list[float], round_s: float, count: int
) -> None:
    """The fastest makes at most four times the tokens of the slower half."""
    speeds = sorted(speeds)
    if speeds[-1] > 4 * speeds[(len(speeds) - 1) // 2]:
        return
    made = {f"l{i}": max(1, int(s * tokens_per_s * round_s)) for i, s in enumerate(speeds)}
    if min(made.values()) < 100:
        return  # A limit is rounded down to whole tokens.
    clock, now = RunClock(), 0.0
    clock.begin(FRAGMENTS, now)
    for _ in range(count):
        now += round_s
        told = [Claim(name, tokens, round_s) for name, tokens in sorted(made.items())]
        for fragment in range(FRAGMENTS):
            clock.merged(fragment, clock.count(fragment, told, sorted(made), now), now)
    assert clock.units >= FRAGMENTS * count * sum(made.values()) * (1 - 1e-6) - count * len(made)


@given(rounds)
def test_replaying_what_counted_gives_the_same_clock(course: list[Merge]) -> None:
    """A record keeps what counts of each contribution; the sum needs no order and no time."""
    clock, now = RunClock(), 0.0
    clock.begin(FRAGMENTS, now)
    kept: list[list[int]] = []
    for merge in course:
        now += merge.wait_s
        told = [Claim(name, merge.tokens[name], 1.0) for name in sorted(merge.tokens)]
        counted = clock.count(merge.fragment, told, sorted(merge.tokens), now)
        clock.merged(merge.fragment, counted, now)
        kept.append(counted)
    assert clock.units == min(sum(map(sum, kept)), TOKENS_MAX * FRAGMENTS)
