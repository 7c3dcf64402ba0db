"""The run's clock: merged tokens, whole units, and limits that no claim moves."""

from __future__ import annotations

import pytest

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import policy_of
from narrows.broker.storage.records import (
    NOT_COUNTED,
    ContributorRecord,
    RoundRecord,
    VectorRecord,
)
from narrows.broker.storage.replay import units_after
from narrows.broker.syncer.clock import FIRST_TOKENS_PER_S_MAX, Claim, RunClock
from narrows.proto.limits import TOKENS_MAX
from narrows.proto.messages import Phase

WILD = 1 << 62


def clock(*names: str, fragments: int = 2) -> RunClock:
    run = RunClock()
    run.begin(fragments, 0.0)
    for name in names:
        run.expect(name, 0.0)
    return run


def merge(run: RunClock, at: float, tokens: dict[str, int], fragment: int = 0) -> list[int]:
    """A round whose contributors have worked since the last one of the fragment."""
    seconds = run.age(fragment, at)
    claims = [Claim(name, count, seconds) for name, count in sorted(tokens.items())]
    counted = run.count(fragment, claims, sorted(tokens), at)
    run.merged(fragment, counted, at)
    return counted


def honest(run: RunClock, until: int, *names: str) -> None:
    """A round every ten seconds, of 100 tokens a second each."""
    for at in range(10, until + 1, 10):
        for fragment in range(run.fragments):
            merge(run, float(at), {name: 1000 for name in names}, fragment)


def test_a_push_of_one_fragment_counts_its_share_of_the_model() -> None:
    run = clock("a", "b", fragments=3)
    merge(run, 10.0, {"a": 100, "b": 100})
    assert (run.units, run.run_tokens) == (200, 66)
    merge(run, 10.0, {"a": 100, "b": 100}, 1)
    merge(run, 10.0, {"a": 100, "b": 100}, 2)
    assert run.run_tokens == 200, "no third of a token is lost"


def test_what_honest_learners_merge_counts_in_full() -> None:
    run = clock("a", "b", "c")
    honest(run, 600, "a", "b", "c")
    assert run.run_tokens == 3 * 100 * 600
    assert run.tokens_per_s(600.0) == pytest.approx(300.0, rel=0.1)


@pytest.mark.parametrize("claim", [1 << 40, WILD])
@pytest.mark.parametrize("others", [("a",), ("a", "b")])
def test_what_an_insider_claims_counts_at_four_times_the_median_at_most(
    claim: int, others: tuple[str, ...]
) -> None:
    run = clock(*others)
    honest(run, 600, *others)
    before = run.run_tokens
    for at in range(610, 671, 10):
        for fragment in range(2):
            merge(run, float(at), {name: 1000 for name in others} | {"x": claim}, fragment)
    # 70 seconds, since a round may hold what was made since the one before.
    assert run.run_tokens - before <= (len(others) + 4) * 100 * 70
    assert run.tokens_per_s(670.0) <= (len(others) + 4) * 100 * 1.1


def test_an_insider_of_three_cannot_hold_the_clock_up() -> None:
    run = clock("a", "b")
    honest(run, 600, "a", "b")
    before = run.run_tokens
    for at in range(610, 671, 10):
        for fragment in range(2):
            merge(run, float(at), {"a": 1000, "b": 1000, "x": 1}, fragment)
    assert run.run_tokens - before >= 200 * 70


def test_the_tokens_of_a_suspect_count_no_faster_than_the_median() -> None:
    run = clock("a", "b", "x")
    honest(run, 600, "a", "b", "x")
    claims = [Claim(name, WILD if name == "x" else 1000, 10.0) for name in ("a", "b", "x")]
    everybody = ["a", "b", "x"]
    assert run.count(0, claims, everybody, 610.0, ["x"]) == [1000, 1000, 1000]
    assert run.count(0, claims, everybody, 610.0) == [1000, 1000, 4000]
    alone = RunClock()
    alone.begin(1, 0.0)
    honest(alone, 70, "x")
    assert alone.count(0, [Claim("x", 1000, 10.0)], ["x"], 80.0, ["x"]) == [1000]


def test_one_long_wait_does_not_make_a_learner_slow() -> None:
    run = clock("a", "b", fragments=1)
    honest(run, 600, "a", "b")
    assert merge(run, 1200.0, {"a": 1000, "b": 1000}) == [1000, 1000], "a wait of ten minutes"
    for at in range(1210, 1400, 10):
        assert merge(run, float(at), {"a": 1000, "b": 1000}) == [1000, 1000]
        assert not run.held_back(["a", "b"])


def test_a_first_claim_beside_others_waits_until_they_can_be_compared() -> None:
    run = clock("a", "x")
    assert merge(run, 1.0, {"x": WILD}) == [0]
    assert merge(run, 11.0, {"a": 1000, "x": WILD}) == [1000, 4000]


def test_one_that_never_contributes_holds_the_clock_up_for_a_minute_at_most() -> None:
    run = clock("a", "silent")
    honest(run, 50, "a")
    assert run.run_tokens == 0
    run.expect("silent", 55.0)  # It joins again.
    honest_from = run.run_tokens
    for at in (60, 70, 80):
        merge(run, float(at), {"a": 1000})
    assert run.run_tokens > honest_from


