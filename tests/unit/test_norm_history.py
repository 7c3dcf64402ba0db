"""The history of norms: what enters, how long it stays, and the bound that follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from merge_cases import contribution, one_fragment

from narrows.broker.merging.history import (
    EMPTY,
    NAMES_KEPT,
    NORMS_MIN,
    ROWS_MAX,
    VERSIONS_KEPT,
    VERSIONS_REMEMBERED,
    NormHistory,
)
from narrows.broker.merging.merge import MergeResult, merge_vectors
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.watch import UNWATCHED
from narrows.proto.codec import F32

PIECE = one_fragment((4, "mean"))
AXIS = np.array([1, 0, 0, 0], np.float32)


def history_of(*rounds: dict[str, float]) -> NormHistory:
    """A history of one piece: rounds of norms by name, as processes "0"."""
    history = EMPTY
    for version, norms in enumerate(rounds, 1):
        applied = np.array([[norms[name]] for name in sorted(norms)], np.float32)
        history = history.after(version, [(name, "0") for name in sorted(norms)], applied)
    return history


def median(history: NormHistory, *learners: str) -> float:
    return float(history.measure(learners, 1).medians[0])


def pushes(**lengths: float) -> list[DecodedVector]:
    return [contribution(name, PIECE, AXIS * np.float32(lengths[name])) for name in sorted(lengths)]


def merged(history: NormHistory, **lengths: float) -> MergeResult:
    ones = pushes(**lengths)
    weights = [1.0 / len(ones)] * len(ones)
    return merge_vectors(PIECE, ones, weights, norm_limit=1.5, history=history)


# Medians.


def test_a_name_counts_once_however_often_it_contributes() -> None:
    rounds = [{"a": 1.0, "z": 9.0}, {"a": 1.0}, {"a": 1.0}, {"b": 2.0}, {"a": 1.0}]
    assert median(history_of(*rounds), "a", "b") == 2.0


def test_the_lower_median_counts() -> None:
    assert median(history_of({"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 6.0}), "a", "b") == 1.0


def test_a_young_history_has_no_median() -> None:
    young = history_of({"a": 1.0, "b": 1.0, "c": 1.0})
    assert NORMS_MIN == 4 and np.isnan(median(young, "a", "b", "c"))
    assert np.isnan(median(EMPTY, "a"))


def test_a_learner_that_is_alone_is_its_own_measure() -> None:
    alone = history_of(*[{"a": 1.0}] * 6)
    measure = alone.measure(["a"], 1)
    assert measure.is_alone and measure.medians[0] == 1.0
    assert not alone.measure(["b"], 1).is_alone
    assert median(alone, "b") == 1.0, "a newcomer is measured by those before it"


def test_the_word_of_one_name_is_no_measure_for_others_beside_it() -> None:
    young = history_of(*[{"b": 1e4}] * 6)
    assert np.isnan(median(young, "a", "b"))
    assert merged(young, a=1.0, b=1e4).applied[:, 0].tolist() == [1.0, 3.0]


def test_zeros_do_not_count() -> None:
    rounds = [{"a": 0.0, "b": 3.0}] * 4
    assert median(history_of(*rounds), "a", "b") == 3.0


# What is kept.


def test_old_versions_go() -> None:
    history = history_of(*[{"a": float(version), "b": 1.0} for version in range(1, 21)])
    assert [each.version for each in history.rounds] == list(range(20 - VERSIONS_KEPT + 1, 21))


def test_a_name_that_is_back_with_another_process_begins_anew() -> None:
    history = history_of(*[{"a": 8.0, "b": 1.0}] * 4)
    after = history.after(5, [("a", "1")], np.array([[2.0]], np.float32))
    assert [each.processes for each in after.rounds] == [(("b", "0"),)] * 4 + [(("a", "1"),)]
    assert after.measure(["a"], 1).medians[0] == 1.0
    assert len(history.rounds[0].processes) == 2, "nothing is changed in place"


def test_memory_is_bounded_whoever_comes() -> None:
    names = [(f"l{i:04d}", "0") for i in range(1000)]
    history = EMPTY
    for version in range(1, 40):
        history = history.after(version, names, np.ones((1000, 3), np.float32))
    kept = sum(each.norms.nbytes for each in history.rounds)
    assert kept == VERSIONS_KEPT * NAMES_KEPT * 3 * 4
    first = [name for name, _ in history.rounds[0].processes]
    assert len(set(first)) == NAMES_KEPT and first[-1] > "l0900", "spread over all names"


def test_the_newest_norms_of_a_name_that_is_away_stay_for_a_while() -> None:
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 1.0}, *[{"b": 1.0}] * VERSIONS_REMEMBERED]
    history = history_of(*rounds[:-2])
    first = history.rounds[0]
    assert (first.version, first.processes) == (2, (("a", "0"),)) and first.norms[0, 0] == 4.0
    assert len(history.rounds) == VERSIONS_KEPT + 1
    assert history.measure(["b"], 1).is_alone, "who is away does not contribute"
    assert history_of(*rounds).rounds[0].processes == (("b", "0"),), "not for ever"


def test_names_that_are_away_are_bounded_and_the_newest_stay() -> None:
    history = EMPTY
    for version in range(1, 50):
        names = [(f"{version:03d}-{i:03d}", "0") for i in range(NAMES_KEPT)]
        history = history.after(version, names, np.ones((NAMES_KEPT, 1), np.float32))
        assert sum(len(each.processes) for each in history.rounds) <= ROWS_MAX
    assert [each.version for each in history.rounds] == list(range(41, 50))


# The bound.


def test_one_contributor_is_bounded_by_the_history_of_others() -> None:
    calm = history_of(*[{"a": 1.0, "b": 1.0}] * 3)
    result = merged(calm, b=1000.0)
    assert result.outer_grad[0] == pytest.approx(1.5) and result.clipped == 1
    assert result.applied.tolist() == [[pytest.approx(1.5)]]


def test_what_is_clipped_weighs_less() -> None:
    calm = history_of(*[{"a": 1.0, "b": 1.0}] * 3)
    result = merged(calm, a=1.0, b=-15.0)
    # b keeps a tenth of its length, so it has 1 part in 11 of the weight.
    assert result.outer_grad[0] == pytest.approx((10 * 1.0 - 1 * 1.5) / 11)
    assert [each.is_clipped for each in result.evidence] == [False, True]


def test_the_history_holds_what_was_applied_and_not_what_was_claimed() -> None:
    history = history_of(*[{"a": 1.0, "b": 1.0}] * 3)
    for version in range(4, 60):
        result = merged(history, a=1.0, b=1e30)
        history = history.after(version, [("a", "0"), ("b", "0")], result.applied)
    assert median(history, "a", "b") == 1.0
    assert merged(history, b=1e30).outer_grad[0] == pytest.approx(1.5)


def test_the_bound_follows_norms_that_rise_and_fall() -> None:
    history, clipped = EMPTY, 0
    lengths = [2.0**i for i in range(8)] + [128 * 0.9**i for i in range(40)]
    for version, length in enumerate(lengths, 1):
        result = merged(history, a=length, b=1.1 * length, c=0.9 * length)
        clipped += result.clipped
        processes = [(name, "0") for name in "abc"]
        history = history.after(version, processes, result.applied)
    assert clipped == 0
    last = lengths[-1]
    result = merged(history, a=last, b=last, c=10 * last)
    assert result.applied[2, 0] < 4 * last, "and it does not stay where norms once were"


def test_without_history_two_are_bounded_by_the_shorter_one() -> None:
    result = merged(EMPTY, a=1.0, b=1e20)
    assert result.applied[:, 0].tolist() == [1.0, 3.0]
    assert merge_vectors(PIECE, pushes(a=1.0, b=100.0), [0.5, 0.5]).clipped == 0, "the old rule"


def test_bits_stay_where_nothing_is_clipped() -> None:
    calm = history_of(*[{"a": 1.0, "b": 1.0}] * 3)
    rng = np.random.default_rng(1)
    found: list[F32] = [rng.normal(size=4).astype(np.float32) * np.float32(0.1) for _ in "ab"]
    ones = [contribution(name, PIECE, each) for name, each in zip("ab", found, strict=True)]
    with_it = merge_vectors(PIECE, ones, [0.3, 0.7], norm_limit=1.5, history=calm)
    without = merge_vectors(PIECE, ones, [0.3, 0.7])
    assert with_it.outer_grad.tobytes() == without.outer_grad.tobytes()


def test_a_learner_that_is_alone_cannot_jump() -> None:
    history = history_of(*[{"b": 1.0}] * NORMS_MIN)
    result = merged(history, b=1e4)
    assert result.applied[0, 0] == 3.0 and result.evidence[0].is_clipped
    assert merged(history, b=2.9).clipped == 0


def test_an_outage_of_the_other_one_does_not_lift_the_bound() -> None:
    history = history_of(*[{"a": 1.0, "b": 1.0}] * 8)
    for version in range(9, 9 + VERSIONS_REMEMBERED - 2):
        result = merged(history, b=1e4)
        assert result.applied[0, 0] <= 3.0
        process = "0" if version < 20 else str(version)  # A restart forgets its own norms.
        history = history.after(version, [("b", process)], result.applied)
    back = merged(history, a=1.0, b=1e4)
    assert back.applied[:, 0].tolist() == [1.0, pytest.approx(3.0)]


@pytest.mark.parametrize("honest", [(), ("a",)])
def test_a_minority_of_the_names_cannot_raise_the_bound_in_a_round_of_its_own(
    honest: tuple[str, ...],
) -> None:
    history = history_of(*[dict.fromkeys("abcde", 1.0)] * 8)
    result = merged(history, d=-1e4, e=-1e4, **dict.fromkeys(honest, 1.0))
    assert result.applied[-2:, 0].tolist() == [1.5, 1.5]
    assert [each.is_clipped for each in result.evidence[-2:]] == [True, True]
    most = merged(history, a=3.0, b=3.0, c=3.0)
    assert most.clipped == 0, "most of the names say that norms have risen"


def test_norms_above_the_largest_float32_stay_finite() -> None:
    wide = one_fragment((4096, "mean"))
    push = contribution("b", wide, np.full(4096, 3e38, np.float32), codec_name="bf16")
    with np.errstate(all="raise"):
        result = merge_vectors(wide, [push], [1.0], norm_limit=1.5)
    assert np.isfinite(result.applied).all() and result.applied[0, 0] > 3e38


def test_without_a_clip_ratio_a_learner_that_is_alone_has_no_bound() -> None:
    history = history_of(*[{"b": 1.0}] * NORMS_MIN)
    alone = merge_vectors(
        PIECE, pushes(b=1e4), [1.0], norm_limit=1.5, clip_ratio=0.0, history=history
    )
    assert alone.clipped == 0


def test_one_whose_partner_is_away_is_named_for_jumps() -> None:
    history, watch = EMPTY, UNWATCHED
    named: list[tuple[int, set[str]]] = []
    for version in range(1, 41):
        lengths = {"a": 1.0, "b": 1.0} if version <= 10 else {"b": 1e4}
        result = merged(history, **lengths)
        processes = [(name, "0") for name in sorted(lengths)]
        history = history.after(version, processes, result.applied)
        watch = watch.after(result.evidence)
        if suspects := watch.suspects(result.evidence):
            named.append((version, set(suspects)))
    assert named == [(version, {"b"}) for version in range(18, 41)]
