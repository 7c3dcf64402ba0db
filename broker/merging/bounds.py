"""How long a contribution may be, piece by piece, and the factor that makes it so. [pure]

A piece with enough history is bounded by it: `norm_limit` times its running median, whoever
contributes. Where norms rise, the history lags. So the length that more than half of the names
reach in the round itself counts if it is larger: a minority cannot raise it. A learner that is
alone has mostly its own norms as measure, and a wider bound, `clip_ratio` times their median. A
young piece is bounded by its own round alone.
"""

from __future__ import annotations

import math

import numpy as np

from narrows.broker.merging.history import NORM_MIN, Measure
from narrows.broker.merging.weights import CLIP_CONTRIBUTORS_MIN
from narrows.proto.codec import F64


def clips(norms: F64, measure: Measure, *, norm_limit: float, clip_ratio: float) -> F64:
    """Factors (k, M) up to 1 that bring each norm of (k, M) down to the limit of its piece.

    `measure` is that of the history. `norm_limit` 0 ignores it.
    """
    factors = np.ones_like(norms)
    for row, piece_norms in enumerate(norms):
        median = float(measure.medians[row])
        if norm_limit > 0 and not math.isnan(median):
            limit = _of_the_history(median, measure, piece_norms, norm_limit, clip_ratio)
        else:
            limit = _of_the_round(piece_norms, clip_ratio, two=norm_limit > 0)
        over = piece_norms > limit
        factors[row, over] = limit / piece_norms[over]
    assert factors.max(initial=0.0) <= 1.0, "clipping only shortens"
    return factors


def trusted(weights: F64, factors: F64) -> F64:
    """Weights (k, M) of contributions with `weights` (M,), clipped by `factors` (k, M).

    A weight falls by the factor by which its piece was clipped, and the others take over: whoever
    claims ten times the usual length is no better than noise in that piece. A piece in which
    nothing was clipped keeps the weights, bit by bit.
    """
    shares = np.broadcast_to(weights, factors.shape).copy()
    for row in np.flatnonzero((factors < 1.0).any(axis=1)):
        believed = [weight * factor for weight, factor in zip(weights, factors[row], strict=True)]
        shares[row] = np.array(believed) / math.fsum(believed)
    return shares


def _reached_by_most(norms: F64, absent: int) -> float:
    """The greatest length that more than half of all reach: norms (M,) and `absent` names that
    reach nothing. Their lower median if nobody is absent. 0 if there is none.

    Zeros are left out, and one alone says nothing.
    """
    positive = np.sort(norms[norms >= NORM_MIN])[::-1]
    place = (positive.size + absent) // 2
    return float(positive[place]) if 1 < positive.size > place else 0.0


def _of_the_history(
    median: float, measure: Measure, norms: F64, norm_limit: float, clip_ratio: float
) -> float:
    """Limit for the norms (M,) of a piece with this running median; infinite if there is none."""
    if measure.is_alone:
        return clip_ratio * median if clip_ratio > 0 else np.inf
    return norm_limit * max(median, _reached_by_most(norms, measure.absent))


def _of_the_round(norms: F64, clip_ratio: float, *, two: bool) -> float:
    """Limit for the norms (M,) of a piece, from these norms alone.

    From three on, `clip_ratio` times their median; 0: none. `two`: of two, the shorter one is the
    measure. Zero norms are left out of the median: a learner whose text never used a row of the
    embedding says nothing about how long the others' outer gradients should be.
    """
    positive = norms[norms >= NORM_MIN]
    if clip_ratio > 0 and positive.size >= CLIP_CONTRIBUTORS_MIN:
        return clip_ratio * float(np.median(positive))
    if clip_ratio > 0 and two and positive.size == CLIP_CONTRIBUTORS_MIN - 1:
        return clip_ratio * float(positive.min())
    return np.inf
