"""The merge against its definition in plain numpy, its edges and the promises about its bits.

The claims of the papers: Decoupled DiLoCo (arXiv 2604.21428), DiLoCo (arXiv 2311.08105).
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_cases import (
    CASES,
    CODECS,
    awkward,
    decoded,
    digests,
    lane_square_sums,
    one_fragment,
    push_of,
    round_of,
    state_of,
    values_in,
)

from narrows.broker.merging import Alarm, Model, merge, sums, warm_up
from narrows.broker.merging.merge import nesterov_step
from narrows.broker.records import Contribution, Version
from narrows.proto.codec import F32, F64, recut
from narrows.proto.layout import Fragment
from narrows.proto.messages import PUBLICATIONS_KEPT, CodecName

PLANE = one_fragment((2, "rda"))
PLANES = one_fragment((2, "rda"), (2, "rda"))
BESIDE_A_MEAN = one_fragment((2, "rda"), (2, "mean"))
MIXED = one_fragment((300, "rda"), (7, "mean"), (1200, "rda"), (1, "mean"), (64, "mean"))
LEAST, BELOW, ROOT = 2.0**-100, 0.999 * 2.0**-100, math.sqrt(0.5)


def averaged(fragment: Fragment, pushes: Sequence[Contribution]) -> F32:
    """The averaged outer gradient (n,): without momentum before it, it is the momentum after."""
    before = state_of(fragment, np.zeros(fragment.elements, np.float32))
    return merge(fragment, before, round_of(pushes)).state.momentum


# By definition.


def slow_average(fragment: Fragment, pushes: Sequence[Contribution], rule: str) -> F64:
    """Weights (Sec. 3.2), mean and RDA as the paper prints them, in float64, with the cap."""
    raw = [each.tokens * (each.tokens / each.steps) for each in pushes]
    weights = [value / sum(raw) for value in raw]
    result = np.zeros(fragment.elements)
    for piece in fragment.pieces:
        where = slice(piece.offset, piece.offset + piece.count)
        parts = [values_in(fragment, each)[where].astype(np.float64) for each in pushes]
        lengths = [float(np.linalg.norm(part)) for part in parts]
        mean = sum(w * part for w, part in zip(weights, parts, strict=True))
        result[where] = mean
        there = [i for i, length in enumerate(lengths) if length > 0]
        if rule == "layout" and piece.rule == "rda" and len(there) > 1:
            direction = sum(weights[i] * parts[i] / lengths[i] for i in there)
            radius = sum(w * length for w, length in zip(weights, lengths, strict=True))
            radius = min(radius, math.sqrt(len(there)) * float(np.linalg.norm(mean)))
            result[where] = direction / np.linalg.norm(direction) * radius
    return result


@st.composite
def some_pushes(draw: st.DrawFn) -> list[Contribution]:
    """Pushes of very different lengths, some with zeros, in any codec and any cut."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shared = rng.normal(size=MIXED.elements)
    pushes = []
    for number in range(draw(st.integers(1, 5))):
        values = draw(st.sampled_from([-0.5, 0.0, 0.5, 1.0])) * shared
        values = (values + rng.normal(size=MIXED.elements)) * 2.0 ** draw(st.integers(-30, 30))
        if draw(st.booleans()):
            values[: draw(st.integers(0, MIXED.elements))] = 0.0
        pushes.append(
            push_of(
                MIXED,
                f"l{number}",
                values.astype(np.float32),
                codec=draw(st.sampled_from(CODECS)),
                chunk_elements=draw(st.sampled_from([256, 512, 4096])),
                tokens=draw(st.integers(1, 1 << 40)),
                steps=draw(st.integers(1, 1 << 20)),
            )
        )
    return pushes


@settings(max_examples=40, deadline=None)
@given(some_pushes(), st.sampled_from(["layout", "mean"]))
def test_a_merge_equals_its_definition(pushes: list[Contribution], rule: str) -> None:
    before = state_of(MIXED, np.zeros(MIXED.elements, np.float32))
    version = merge(MIXED, before, round_of(pushes, rule=rule))
    lengths = [np.linalg.norm(values_in(MIXED, each).astype(np.float64)) for each in pushes]
    assert version.norms == pytest.approx(lengths)
    slow = slow_average(MIXED, pushes, rule)
    for piece in MIXED.pieces:
        where = slice(piece.offset, piece.offset + piece.count)
        scale = max(float(np.abs(values_in(MIXED, each)[where]).max()) for each in pushes)
        fast = version.state.momentum[where]
        np.testing.assert_allclose(fast, slow[where], rtol=2e-5, atol=2e-6 * scale)


