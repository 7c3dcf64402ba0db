"""Merge of outer gradients: clipped norms, mean, radial-directional or robust mean. [pure]

Sign: an outer gradient is base - local, so the outer optimizer descends along it. The bits of a
merge are promised: everything is summed over learners in name order, over elements in
element order, in the precision that is written here, without fast-math.

Source: Decoupled DiLoCo (arXiv 2604.21428), App. D.2 (averaging). The paper's radial factor is a
sum of vectors; the mean of the norms is the reading used here. Clipping and the cap on the gain are
additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np

from narrows.broker.merging import robust as robust_means
from narrows.broker.merging import sums
from narrows.broker.merging.bounds import clips, trusted
from narrows.broker.merging.evidence import PushEvidence, evidence_of
from narrows.broker.merging.history import EMPTY, NORM_MIN, NormHistory
from narrows.broker.merging.sums import DecodedVector, sum_over_learners, weighted_sums
from narrows.broker.merging.weights import CLIP_CONTRIBUTORS_MIN
from narrows.proto.codec import F32, F64, float_square_sums
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment

Robust: TypeAlias = Literal["off", "trimmed", "centered"]

DIRECTION_MIN: Final = 1e-6
"""Norm of a mean direction (of unit vectors) that is no more than float32 rounding."""


F32_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class MergeResult:
    """The result of a merge of M contributions to a fragment of n elements in k pieces."""

    outer_grad: F32
    """(n,)"""
    clipped: int
    """Number of norms that were clipped."""
    norms: F64
    """(k, M) norms before clipping, in name order."""
    applied: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """(M, k) norms after it, for the history, F32_MAX at most; (0, 0) if nobody knows them."""
    evidence: tuple[PushEvidence, ...] = ()
    """Per contribution; empty if nobody knows it."""


def merge_vectors(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    weights: Sequence[float],
    *,
    clip_ratio: float = 3.0,
    rule: Literal["layout", "mean"] = "layout",
    norm_limit: float = 0.0,
    robust: Robust = "off",
    history: NormHistory = EMPTY,
    center: F32 | None = None,
) -> MergeResult:
    """Merges outer gradients into one (n,), float32.

    Each piece is merged by itself. Norms are clipped to `norm_limit` times the running median of
    `history` (bounds.py has the rule), and what was clipped weighs less. Without enough of it, or
    with `norm_limit` 0, they are clipped to `clip_ratio` times their median from three non-zero
    contributors on (0: never). The result is the weighted mean, or where the layout says so the
    radial-directional average (sum w ||v||) * unit(sum w unit(v)).
    That average is at most sqrt(non-zero contributors) times as long as the mean. It is the mean
    where there is one contributor, or where the directions cancel out. `rule` "mean" overrules the
    layout. `robust` replaces both from three contributors on; "centered" clips around `center`
    (n,), None for zeros.

    Raises LocalProtocolError MISUSE unless `contributions` are sorted by learner and `weights` sum
    to 1. The caller checks the result before it commits: near float32's limit it may be infinite.
    """
    _check(fragment, contributions, weights)
    shares = np.array(weights, np.float64)
    norms = _norms(fragment, contributions)
    measure = history.measure([each.learner for each in contributions], len(fragment.pieces))
    factors = clips(norms, measure, norm_limit=norm_limit, clip_ratio=clip_ratio)
    applied = norms * factors
    shares = trusted(shares, factors) if norm_limit > 0 else shares
    mean_factors = shares * factors
    if len(contributions) < CLIP_CONTRIBUTORS_MIN:
        robust = "off"
    units = np.divide(shares, norms, out=np.zeros_like(norms), where=norms >= NORM_MIN)
    is_mean = [rule == "mean" or robust != "off" or p.rule == "mean" for p in fragment.pieces]
    units[is_mean] = 0.0
    # A piece with fewer than two contributors has nothing to average, and keeps its bits.
    units[np.count_nonzero(units, axis=1) < 2] = 0.0
    mean, direction = weighted_sums(fragment, contributions, mean_factors, units)
    assert mean.size == fragment.elements and direction.size in (0, fragment.elements)
    evidence = evidence_of(fragment, contributions, mean, mean_factors, norms, applied)
    if robust == "trimmed":
        robust_means.trimmed_mean(fragment, contributions, factors, mean)
    elif robust == "centered":
        around = center if center is not None else np.zeros(fragment.elements, np.float32)
        inputs = fragment, contributions
        near = robust_means.centered_factors(*inputs, applied, factors, around, measure.medians)
        rest = 1.0 - sum_over_learners(shares * near)
        mean = robust_means.centered_mean(*inputs, mean_factors * near, rest, around)
    elif direction.size:
        _replace_mean(fragment, mean, direction, mean_factors * norms, units * norms)
    count = int(np.count_nonzero(factors < 1.0))
    # A sum of finite squares may pass float32's largest, and infinity would be no length.
    kept = np.minimum(applied.T, F32_MAX).astype(np.float32)
    return MergeResult(mean, count, norms, kept, evidence)


def _norms(fragment: Fragment, contributions: Sequence[DecodedVector]) -> F64:
    """Norms (k, M) per piece and learner: square sums of chunks, added in offset order."""
    squares = np.zeros((len(fragment.pieces), len(contributions)))
    for column, contribution in enumerate(contributions):
        for offset, chunk in contribution.chunks:
            touched = fragment.pieces_of(offset, chunk.count)
            assert 0 <= touched.start < touched.stop <= len(fragment.pieces)
            squares[touched.start : touched.stop, column] += chunk.square_sums()
    return np.sqrt(squares)


def _replace_mean(
    fragment: Fragment, mean: F32, direction: F32, weighted_norms: F64, shares: F64
) -> None:
    """Replaces the mean by the direction, as long as the mean norm and the cap allow, per piece.

    `weighted_norms` (k, M) are w * ||v||; `shares` (k, M) are w where a learner has a direction,
    else 0. A piece whose directions cancel out keeps the mean.
    """
    assert mean.shape == direction.shape and weighted_norms.shape == shares.shape
    mean_norms, direction_norms = _piece_norms(fragment, mean), _piece_norms(fragment, direction)
    caps = np.sqrt(np.count_nonzero(shares, axis=1)) * mean_norms
    lengths = np.minimum(sum_over_learners(weighted_norms), caps)
    usable = direction_norms > DIRECTION_MIN * sum_over_learners(shares)
    for row in np.flatnonzero(usable):
        where = slice(int(fragment.bounds[row]), int(fragment.bounds[row + 1]))
        gain = np.float32(lengths[row] / direction_norms[row])
        np.multiply(direction[where], gain, out=mean[where])


def _piece_norms(fragment: Fragment, values: F32) -> F64:
    return np.sqrt(float_square_sums(values, fragment.bounds))


def _check(
    fragment: Fragment, contributions: Sequence[DecodedVector], weights: Sequence[float]
) -> None:
    names = [each.learner for each in contributions]
    if not names or names != sorted(set(names)):
        raise _misuse("contributions", "at least one, sorted by learner", str(names))
    if len(weights) != len(names) or min(weights) < 0 or abs(math.fsum(weights) - 1) > 1e-9:
        raise _misuse("weights", f"{len(names)} numbers that sum to 1", str(list(weights)))
    for each in contributions:
        end = 0
        for offset, chunk in each.chunks:
            if offset != end:
                raise _misuse(f"chunks of {each.learner}", f"offset {end}", str(offset))
            end += chunk.count
        if end != fragment.elements:
            expected = f"{fragment.elements} elements"
            raise _misuse(f"chunks of {each.learner}", expected, str(end))


def _misuse(what: str, expected: str, got: str) -> LocalProtocolError:
    return LocalProtocolError(ErrorCode.MISUSE, f"merge: {what}", expected=expected, got=got)


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, before a merge has to wait for it."""
    sums.warm_up()
    robust_means.warm_up()
    float_square_sums(np.ones(3, np.float32), np.array([0, 3], np.int64))
