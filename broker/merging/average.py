"""Token weights, and the average of outer gradients: weighted mean or radial-directional.

The bits of an average are promised: a replay and an independent reader must find the same.

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2 and App. D.2. The paper's radial factor is a
sum of vectors; the mean of the norms is the reading used here. The cap on the gain is an addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from narrows.broker.merging.sums import Vector, in_order, norms_of, weighted_sums
from narrows.proto.codec import F32, F64
from narrows.proto.layout import Fragment

NORM_MIN: Final = 2.0**-100
"""Norm of a piece from which on it has a direction: the least scale that a code can have."""

DIRECTION_MIN: Final = 1e-6
"""Norm of a sum of unit vectors, per weight, that is no more than float32 rounding."""


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
    caller checks that the result is finite.
    """
    assert rule in ("layout", "mean"), rule
    shares, norms = np.array(weights, np.float64), norms_of(fragment, vectors)
    units = np.divide(shares, norms, out=np.zeros_like(norms), where=norms >= NORM_MIN)
    units[[rule == "mean" or piece.rule == "mean" for piece in fragment.pieces]] = 0.0
    # A piece with fewer than two contributors has nothing to average, and keeps its bits.
    units[np.count_nonzero(units, axis=1) < 2] = 0.0
    values, value_norms, mean_norms = weighted_sums(fragment, vectors, shares, units)
    cancelled = units.any(axis=1) & (value_norms <= DIRECTION_MIN * in_order(units * norms))
    if cancelled.any():
        # Their means were not kept. This is rare enough to add everything once more.
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
