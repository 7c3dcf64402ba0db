"""Token weights and the merge: worked examples, the twin, misuse."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from merge_cases import contribution, decoded, one_fragment, slow_merge

from narrows.broker.merging import sums
from narrows.broker.merging.merge import merge_vectors, warm_up
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.weights import token_weights
from narrows.proto.codec import F32
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import LayoutEntry

PLANE = one_fragment((2, "rda"))
MIXED = one_fragment((300, "rda"), (7, "mean"), (1200, "rda"), (1, "mean"), (64, "mean"))


def given(fragment: Fragment, *vectors: object) -> list[DecodedVector]:
    return [
        contribution(f"learner-{i}", fragment, np.array(vector, np.float32))
        for i, vector in enumerate(vectors)
    ]


def random_vectors(count: int, seed: int, fragment: Fragment = MIXED) -> list[F32]:
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(size=(count, 1)))
    values = lengths * rng.normal(size=(count, fragment.elements))
    return [vector.astype(np.float32) for vector in values]


# Weights.


def test_weights_follow_tokens_squared_over_steps() -> None:
    # 100 * 100 / 10 = 1000 and 150 * 150 / 15 = 1500.
    assert token_weights([(100, 10), (150, 15)], rule="tokens") == pytest.approx([0.4, 0.6])


def test_tokens_and_tokens_per_step_count_up_to_twice_what_is_usual() -> None:
    # Of two the lesser one is usual: 300 tokens count as 200, and 100 per step as 20.
    assert token_weights([(100, 10), (300, 30)], rule="tokens") == pytest.approx([1 / 3, 2 / 3])
    assert token_weights([(100, 10), (100, 1)], rule="tokens") == pytest.approx([1 / 3, 2 / 3])
    assert token_weights([(9, 9), (1 << 40, 1)], rule="tokens") == pytest.approx([0.2, 0.8])
    work = [(9, 9), (1 << 40, 1), (9, 9), (9, 9), (9, 9)]
    weights = token_weights(work, rule="tokens", share_max=1.0)
    assert weights == pytest.approx([1 / 8, 4 / 8, 1 / 8, 1 / 8, 1 / 8])


@pytest.mark.parametrize("count", [3, 4, 5, 8, 30])
@pytest.mark.parametrize("claim", [(1 << 40, 1), (100, 1), (1 << 40, 1 << 40)])
def test_the_claims_of_one_do_not_outweigh_the_others(count: int, claim: tuple[int, int]) -> None:
    weights = token_weights([claim, *[(100, 10)] * (count - 1)], rule="tokens")
    assert weights[0] <= min(1 / 3, 2 / count) + 1e-12
    assert 1.5 * weights[0] <= 0.75 * sum(weights[1:]) + 1e-12


def test_learners_of_other_speeds_are_weighed_by_their_work() -> None:
    speeds = [(40, 40), (30, 30), (20, 20), (10, 10)]
    assert token_weights(speeds, rule="tokens") == pytest.approx([1 / 3, 1 / 3, 2 / 9, 1 / 9])
    more = token_weights([*speeds, *speeds], rule="tokens")
    assert more == pytest.approx([0.2, 0.15, 0.1, 0.05] * 2), "as they are"


def test_equal_weights() -> None:
    assert token_weights([(1, 1), (9, 1), (5, 1), (5, 1)], rule="equal") == [0.25] * 4


def test_no_share_above_the_limit_from_three_contributors_on() -> None:
    work = [(90, 90), (60, 60), (30, 30)]
    weights = token_weights(work, rule="tokens", share_max=0.4)
    assert weights == pytest.approx([0.4, 0.4, 0.2])
    assert token_weights(work, rule="tokens") == pytest.approx([1 / 3] * 3)
    assert token_weights(work[::2], rule="tokens") == pytest.approx([2 / 3, 1 / 3])


def test_limiting_one_share_may_push_the_next_one_over() -> None:
    weights = token_weights([(60, 60), (30, 30), (10, 10)], rule="tokens", share_max=0.4)
    assert weights == pytest.approx([0.4, 0.4, 0.2])


def test_a_limit_that_cannot_hold_makes_all_equal() -> None:
    weights = token_weights([(60, 60), (30, 30), (10, 10)], rule="tokens", share_max=0.1)
    assert weights == pytest.approx([1 / 3] * 3)


def test_weights_of_huge_counts_are_finite() -> None:
    work = [(1 << 62, 1), (1, 1 << 62), (1 << 62, 1)]
    assert token_weights(work, rule="tokens", share_max=0.5) == pytest.approx([0.5, 0.0, 0.5])


@pytest.mark.parametrize("counts", [[], [(0, 1)], [(1, 0)], [(1, 1), (-1, 1)]])
def test_weights_of_nothing_are_misuse(counts: list[tuple[int, int]]) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        token_weights(counts, rule="tokens")
    assert caught.value.code == ErrorCode.MISUSE


# Rules.


def test_the_mean_of_orthogonal_vectors_shrinks_and_rda_does_not() -> None:
    both = given(PLANE, [2, 0], [0, 2])
    assert merge_vectors(PLANE, both, [0.5, 0.5], rule="mean").outer_grad.tolist() == [1, 1]
    radial = merge_vectors(PLANE, both, [0.5, 0.5]).outer_grad
    assert radial == pytest.approx([math.sqrt(2), math.sqrt(2)], rel=1e-6)


def test_rda_by_hand_with_different_norms() -> None:
    # Directions (1, 0) and (0, 1) with weights .8 and .2; mean norm .8 * 1 + .2 * 3 = 1.4, under
    # the cap sqrt(2) * |(.8, .6)| = sqrt(2).
    radial = merge_vectors(PLANE, given(PLANE, [1, 0], [0, 3]), [0.8, 0.2]).outer_grad
    unit = np.array([0.8, 0.2]) / math.hypot(0.8, 0.2)
    assert radial == pytest.approx(1.4 * unit, rel=1e-6)


def test_the_gain_over_the_mean_is_capped() -> None:
    # Nearly opposite: the mean has norm 0.1, so the result has at most sqrt(2) * 0.1.
    slim = merge_vectors(PLANE, given(PLANE, [1, 0.1], [-1, 0.1]), [0.5, 0.5]).outer_grad
    assert slim == pytest.approx([0, math.sqrt(2) * 0.1], rel=1e-5)


def test_opposite_directions_fall_back_to_the_mean() -> None:
    result = merge_vectors(PLANE, given(PLANE, [3, 4], [-6, -8]), [0.5, 0.5]).outer_grad
    assert result.tolist() == [-1.5, -2]


def test_a_contributor_of_zeros_does_not_turn_the_rest() -> None:
    result = merge_vectors(PLANE, given(PLANE, [3, 4], [0, 0]), [0.5, 0.5]).outer_grad
    assert result.tolist() == [1.5, 2]
    assert not merge_vectors(PLANE, given(PLANE, [0, 0], [0, 0]), [0.5, 0.5]).outer_grad.any()


def test_one_contributor_is_itself_bit_for_bit() -> None:
    one = contribution("a", MIXED, random_vectors(1, 3)[0], codec_name="int8-zstd")
    merged = merge_vectors(MIXED, [one], [1.0])
    assert merged.outer_grad.tobytes() == (decoded(one, MIXED) + np.float32(0)).tobytes()
    assert merged.outer_grad.dtype == np.float32 and merged.clipped == 0


def test_tiny_norms_neither_overflow_nor_poison() -> None:
    result = merge_vectors(
        PLANE, given(PLANE, [1e-42, 0], [0, 2], [0, 2]), [0.2, 0.4, 0.4]
    ).outer_grad
    assert result == pytest.approx([0, 1.6], rel=1e-6)


def test_the_smallest_norm_that_counts_is_a_norm() -> None:
    """From 2^-100 on, that included: which norms count decides bits that are promised."""
    least = 2.0**-100
    four = given(PLANE, [least, 0], [least, 0], [least, 0], [64 * least, 0])
    assert merge_vectors(PLANE, four, [0.25] * 4).clipped == 1
    both = merge_vectors(PLANE, given(PLANE, [least, 0], [0, least]), [0.5, 0.5]).outer_grad
    assert both / np.float32(least) == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-6)
    below = least * 0.999
    both = merge_vectors(PLANE, given(PLANE, [below, 0], [0, below]), [0.5, 0.5]).outer_grad
    assert both / np.float32(below) == pytest.approx([0.5] * 2, rel=1e-6)


def test_huge_values_stay_finite() -> None:
    result = merge_vectors(PLANE, given(PLANE, [3e38, 0], [3e38, 0]), [0.5, 0.5]).outer_grad
    assert result == pytest.approx([3e38, 0], rel=1e-6)


# Clipping.


def test_an_outlier_is_clipped_to_three_medians_and_counted() -> None:
    four = given(PLANE, [1, 0], [1, 0], [1, 0], [100, 0])
    merged = merge_vectors(PLANE, four, [0.25] * 4, rule="mean")
    assert merged.outer_grad == pytest.approx([(1 + 1 + 1 + 3) / 4, 0])
    assert merged.clipped == 1
    assert merged.norms.tolist() == [[1, 1, 1, 100]]
    assert merge_vectors(PLANE, four, [0.25] * 4, clip_ratio=0).clipped == 0


def test_two_contributors_are_never_clipped() -> None:
    merged = merge_vectors(PLANE, given(PLANE, [1, 0], [100, 0]), [0.5, 0.5], rule="mean")
    assert merged.outer_grad == pytest.approx([50.5, 0]) and merged.clipped == 0


def test_zeros_do_not_count_for_the_median() -> None:
    # Of an embedding that only one learner's text touches, its work must survive.
    merged = merge_vectors(PLANE, given(PLANE, [0, 0], [0, 0], [3, 4]), [0.25, 0.25, 0.5])
    assert merged.outer_grad.tolist() == [1.5, 2] and merged.clipped == 0


def test_clipping_does_not_change_the_direction() -> None:
    # Both outer gradients of unit length, and one that is clipped from 90 to 3: directions count
    # alike, whatever the lengths were.
    three = given(PLANE, [1, 0], [0, 1], [0, 90])
    weights = [0.5, 0.25, 0.25]
    merged = merge_vectors(PLANE, three, weights).outer_grad
    assert merged[0] == pytest.approx(merged[1], rel=1e-6)


# Against the twin, over codecs, chunkings and rules.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("codec_name", ["raw32", "f32-blosc2", "bf16", "int8-zstd", "int4-zstd"])
@pytest.mark.parametrize("chunk_elements", [64, 1 << 16])
def test_equals_the_slow_twin(count: int, codec_name: str, chunk_elements: int) -> None:
    vectors = random_vectors(count, seed=count)
    vectors[0][: 300 + 7] *= 50  # An outlier in the first two pieces.
    ones = [
        contribution(f"{i}", MIXED, v, codec_name=codec_name, chunk_elements=chunk_elements)
        for i, v in enumerate(vectors)
    ]
    weights = token_weights([(9 + i, 1 + i % 2) for i in range(count)], rule="tokens")
    for rule in ("layout", "mean"):
        slow = slow_merge([decoded(one, MIXED) for one in ones], weights, MIXED, rule=rule)
        fast = merge_vectors(MIXED, ones, weights, rule="mean" if rule == "mean" else "layout")
        np.testing.assert_allclose(fast.outer_grad, slow, rtol=2e-5, atol=2e-6)
        medians = np.median(fast.norms, axis=1, keepdims=True)
        over = int(np.count_nonzero(fast.norms > 3 * medians))
        assert fast.clipped == (over if count >= 3 else 0)
        assert over >= 2 or count < 3


def test_different_chunkings_give_the_same_bits() -> None:
    vectors = random_vectors(3, seed=11)
    weights = [0.2, 0.5, 0.3]

    def bits(*chunk_elements: int) -> bytes:
        ones = [
            contribution(f"{i}", MIXED, vector, chunk_elements=size)
            for i, (vector, size) in enumerate(zip(vectors, chunk_elements, strict=True))
        ]
        return merge_vectors(MIXED, ones, weights, rule="mean").outer_grad.tobytes()

    same = bits(64, 64, 64)
    assert bits(100, 64, 1 << 16) == same
    # What is left over in memory that was freed just now is no sum either.
    vectors = [2 * vector for vector in vectors]
    assert np.array_equal(
        np.frombuffer(bits(100, 64, 1 << 16), np.float32), 2 * np.frombuffer(same, np.float32)
    )


def test_many_fragments_of_a_split_tensor() -> None:
    layout = [
        LayoutEntry("big", (90, 11), "float32", "rda"),
        LayoutEntry("n", (5,), "float32", "mean"),
    ]
    rng = np.random.default_rng(4)
    for fragment in build_table(layout, 3):
        vectors = [rng.normal(size=fragment.elements).astype(np.float32) for _ in range(3)]
        ones = [contribution(f"{i}", fragment, v, chunk_elements=70) for i, v in enumerate(vectors)]
        fast = merge_vectors(fragment, ones, [0.3, 0.3, 0.4])
        slow = slow_merge(vectors, [0.3, 0.3, 0.4], fragment)
        np.testing.assert_allclose(fast.outer_grad, slow, rtol=2e-5, atol=2e-6)
        assert fast.norms.shape == (len(fragment.pieces), 3)


PRINT_DIGEST = """
import numpy as np
from merge_cases import contribution, one_fragment
from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.outer import outer_optimizer
from narrows.proto.frames import digest
fragment = one_fragment((3000, "rda"), (77, "mean"), (2000, "rda"))
rng = np.random.default_rng(1)
vectors = rng.normal(size=(5, fragment.elements)).astype(np.float32)
ones = [contribution(str(i), fragment, v, codec_name="int4-zstd") for i, v in enumerate(vectors)]
merged = merge_vectors(fragment, ones, [0.1, 0.15, 0.2, 0.25, 0.3]).outer_grad
optimizer = outer_optimizer("nesterov", lr=0.7, momentum=0.6)
params, momentum = optimizer.step(vectors[0], vectors[1], merged)
print([digest(each.data.cast("B")) for each in (merged, params, momentum)])
"""


def test_the_bits_do_not_depend_on_the_processor(tmp_path: Path) -> None:
    def printed(**environment: str) -> str:
        paths = [
            str(Path(__file__).parents[1]),
            *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        ]
        named = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment
        command = [sys.executable, "-P", "-c", PRINT_DIGEST]
        return subprocess.run(
            command, env=named, capture_output=True, text=True, timeout=300, check=True
        ).stdout

    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    native = printed(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
    assert native.startswith("[")
    assert printed(OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2") == native
    assert printed(**generic, **cache) == native


# Misuse.


def misuse(contributions: list[DecodedVector], weights: list[float]) -> str:
    with pytest.raises(LocalProtocolError) as caught:
        merge_vectors(PLANE, contributions, weights)
    assert caught.value.code == ErrorCode.MISUSE
    return caught.value.message


def test_misuse_is_refused() -> None:
    a, b = given(PLANE, [1, 0], [0, 1])
    wide = given(one_fragment((3, "mean")), [1, 2, 3])[0]
    hole = DecodedVector("learner-0", [(1, chunk) for _, chunk in a.chunks])
    assert "contributions" in misuse([], [])
    assert "contributions" in misuse([b, a], [0.5, 0.5])
    assert "contributions" in misuse([a, a], [0.5, 0.5])
    assert "weights" in misuse([a, b], [1.0])
    assert "weights" in misuse([a, b], [0.5, 0.6])
    assert "weights" in misuse([a, b], [1.5, -0.5])
    assert "chunks of learner-0" in misuse([wide], [1.0])
    assert "chunks of learner-0" in misuse([hole], [1.0])
    assert "chunks of x" in misuse([DecodedVector("x", [])], [1.0])


def test_warm_up_compiles_exactly_what_a_merge_uses() -> None:
    warm_up()
    kernels = [cast(Any, each) for each in (sums.accumulate, sums.dot)]
    before = [list(kernel.signatures) for kernel in kernels]
    vectors = random_vectors(3, seed=1)
    ones = [contribution(f"{i}", MIXED, v, chunk_elements=99) for i, v in enumerate(vectors)]
    merge_vectors(MIXED, ones, [0.2, 0.3, 0.5])
    coded = [contribution(f"{i}", MIXED, v, codec_name="int4-zstd") for i, v in enumerate(vectors)]
    merge_vectors(MIXED, coded, [0.2, 0.3, 0.5])
    assert [len(each) for each in before] == [2, 2]
    assert [list(kernel.signatures) for kernel in kernels] == before
