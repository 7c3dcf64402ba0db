"""Merge of outer gradients: token weights, clipped norms, mean or radial-directional mean. [pure]

Sign: an outer gradient is base - local, so the outer optimizer descends along it. The bits of a
merge are promised: everything is summed over learners in name order, over elements in
element order, in the precision that is written here, without fast-math.

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2 (weights) and App. D.2 (averaging). The
paper's radial factor is a sum of vectors; the mean of the norms is the reading used here. Clipping,
the largest share and the cap on the gain are additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from narrows.proto.codec import (
    F32,
    F64,
    I8,
    I64,
    RUN,
    DecodedChunk,
    empty_f32,
    float_square_sums,
    kernel,
    read_only,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment

NORM_MIN: Final = 2.0**-100
"""A piece with a smaller norm counts as zero: dividing by it would overflow float32."""

DIRECTION_MIN: Final = 1e-6
"""Norm of a mean direction (of unit vectors) that is no more than float32 rounding."""

CLIP_CONTRIBUTORS_MIN: Final = 3
"""Contributors from which on norms are clipped and shares are limited: of two norms that differ,
nobody can say which is the outlier."""

SLICE: Final = 1024 * RUN
"""Elements whose sums stay in cache while all learners are added to them."""


@dataclass(frozen=True)
class DecodedVector:
    """The outer gradient of one fragment that a learner contributes, decoded."""

    learner: str
    chunks: Sequence[tuple[int, DecodedChunk]]
    """(offset, chunk) in offset order, covering the fragment without gap or overlap."""


@dataclass(frozen=True, eq=False)
class MergeResult:
    """The result of a merge of M contributions to a fragment of n elements in k pieces."""

    outer_grad: F32
    """(n,)"""
    clipped: int
    """Number of norms that were clipped."""
    norms: F64
    """(k, M) norms before clipping, in name order."""


def token_weights(
    tokens_steps: Sequence[tuple[int, int]],
    *,
    rule: Literal["tokens", "equal"],
    share_max: float = 0.5,
) -> list[float]:
    """Weights of contributions with these (tokens, inner steps); they sum to 1.

    Rule "tokens" gives tokens * tokens / steps, "quantity times quality" (Sec. 3.2). With three or
    more contributors no share exceeds `share_max`: the excess goes to the others in proportion. A
    `share_max` below 1 / M cannot hold, and then all shares are equal. Raises LocalProtocolError
    MISUSE for an empty list and for counts that are not positive.
    """
    if not tokens_steps or min(map(min, tokens_steps)) < 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE, "token weights", expected="counts above 0", got=str(tokens_steps)
        )
    if rule == "equal":
        return [1.0 / len(tokens_steps)] * len(tokens_steps)
    raw = [tokens * tokens / steps for tokens, steps in tokens_steps]
    total = math.fsum(raw)
    weights = [value / total for value in raw]
    weights = weights if len(weights) < CLIP_CONTRIBUTORS_MIN else _limited(weights, share_max)
    assert min(weights) > -1e-9 and abs(math.fsum(weights) - 1.0) < 1e-9, "shares sum to 1"
    return weights


def _limited(weights: list[float], share_max: float) -> list[float]:
    """Brings every share down to `share_max`; the others grow in proportion."""
    if share_max * len(weights) <= 1.0:
        return [1.0 / len(weights)] * len(weights)
    full: set[int] = set()
    # Every pass that changes something adds to `full`, and not all of them fit into it.
    while over := {i for i, weight in enumerate(weights) if weight > share_max} - full:
        full |= over
        rest = math.fsum(weight for i, weight in enumerate(weights) if i not in full)
        growth = (1.0 - share_max * len(full)) / rest
        weights = [share_max if i in full else w * growth for i, w in enumerate(weights)]
    return weights


def merge_vectors(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    weights: Sequence[float],
    *,
    clip_ratio: float = 3.0,
    rule: Literal["layout", "mean"] = "layout",
) -> MergeResult:
    """Merges outer gradients into one (n,), float32.

    Each piece is merged by itself. From three non-zero contributors on, norms are clipped to
    `clip_ratio` times their median (0: never). The result is the weighted mean, or where the layout
    says so the radial-directional average (sum w ||v||) * unit(sum w unit(v)). That average is at
    most sqrt(non-zero contributors) times as long as the mean. It is the mean where there is one
    contributor, or where the directions cancel out. `rule` "mean" overrules the layout.

    Raises LocalProtocolError MISUSE unless `contributions` are sorted by learner and `weights` sum
    to 1. The caller checks the result before it commits: near float32's limit it may be infinite.
    """
    _check(fragment, contributions, weights)
    shares = np.array(weights, np.float64)
    norms = _norms(fragment, contributions)
    clips = _clips(norms, clip_ratio)
    mean_factors = shares * clips
    units = np.divide(shares, norms, out=np.zeros_like(norms), where=norms >= NORM_MIN)
    units[[rule == "mean" or piece.rule == "mean" for piece in fragment.pieces]] = 0.0
    # A piece with fewer than two contributors has nothing to average, and keeps its bits.
    units[np.count_nonzero(units, axis=1) < 2] = 0.0
    mean, direction = weighted_sums(fragment, contributions, mean_factors, units)
    assert mean.size == fragment.elements and direction.size in (0, fragment.elements)
    if direction.size:
        _replace_mean(fragment, mean, direction, mean_factors * norms, units * norms)
    return MergeResult(mean, int(np.count_nonzero(clips < 1.0)), norms)


def _norms(fragment: Fragment, contributions: Sequence[DecodedVector]) -> F64:
    """Norms (k, M) per piece and learner: square sums of chunks, added in offset order."""
    squares = np.zeros((len(fragment.pieces), len(contributions)))
    for column, contribution in enumerate(contributions):
        for offset, chunk in contribution.chunks:
            touched = fragment.pieces_of(offset, chunk.count)
            assert 0 <= touched.start < touched.stop <= len(fragment.pieces)
            squares[touched.start : touched.stop, column] += chunk.square_sums()
    return np.sqrt(squares)


def _clips(norms: F64, clip_ratio: float) -> F64:
    """Factors (k, M) up to 1 that bring each norm down to the limit of its piece.

    Zero norms are left out of the median: a learner whose text never used a row of the embedding
    says nothing about how long the others' outer gradients should be.
    """
    clips = np.ones_like(norms)
    for row, piece_norms in enumerate(norms if clip_ratio > 0 else norms[:0]):
        positive = piece_norms[piece_norms >= NORM_MIN]
        if positive.size >= CLIP_CONTRIBUTORS_MIN:
            limit = clip_ratio * float(np.median(positive))
            over = piece_norms > limit
            clips[row, over] = limit / piece_norms[over]
    assert clips.max(initial=0.0) <= 1.0, "clipping only shortens"
    return clips


def weighted_sums(
    fragment: Fragment, contributions: Sequence[DecodedVector], mean_factors: F64, units: F64
) -> tuple[F32, F32]:
    """Sums over learners: mean_factors * v (n,), and units * v (n,) in pieces with units above 0.

    The factors (k, M) are rounded to float32 once. Without any unit the second sum is empty.
    """
    assert mean_factors.shape == units.shape == (len(fragment.pieces), len(contributions))
    mean = empty_f32(fragment.elements)
    direction = empty_f32(fragment.elements if units.any() else 0)
    mean_rows = read_only(mean_factors.T.astype(np.float32))
    unit_rows = read_only(units.T.astype(np.float32))
    scratch = np.empty(SLICE, np.int8)
    cuts: dict[tuple[int, int, int], tuple[slice, slice, I64]] = {}
    for column, offset, chunk, first, end in _in_cache_order(contributions):
        # One slice of all learners is cut at the same pieces, so its cuts are kept.
        cut = cuts.get((offset, first, end))
        if cut is None:
            cut = cuts[offset, first, end] = _cut(fragment, offset, chunk.count, first, end)
        pieces, own, bounds = cut
        codes: I8 | F32
        if chunk.quantised:
            codes = chunk.codes_of(first, end, scratch)
        else:
            codes = read_only(chunk.floats(first, end))
        where = slice(offset + first, offset + end)
        if column == 0:  # Only now, so that the zeros are in cache when they are added to.
            clear(mean[where])
            clear(direction[where])
        accumulate(
            codes,
            bounds,
            chunk.scales[own],
            mean_rows[column, pieces],
            unit_rows[column, pieces],
            mean[where],
            direction[where],
        )
    return mean, direction


def _cut(
    fragment: Fragment, offset: int, count: int, first: int, end: int
) -> tuple[slice, slice, I64]:
    """Pieces that elements first..end of a chunk (offset, count) touch, by number in the fragment
    and by number in the chunk; and the bounds of their spans."""
    assert 0 <= first < end <= count
    touched = fragment.pieces_of(offset + first, end - first)
    before = fragment.pieces_of(offset, count).start
    own = slice(touched.start - before, touched.stop - before)
    bounds = read_only(fragment.spans(offset + first, end - first))
    assert bounds.size == len(touched) + 1
    return slice(touched.start, touched.stop), own, bounds


def _in_cache_order(
    contributions: Sequence[DecodedVector],
) -> Iterator[tuple[int, int, DecodedChunk, int, int]]:
    """Yields (column, offset, chunk, first, end): elements first..end of a chunk at `offset`.

    Every element meets the learners in name order. If all cut their contributions alike, one slice
    of all comes together and its sums stay in cache. Otherwise it is slower, with the same bits.
    """
    cuts = [[(offset, chunk.count) for offset, chunk in each.chunks] for each in contributions]
    if all(cut == cuts[0] for cut in cuts):
        for number, (offset, count) in enumerate(cuts[0]):
            for first in range(0, count, SLICE):
                for column, each in enumerate(contributions):
                    chunk = each.chunks[number][1]
                    yield column, offset, chunk, first, min(first + SLICE, count)
    else:
        for column, each in enumerate(contributions):
            for offset, chunk in each.chunks:
                for first in range(0, chunk.count, SLICE):
                    yield column, offset, chunk, first, min(first + SLICE, chunk.count)


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
    lengths = np.minimum(_sum_over_learners(weighted_norms), caps)
    usable = direction_norms > DIRECTION_MIN * _sum_over_learners(shares)
    for row in np.flatnonzero(usable):
        where = slice(int(fragment.bounds[row]), int(fragment.bounds[row + 1]))
        gain = np.float32(lengths[row] / direction_norms[row])
        np.multiply(direction[where], gain, out=mean[where])


def _piece_norms(fragment: Fragment, values: F32) -> F64:
    return np.sqrt(float_square_sums(values, fragment.bounds))


def _sum_over_learners(terms: F64) -> F64:
    """Sums (k,) of (k, M), learner by learner: numpy's own sum may go pairwise."""
    total = np.zeros(terms.shape[0])
    for column in range(terms.shape[1]):
        total += terms[:, column]
    return total


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