# Edges.


@pytest.mark.parametrize(
    ("fragment", "vectors", "tokens", "expected"),
    [
        pytest.param(
            BESIDE_A_MEAN, [(2, 0, 2, 0), (0, 2, 0, 2)], [], (2 * ROOT, 2 * ROOT, 1, 1),
            id="the mean of orthogonal gradients shrinks and RDA does not (App. D.2)",
        ),
        pytest.param(
            PLANE, [(1, 0), (0, 3)], [], (2 * ROOT, 2 * ROOT),
            id="directions count alike whatever their norms (App. D.2)",
        ),
        pytest.param(
            PLANE, [(1, 0.1), (-1, 0.1)], [], (0, 0.2 * ROOT),
            id="an addition: two that undo each other do not go far",
        ),
        pytest.param(
            PLANES, [(3, 4, 1, 0), (-6, -8, 0, 1)], [], (-1.5, -2, ROOT, ROOT),
            id="cancelled directions are the mean, and the piece beside them is radial",
        ),
        pytest.param(PLANE, [(3, 4), (0, 0)], [], (1.5, 2), id="zeros do not turn the rest"),
        pytest.param(PLANE, [(0, 0), (0, 0)], [], (0, 0), id="nothing but zeros"),
        pytest.param(PLANE, [(LEAST, 0), (0, LEAST)], [], (LEAST * ROOT,) * 2, id="least norm"),
        pytest.param(PLANE, [(BELOW, 0), (0, BELOW)], [], (BELOW / 2,) * 2, id="below it: mean"),
        pytest.param(PLANE, [(3, 4), (8, 6)], [0, 100], (8, 6), id="without tokens: no weight"),
        pytest.param(PLANE, [(1, 0), (3, 0)], [0, 0], (2, 0), id="all without tokens: the same"),
    ],
)  # fmt: skip
def test_edges_and_claims_of_the_paper(
    fragment: Fragment, vectors: list[Sequence[float]], tokens: list[int], expected: Sequence[float]
) -> None:
    pushes = [
        push_of(fragment, f"l{i}", np.array(v, np.float32), tokens=tokens[i] if tokens else 100)
        for i, v in enumerate(vectors)
    ]
    assert averaged(fragment, pushes) == pytest.approx(expected, rel=1e-5, abs=0)


# The same bits.


def bits(version: Version) -> tuple[object, ...]:
    return version.state.digests, version.weights, version.norms


@pytest.mark.parametrize("codec", CODECS)
def test_the_cut_of_a_push_changes_no_bit(codec: CodecName) -> None:
    fragment = one_fragment((70_000, "rda"), (300, "mean"), (200_001, "rda"))
    before = state_of(fragment, awkward(fragment.elements, 0))
    pushes = [
        push_of(fragment, f"l{i}", awkward(fragment.elements, i), codec=codec, chunk_elements=4096)
        for i in (1, 2, 3)
    ]
    same = decoded(fragment, pushes[1])
    chunks = recut(fragment, same, codec=codec, chunk_elements=1 << 19)
    payloads = tuple(chunk.payload for chunk in chunks)
    assert len(payloads) == 1
    other = replace(pushes[1], chunk_elements=1 << 19, chunks=payloads)
    mixed = merge(fragment, before, round_of([pushes[0], other, pushes[2]]))
    assert bits(mixed) == bits(merge(fragment, before, round_of(pushes)))


# What goes wrong.


@pytest.mark.parametrize("chunk_elements", [256, 1 << 19])
def test_norms_have_the_bits_of_one_sum_over_each_piece(chunk_elements: int) -> None:
    """Whatever the chunks and slices that they are summed by."""
    # Many pieces, because a square root hides most of what differs in the last bit.
    sizes = [1001] * 30 + [sums.SLICE + 100]
    fragment = one_fragment(*((size, "rda") for size in sizes))
    rng = np.random.default_rng(1)
    vectors: list[sums.Vector] = []
    norms = []
    for name in "ab":
        values = rng.normal(size=fragment.elements).astype(np.float32)
        push = push_of(fragment, name, values, chunk_elements=chunk_elements)
        vectors.append(decoded(fragment, push))
        norms.append(np.sqrt(lane_square_sums(values, fragment.bounds)))
    assert sums.norms_of(fragment, vectors).T.tolist() == np.array(norms).tolist()
    weights, units = np.full(2, 0.5), np.full((len(sizes), 2), 1.0)
    values, value_norms, mean_norms = sums.weighted_sums(fragment, vectors, weights, units)
    exact = np.sqrt(lane_square_sums(values, fragment.bounds))
    assert value_norms.tolist() == exact.tolist()
    assert mean_norms.tolist() == (exact / 2).tolist()


