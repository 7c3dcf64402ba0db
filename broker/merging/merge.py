"""A round becomes a version: token weights, average, outer step, and the coded publication.

The merge of a round that was just decided and the replay of one from the store are this one
function, so they cannot differ. Its bits are promised: a replay and an independent reader must find
the same. All arithmetic is strict float32 or float64, with one rounding per operation, in the order
that is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, get_args

import numpy as np

from narrows.broker.merging.sums import Vector, in_order, norms_of, weighted_sums
from narrows.broker.records import Contribution, FragmentState, NotFinite, Policy, Round, Version
from narrows.proto.codec import (
    F32,
    F64,
    I64,
    RUN,
    DecodedChunk,
    decode_chunk,
    empty_f32,
    encode_push,
    encode_step,
    kernel,
    read_only,
)
from narrows.proto.codec.kernels import INFINITE_BITS
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, LayoutEntry

NORM_MIN: Final = 2.0**-100
"""A piece whose norm is smaller has no direction: this is the least scale that a code can have."""

DIRECTION_MIN: Final = 1e-6
"""A sum of unit vectors whose norm, per weight, is no larger is nothing but float32 rounding."""


def merge(
    fragment: Fragment,
    before: FragmentState,
    round_: Round,
    decoded: Sequence[Sequence[DecodedChunk]] | None = None,
) -> Version:
    """Merges the contributions of a round and makes the fragment's next version.

    Pure and re-entrant: it reads `before`, and changes nothing. A caller that holds the decoded
    chunks of the contributions gives them as `decoded`, in the same order; else the payloads are
    decoded here. Values stay codes; slices become floats as they are added.

    Raises NotFinite, which names the longest push, if a parameter or the publication
    would not be finite.
    """
    contributions = round_.contributions
    policy = round_.policy
    orders = [push.order for push in contributions]
    assert orders and all(a < b for a, b in pairwise(orders)), orders
    assert fragment.index == round_.fragment == before.fragment, (fragment.index, round_.fragment)
    assert round_.version == before.version + 1, (before.version, round_.version)
    if decoded is None:
        decoded = [_decoded(fragment, push) for push in contributions]
    weights = token_weights([(push.tokens, push.steps) for push in contributions], policy.weights)
    values, gains, piece_norms = average(fragment, decoded, weights, policy.rule)
    norms = tuple(np.sqrt(in_order(piece_norms.T**2)).tolist())
    try:
        params, momentum = outer_step(fragment, before, values, gains, policy)
        # The next published copy is as large as the averaged values, and takes over their memory.
        del values
        advanced = empty_f32(fragment.elements)
        # What the codes leave out stays in global - published, so the next publication holds it.
        # Outer step and coding are two passes: one pass took longer, whatever the slice.
        publication = tuple(
            encode_step(
                fragment,
                params,
                before.published,
                codec=policy.codec,
                rho=policy.rho,
                chunk_elements=policy.chunk_elements,
                advanced=advanced,
            )
        )
    except (FloatingPointError, LocalProtocolError) as error:
        norm = max(norms)
        longest = contributions[norms.index(norm)]
        raise NotFinite(
            f"version {round_.version} of fragment {fragment.index} would not be finite ({error}). "
            f"The longest push is number {longest.push_id} of {longest.learner}, of norm "
            f"{norm:.3g}: look at that learner's loss",
            longest,
        ) from error
    state = FragmentState.of(fragment.index, round_.version, params, momentum, advanced)
    return Version(round_, state, weights, publication, norms)


def _decoded(fragment: Fragment, push: Contribution) -> list[DecodedChunk]:
    return [
        decode_chunk(fragment, push.codec, push.chunk_elements, number, payload)
        for number, payload in enumerate(push.chunks)
    ]


def token_weights(work: Sequence[tuple[int, int]], rule: str) -> tuple[float, ...]:
    """Weights of contributions of so many (tokens, inner steps), in their order; they sum to 1.

    Rule "tokens" gives tokens * (tokens / steps), "quantity times quality", and "equal" the same to
    each. No weight is limited: a limit would take from the larger site what it has trained. A
    learner that logs no tokens weighs nothing beside one that does, and among themselves such
    learners weigh the same.
    """
    assert work, "a round has contributions"
    assert all(tokens >= 0 and steps >= 1 for tokens, steps in work), work
    raw = [float(tokens) * (tokens / steps) for tokens, steps in work]
    total = math.fsum(raw)
    if rule == "equal" or total == 0.0:
        return (1.0 / len(work),) * len(work)
    assert rule == "tokens", rule
    return tuple(value / total for value in raw)


def average(
    fragment: Fragment, vectors: Sequence[Vector], weights: Sequence[float], rule: str
) -> tuple[F32, F32, F64]:
    """Averages M contributions, each piece by itself, with `weights` (M,) that sum to 1.

    Returns values (n,), gains (k,) and the norms (k, M) of the contributions. The averaged outer
    gradient is value * gain, where a gain is that of a piece, and 1 where it is the mean: the outer
    step multiplies by it, which saves a pass over memory.

    By rule "layout" a piece has the rule of its layout entry, by "mean" all are means. The
    radial-directional average (RDA) is (sum w ||v||) * unit(sum w unit(v)): the mean of outer
    gradients that point apart is short, although each learner went far. It is at most
    sqrt(contributors) times as long as the mean, which is what it is for orthogonal ones of equal
    length. Where fewer than two have a direction, or the directions cancel out, it is the mean.

    Signs: an outer gradient is published - local, so the outer optimizer descends along it. The
    outer step checks that the result is finite.

    Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2 and App. D.2. The paper's radial factor
    is a sum of vectors; the mean of the norms is the reading used here. The cap on the gain is an
    addition.
    """
    assert rule in ("layout", "mean"), rule
    shares = np.array(weights, np.float64)
    norms = norms_of(fragment, vectors)
    units = np.divide(shares, norms, out=np.zeros_like(norms), where=norms >= NORM_MIN)
    units[[rule == "mean" or piece.rule == "mean" for piece in fragment.pieces]] = 0.0
    # A piece with fewer than two contributors has nothing to average, and keeps its bits.
    units[np.count_nonzero(units, axis=1) < 2] = 0.0
    values, value_norms, mean_norms = weighted_sums(fragment, vectors, shares, units)
    cancelled = units.any(axis=1) & (value_norms <= DIRECTION_MIN * in_order(units * norms))
    if cancelled.any():
        # The sums of these pieces must be means instead, which were not kept. This is rare enough
        # to add everything once more.
        units[cancelled] = 0.0
        values, value_norms, mean_norms = weighted_sums(fragment, vectors, shares, units)
    # A sum of unit vectors becomes as long as the mean norm and the cap allow.
    caps = np.sqrt(np.count_nonzero(units, axis=1)) * mean_norms
    lengths: F64 = np.minimum(in_order(shares * norms), caps)
    radial = units.any(axis=1)
    gains = np.divide(lengths, value_norms, out=np.ones_like(lengths), where=radial)
    # A gain beyond float32 makes the outer step infinite, which is refused there.
    with np.errstate(over="ignore"):
        return values, gains.astype(np.float32), norms


def outer_step(
    fragment: Fragment, before: FragmentState, values: F32, gains: F32, policy: Policy
) -> tuple[F32, F32]:
    """New parameters and momentum (n,), in new arrays: b <- mu*b + d, then p <- p - lr*(d + mu*b).

    The outer gradient d is `values` (n,) times `gains` (k,), one for each piece. A first step from
    b = 0 moves by lr * (1 + mu) * d; with mu = 0 this is plain SGD. Raises FloatingPointError if a
    result is not finite: one NaN would spread to every learner.

    Another optimizer is a kernel here, and a name in records.Policy and config.MergeSection. What
    it keeps between two steps is `momentum`, of any length: zeros (n,) before the first.

    Source: DiLoCo (arXiv 2311.08105), with the recursion of torch.optim.SGD(nesterov=True).
    """
    assert before.global_.shape == before.momentum.shape == (fragment.elements,), before
    assert values.shape == (fragment.elements,), values.shape
    assert policy.outer_lr > 0 and 0 <= policy.momentum < 1, policy
    updated = empty_f32(fragment.elements)
    velocity = empty_f32(fragment.elements)
    largest = nesterov_step(
        read_only(before.global_),
        read_only(before.momentum),
        read_only(values),
        fragment.bounds,
        read_only(gains),
        np.float32(policy.outer_lr),
        np.float32(policy.momentum),
        updated,
        velocity,
    )
    if largest >= INFINITE_BITS:
        raise FloatingPointError("the outer step would make a parameter infinite or NaN")
    return updated, velocity


@kernel
def nesterov_step(
    params: F32,
    momentum: F32,
    values: F32,
    bounds: I64,
    gains: F32,
    lr: np.float32,
    mu: np.float32,
    updated: F32,
    velocity: F32,
) -> int:
    """Sets velocity = mu * momentum + d and updated = params - lr * (d + mu * velocity), where
    d = value * gain; all (n,).

    Returns the largest magnitude of a parameter as float32 bits: from INFINITE_BITS on it is not
    finite.
    """
    largest = np.uint32(0)
    for span in range(gains.size):
        gain = gains[span]
        # Slices, because numba makes a loop from one bound to the next ten times slower.
        here = slice(bounds[span], bounds[span + 1])
        part = values[here]
        part_params = params[here]
        part_momentum = momentum[here]
        part_updated = updated[here]
        part_velocity = velocity[here]
        for i in range(part.size):
            # This order of products and sums is promised, bit by bit.
            step = part[i] * gain
            speed = part_momentum[i] * mu + step
            moved = part_params[i] - (step + speed * mu) * lr
            part_velocity[i] = speed
            part_updated[i] = moved
            # A speed that is not finite makes such a parameter, even where mu is 0.
            largest = max(largest, np.float32(moved).view(np.uint32) & np.uint32(0x7FFFFFFF))
    return int(largest)


def warm_up() -> None:
    """Compiles the kernels of a merge, or loads them from numba's cache, before one has to wait."""
    entry = LayoutEntry("warm up", (3,), "float32", "rda")
    (fragment,) = build_table([entry], 1)
    ones = np.ones(3, np.float32)
    state = FragmentState.of(0, 0, ones, ones, ones)
    for codec in get_args(CodecName):
        chunks = encode_push(fragment, ones, ones * 2, codec=codec, rho=0.5, chunk_elements=RUN)
        push = Contribution(
            "a", "a", push_id=1, base=0, tokens=1, steps=1,
            codec=codec, chunk_elements=RUN, 
            chunks=tuple(chunk.payload for chunk in chunks),
        )  # fmt: skip
        pushes = (push, replace(push, learner="b"))
        merge(fragment, state, Round(0, 1, pushes, Policy(codec=codec, chunk_elements=RUN)))
