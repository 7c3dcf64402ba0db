"""Laws of the merge that hold whatever the contributions are."""

from __future__ import annotations

import math
from itertools import permutations
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from merge_cases import contribution, one_fragment, slow_merge

from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.weights import token_weights
from narrows.proto.codec import F32

FRAGMENT = one_fragment((40, "rda"), (3, "mean"), (90, "rda"), (1, "rda"))

counts = st.tuples(st.integers(1, 1 << 62), st.integers(1, 1 << 30))
rules = st.sampled_from(["layout", "mean"])


@st.composite
def vectors(draw: st.DrawFn, count_min: int = 1, count_max: int = 6) -> list[F32]:
    """Outer gradients of very different lengths, some with zeros, some nearly alike."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shared = rng.normal(size=FRAGMENT.elements)
    found: list[F32] = []
    for _ in range(draw(st.integers(count_min, count_max))):
        likeness = draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
        vector = likeness * shared + rng.normal(size=FRAGMENT.elements)
        vector *= 2.0 ** draw(st.integers(-30, 30))
        if draw(st.booleans()):
            vector[: draw(st.integers(0, FRAGMENT.elements))] = 0.0
        found.append(vector.astype(np.float32))
    return found


def named(found: list[F32], codec_name: str = "raw32") -> list[DecodedVector]:
    return [
        contribution(f"{i:02d}", FRAGMENT, v, codec_name=codec_name) for i, v in enumerate(found)
    ]


def random_weights(count: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return token_weights(
        [(int(tokens), 1) for tokens in rng.integers(1, 1000, count)], rule="tokens"
    )


@given(st.lists(counts, min_size=1, max_size=9), st.floats(0.34, 1))
def test_weights_sum_to_one_and_keep_to_the_limit(
    pairs: list[tuple[int, int]], share_max: float
) -> None:
    weights = token_weights(pairs, rule="tokens", share_max=share_max)
    assert abs(math.fsum(weights) - 1) < 1e-12
    assert min(weights) >= 0
    if len(pairs) >= 3:
        assert max(weights) <= share_max + 1e-12
    # Whoever has done more in no more steps has no less to say.
    for (work, share), (other, others_share) in permutations(zip(pairs, weights, strict=True), 2):
        if work[0] >= other[0] and work[1] <= other[1]:
            assert share >= others_share * (1 - 1e-9)


@given(st.lists(counts, min_size=1, max_size=9))
def test_weights_do_not_depend_on_the_order(pairs: list[tuple[int, int]]) -> None:
    forth = token_weights(pairs, rule="tokens")
    back = token_weights(pairs[::-1], rule="tokens")
    assert forth == back[::-1]


@given(vectors(), st.randoms(use_true_random=False), rules)
def test_order_of_arrival_does_not_matter(found: list[F32], random: Random, rule: str) -> None:
    ones = named(found)
    weights = dict(zip((one.learner for one in ones), random_weights(len(ones), 1), strict=True))

    def merged(arrived: list[DecodedVector]) -> bytes:
        ordered = sorted(arrived, key=lambda one: one.learner)
        shares = [weights[one.learner] for one in ordered]
        result = merge_vectors(
            FRAGMENT, ordered, shares, rule="mean" if rule == "mean" else "layout"
        )
        return result.outer_grad.tobytes()

    shuffled = list(ones)
    random.shuffle(shuffled)
    assert merged(shuffled) == merged(ones)


@given(vectors(), st.integers(0, 1 << 32), st.sampled_from([0.0, 1.0, 3.0]), rules)
def test_the_merge_equals_its_twin_up_to_rounding(
    found: list[F32], seed: int, clip_ratio: float, rule: str
) -> None:
    weights = random_weights(len(found), seed)
    fast = merge_vectors(
        FRAGMENT, named(found), weights, clip_ratio=clip_ratio,
        rule="mean" if rule == "mean" else "layout",
    )  # fmt: skip
    slow = slow_merge(found, weights, FRAGMENT, clip_ratio=clip_ratio, rule=rule)
    for piece in FRAGMENT.pieces:
        part = slice(piece.offset, piece.offset + piece.count)
        longest = max(float(np.linalg.norm(vector[part].astype(np.float64))) for vector in found)
        error = float(np.linalg.norm(fast.outer_grad[part] - slow[part]))
        assert error <= 1e-5 * longest


@given(vectors(), st.integers(0, 1 << 32))
def test_the_mean_lies_between_its_inputs(found: list[F32], seed: int) -> None:
    weights = random_weights(len(found), seed)
    mean = merge_vectors(FRAGMENT, named(found), weights, clip_ratio=0, rule="mean").outer_grad
    slack = 1e-6 * np.abs(found).max(axis=0)
    assert np.all(mean >= np.min(found, axis=0) - slack)
    assert np.all(mean <= np.max(found, axis=0) + slack)


@given(vectors(), st.integers(0, 1 << 32))
def test_no_merge_is_longer_than_its_longest_input_or_the_cap(found: list[F32], seed: int) -> None:
    weights = random_weights(len(found), seed)
    radial = merge_vectors(FRAGMENT, named(found), weights)
    mean = merge_vectors(FRAGMENT, named(found), weights, rule="mean").outer_grad
    for row, piece in enumerate(FRAGMENT.pieces):
        part = slice(piece.offset, piece.offset + piece.count)
        length = float(np.linalg.norm(radial.outer_grad[part].astype(np.float64)))
        assert length <= radial.norms[row].max() * (1 + 1e-5)
        there = max(1, int(np.count_nonzero(radial.norms[row])))
        cap = math.sqrt(there) * float(np.linalg.norm(mean[part].astype(np.float64)))
        assert length <= cap * (1 + 1e-5)


@given(st.integers(2, 6), st.integers(0, 1 << 32), st.floats(0.01, 100), st.booleans())
def test_equal_norms_are_kept_by_rda(count: int, seed: int, norm: float, alike: bool) -> None:
    # Without opposed pairs, the gain over the mean stays below the cap.
    fragment = one_fragment((200, "rda"))
    rng = np.random.default_rng(seed)
    found = np.abs(rng.normal(size=(count, 200))) if alike else np.eye(count, 200)
    found *= norm / np.linalg.norm(found, axis=1, keepdims=True)
    ones = [
        contribution(f"{i}", fragment, vector) for i, vector in enumerate(found.astype(np.float32))
    ]
    result = merge_vectors(fragment, ones, random_weights(count, seed)).outer_grad
    assert abs(float(np.linalg.norm(result.astype(np.float64))) - norm) <= 1e-5 * norm


@given(vectors(count_max=1), st.sampled_from(["raw32", "int8-zstd", "int4-zstd"]), rules)
def test_one_contributor_is_itself(found: list[F32], codec_name: str, rule: str) -> None:
    (one,) = named(found, codec_name)
    values = np.empty(FRAGMENT.elements, np.float32)
    one.chunks[0][1].values(values)
    merged = merge_vectors(FRAGMENT, [one], [1.0], rule="mean" if rule == "mean" else "layout")
    assert np.array_equal(merged.outer_grad, values)


@given(vectors(count_min=2), st.integers(-20, 20))
def test_scaling_all_inputs_by_a_power_of_two_scales_the_result(
    found: list[F32], power: int
) -> None:
    weights, factor = random_weights(len(found), 5), np.float32(2.0**power)
    once = merge_vectors(FRAGMENT, named(found), weights).outer_grad * factor
    scaled = merge_vectors(
        FRAGMENT, named([vector * factor for vector in found]), weights
    ).outer_grad
    np.testing.assert_allclose(scaled, once, rtol=1e-6)