def test_a_merge_that_would_not_be_finite_names_the_longest_push() -> None:
    huge = np.full(2, 3e38, np.float32)
    small = push_of(PLANE, "a", np.ones(2, np.float32))
    pushes = [small, push_of(PLANE, "b", huge)]
    state = state_of(PLANE, -huge)
    with pytest.raises(
        FloatingPointError, match=r"version 1 of fragment 0 .*outer step.* number 1 of b, of norm"
    ):
        merge(PLANE, state, round_of(pushes))
    # The parameters are finite here, but no code reaches so far.
    with pytest.raises(FloatingPointError, match=r"publication|difference"):
        merge(PLANE, state_of(PLANE, np.zeros_like(huge)), round_of(pushes, codec="int4-zstd"))


# The model.


def test_a_model_keeps_the_last_publications_and_nothing_large_with_them() -> None:
    model = Model([PLANE], [state_of(PLANE, np.zeros(2, np.float32))])
    held = model.states[0]
    for number in range(1, PUBLICATIONS_KEPT + 3):
        push = push_of(PLANE, "a", np.ones(2, np.float32))
        version = merge(PLANE, model.states[0], round_of([push], number))
        model.install(version)
        assert model.states[0] is version.state
    assert not held.global_.any() and not held.published.any(), "states are never written to"
    kept = model.publication(0, number)
    assert kept is not None and kept.publication == version.publication
    assert kept.state.digests == version.state.digests
    assert [each.push_id for each in kept.round_.contributions] == [1]
    assert not kept.state.global_.size and not kept.round_.contributions[0].chunks
    assert model.publication(0, number - PUBLICATIONS_KEPT + 1) is not None
    assert model.publication(0, number - PUBLICATIONS_KEPT) is None


# The alarm.


def heard(alarm: Alarm, norm: float, *, steps: int = 4, learner: str = "a") -> list[str]:
    push = push_of(PLANE, learner, np.ones(2, np.float32), steps=steps)
    version = merge(PLANE, state_of(PLANE, np.zeros(2, np.float32)), round_of([push]))
    return alarm.hear(replace(version, norms=(norm,)))


def test_the_alarm_tells_a_push_far_longer_than_its_learners_own() -> None:
    alarm = Alarm()
    assert not any(heard(alarm, 1.0) for _ in range(8))
    assert not heard(alarm, 19.0, steps=16), "four times the steps go twice as far"
    assert not heard(alarm, 1000.0, learner="b"), "nobody is compared with anybody else"
    (line,) = heard(alarm, 100.0)
    assert "push 1 of a, fragment 0" in line and "merged as it came" in line
    assert heard(alarm, 100.0), "one line does not hide the next"
    lines = [heard(alarm, 100.0) for _ in range(40)]
    assert not lines[-1], "what lasts is the new usual"


def test_warm_up_compiles_all_that_a_merge_needs() -> None:
    warm_up()
    kernels = [cast(Any, each) for each in (sums.accumulate, sums.add_squares, nesterov_step)]
    before = [list(kernel.signatures) for kernel in kernels]
    for codec in CODECS:
        pushes = [push_of(MIXED, f"l{i}", awkward(MIXED.elements, i), codec=codec) for i in (1, 2)]
        merge(MIXED, state_of(MIXED, awkward(MIXED.elements, 0)), round_of(pushes))
    assert [list(kernel.signatures) for kernel in kernels] == before


# The stored bits: a run that began on another machine must go on with the same ones.


@pytest.mark.parametrize("case", CASES)
def test_this_cpu_computes_the_stored_bits(case: str) -> None:
    assert digests(case) == CASES[case][3:]


def test_a_generic_cpu_computes_the_stored_bits(tmp_path: Path) -> None:
    """Without wide vectors and fused multiply-adds, and compiled anew."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    script = "from merging_cases import digests; print(digests('two, int8'))"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=55, check=True
    )
    assert done.stdout.strip() == str(CASES["two, int8"][3:])