@kernel
def clear(out: F32) -> None:
    """Sets out (n,) to 0."""
    for i in range(out.size):
        out[i] = np.float32(0)


@kernel
def accumulate(
    codes: I8 | F32,
    bounds: I64,
    scales: F32,
    mean_factors: F32,
    units: F32,
    mean: F32,
    direction: F32,
) -> None:
    """Adds mean_factor * v to mean (n,) and unit * v to direction (n,), where v = scale * code.

    v is exact; product and sum are rounded one after the other, so that no CPU may fuse them. A
    factor of 0 leaves its span untouched; `direction` is empty if all units are 0.
    """
    for span in range(scales.size):
        scale, factor, unit = scales[span], mean_factors[span], units[span]
        part = codes[bounds[span] : bounds[span + 1]]
        part_mean = mean[bounds[span] : bounds[span + 1]]
        if unit != np.float32(0):
            part_direction = direction[bounds[span] : bounds[span + 1]]
            for i in range(part.size):
                value = scale * np.float32(part[i])
                part_mean[i] += factor * value
                part_direction[i] += unit * value
        elif factor != np.float32(0):
            for i in range(part.size):
                part_mean[i] += factor * (scale * np.float32(part[i]))


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, before a merge has to wait for it."""
    ones, bounds = read_only(np.ones(3, np.float32)), read_only(np.array([0, 3], np.int64))
    factor, total = read_only(np.ones(1, np.float32)), np.zeros(3, np.float32)
    clear(total)
    for codes in (ones, read_only(np.ones(3, np.int8))):
        accumulate(codes, bounds, factor, factor, factor, total, total)
    float_square_sums(ones, bounds)
