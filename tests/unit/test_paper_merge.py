"""The claims of the papers on merging, one per test: readable as a summary of the arithmetic.

Decoupled DiLoCo (arXiv 2604.21428), DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from merging_cases import one_fragment, push_of, round_of, state_of

from narrows.broker.merging import merge
from narrows.broker.merging.merge import token_weights
from narrows.proto.codec import F32
from narrows.proto.messages import MergeRule


def step(rule: MergeRule, *vectors: list[float]) -> F32:
    """How far the parameters go down when learners push these outer gradients, without momentum."""
    fragment = one_fragment((len(vectors[0]), rule))
    pushes = [push_of(fragment, f"l{i}", np.array(v, np.float32)) for i, v in enumerate(vectors)]
    zeros = np.zeros(fragment.elements, np.float32)
    round_ = round_of(pushes, outer_lr=1.0, momentum=0.0)
    return -merge(fragment, state_of(fragment, zeros), round_).state.global_


def test_sec_3_2_weights_are_quantity_times_quality() -> None:
    """w = c_tokens * (c_tokens / c_steps): tokens, times tokens per step."""
    assert token_weights([(400, 4), (400, 2)], "tokens") == pytest.approx([1 / 3, 2 / 3])
    assert token_weights([(100, 1), (200, 2)], "tokens") == pytest.approx([1 / 3, 2 / 3])
    # A site of ten times the speed: the paper's .83, .08 and .08.
    work = [(1000, 10), (100, 1), (100, 1)]
    assert token_weights(work, "tokens") == pytest.approx([10 / 12, 1 / 12, 1 / 12])
    assert token_weights(work, "equal") == (1 / 3, 1 / 3, 1 / 3)


def test_app_d_2_the_mean_of_orthogonal_gradients_shrinks_and_rda_does_not() -> None:
    """Radius: the mean of the norms. Direction: that of the sum of unit vectors."""
    assert step("mean", [2, 0], [0, 2]).tolist() == [1, 1]
    assert step("rda", [2, 0], [0, 2]) == pytest.approx([math.sqrt(2)] * 2, rel=1e-6)


def test_app_d_2_directions_count_alike_whatever_their_norms() -> None:
    turned = step("rda", [1, 0], [0, 3])
    assert turned[0] == pytest.approx(turned[1], rel=1e-6)
    # The mean norm would be 2; the cap is sqrt(2) times the mean's norm, |(.5, 1.5)|.
    assert np.linalg.norm(turned) == pytest.approx(2.0, rel=1e-6)


def test_an_addition_rda_is_at_most_the_root_of_the_contributors_times_the_mean() -> None:
    """Nearly opposite gradients: two learners that undo each other must not go far."""
    assert step("rda", [1, 0.1], [-1, 0.1]) == pytest.approx([0, math.sqrt(2) * 0.1], rel=1e-5)


def test_the_outer_optimizer_is_nesterov() -> None:
    """b <- mu b + d; Theta <- Theta - lr (d + mu b): gain 1 + mu at first, 1 / (1 - mu) later."""
    fragment = one_fragment((1, "mean"))
    state = state_of(fragment, np.zeros(1, np.float32))
    steps: list[float] = []
    for number in range(1, 31):
        push = push_of(fragment, "a", np.ones(1, np.float32))
        after = merge(fragment, state, round_of([push], number, outer_lr=1.0, momentum=0.5)).state
        steps.append(float(state.global_[0] - after.global_[0]))
        state = after
    assert steps[0] == pytest.approx(1.5)
    assert steps[-1] == pytest.approx(2.0)


def test_at_rate_1_without_momentum_one_learner_gets_its_own_parameters() -> None:
    """An outer gradient is published - local: descending along it goes to where the learner is."""
    fragment = one_fragment((3, "rda"))
    base, local = np.array([1, 2, 3], np.float32), np.array([1.5, 1, 3], np.float32)
    push = push_of(fragment, "a", base - local)
    round_ = round_of([push], outer_lr=1.0, momentum=0.0)
    assert (
        merge(fragment, state_of(fragment, base), round_).state.global_.tolist() == local.tolist()
    )