def test_one_that_joins_later_does_not_hold_up_who_was_alone() -> None:
    run = clock("a")
    honest(run, 20, "a")
    run.expect("b", 25.0)
    assert merge(run, 30.0, {"a": 1000}) == [1000]


def test_a_learner_alone_is_bounded_by_its_first_minute() -> None:
    run = clock("a")
    honest(run, 70, "a")
    before = run.run_tokens
    for at in range(80, 141, 10):
        for fragment in range(2):
            merge(run, float(at), {"a": WILD}, fragment)
    assert run.run_tokens - before <= 8 * 100 * 70 * 1.2


def test_a_first_claim_of_a_learner_alone_has_a_limit() -> None:
    run = clock("a")
    assert merge(run, 1.0, {"a": WILD}) == [FIRST_TOKENS_PER_S_MAX]


def test_one_of_whose_tokens_most_does_not_count_is_told_once() -> None:
    run = clock("a", "fast")
    told: list[dict[str, float]] = []

    def go_on(at: int, seconds: int, fast: int) -> None:
        for now in range(at + 10, at + seconds + 1, 10):
            merge(run, float(now), {"a": 1000, "fast": fast})
            told.append(run.held_back(["a", "fast"]))

    go_on(0, 300, 4000)
    assert not any(told), "four times the other one counts in full"
    go_on(300, 300, 10000)
    assert [names for each in told for names in each] == ["fast"]
    go_on(600, 300, 4000)
    told.clear()
    go_on(900, 300, 10000)
    assert [names for each in told for names in each] == ["fast"]


def test_a_rejoin_resets_nothing() -> None:
    run = clock("a", "x")
    honest(run, 100, "a", "x")
    before = run.run_tokens
    for at in range(101, 161):
        run.expect("x", float(at))
        for fragment in range(2):
            merge(run, float(at), {"a": 100, "x": WILD}, fragment)
    assert run.run_tokens - before <= 5 * 100 * 61


def test_a_setting_limits_every_learner_and_a_key_its_own() -> None:
    run = clock("a", "x")
    run.limit = 50.0
    assert merge(run, 10.0, {"a": 1000, "x": WILD}) == [500, 500]
    run.limit_of = lambda name: 20.0 if name == "x" else 0.0
    assert merge(run, 20.0, {"a": 1000, "x": WILD}) == [500, 200]


def test_no_sum_overflows() -> None:
    run = clock("a", "b")
    run.limit = 1e18
    for at in range(1, 100):
        merge(run, 1e6 * at, {"a": 1 << 200, "b": 1 << 200})
    assert run.run_tokens == TOKENS_MAX
    assert run.tokens_per_s(1e6 * 99) <= 1e18


def test_the_clock_rests_when_no_round_is_merged() -> None:
    run = clock("a", "b")
    honest(run, 100, "a", "b")
    assert run.tokens_per_s(105.0) > 0.0
    assert run.tokens_per_s(150.0) == 0.0, "the learners' clocks would run ahead"


def test_a_name_that_is_forgotten_leaves_its_tokens() -> None:
    run = clock("a", "b")
    honest(run, 100, "a", "b")
    before = run.run_tokens
    run.forget("a")
    run.forget("never seen")
    assert run.run_tokens == before


def test_a_restart_goes_on_with_the_units_and_with_no_time_of_before() -> None:
    run = clock("a", "x")
    honest(run, 100, "a", "x")
    again = RunClock()
    again.begin(2, 500.0, run.units)
    again.expect("a", 500.0)
    again.expect("x", 500.0)
    assert again.units == run.units
    # The insider is back first.
    assert merge(again, 505.0, {"x": WILD}) == [0]
    assert merge(again, 506.0, {"a": 100, "x": WILD}, 1) == [100, 400]


def record(run_tokens: int, *counted: int) -> RoundRecord:
    contributors = tuple(
        ContributorRecord(name, "0" * 32, 1, 500, 1, 0.5, 500, tokens)
        for name, tokens in zip("ab", counted, strict=False)
    )
    policy = policy_of(BrokerConfig())
    publication = VectorRecord("raw32", 0.0, ())
    return RoundRecord(
        (1, 1), 0, 1, "", contributors, policy, Phase.RUNNING, run_tokens, publication, (), 0.0,
        (0, 0, 0), 0.0,
    )  # fmt: skip


def test_a_restart_adds_up_what_the_records_count() -> None:
    units = 7
    for counted in ((100, 50), (1, 1)):
        units = units_after(units, 4, record(0, *counted))
    assert units == 7 + 152
    assert units_after(TOKENS_MAX * 4, 4, record(0, 9)) == TOKENS_MAX * 4


def test_records_of_format_1_and_those_after_a_gap_have_the_clock_themselves() -> None:
    assert units_after(7, 4, record(1000, NOT_COUNTED, NOT_COUNTED)) == 4000
    assert units_after(7, 4, record(1000, 100)) == 4100
