"""One outer gradient out of many: token weights, clipped norms, mean or radial-directional. [pure]

Sign: an outer gradient is base - local, so the outer optimizer descends along it. The bits of a
merge are promised (DESIGN 6): everything is summed over learners in name order, over elements in
element order, in the precision that is written here, without fast-math.

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2 (weights) and App. D.2 (averaging). The
paper's radial factor is a sum of vectors; the mean of the norms is the reading used here. Clipping,
the largest share and the cap on the gain are additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, cast

import numba  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from narrows.proto.codecs import DecodedChunk
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment
from narrows.proto.kernels import F32, F64, I64, float_square_sums, read_only

NORM_MIN: Final = 2.0**-100
"""A piece with a smaller norm counts as zero: dividing by it would overflow float32."""

DIRECTION_MIN: Final = 1e-6
"""Norm of a mean direction (of unit vectors) that is no more than float32 rounding."""

CLIP_CONTRIBUTORS_MIN: Final = 3
"""Of two norms that differ nobody can say which is the outlier. The same for shares."""

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Contribution:
    """A complete contribution of one learner to one fragment."""

    learner: str
    tokens: int
    """Tokens since the base was adopted (c_tokens)."""
    steps: int
    """Inner steps since then (c_steps)."""
    chunks: Sequence[tuple[int, DecodedChunk]]
    """(offset, chunk) in offset order, covering the fragment without gap or overlap."""


@dataclass(frozen=True, eq=False)
class Merged:
    """The result of a merge of M contributions to a fragment of n elements in k pieces."""

    outer_grad: F32
    """(n,)"""
    clipped: int
    """How many of the norms were clipped."""
    norms: F64
    """(k, M) norms before clipping, in name order."""


def token_weights(
    tokens_steps: Sequence[tuple[int, int]],
    *,
    rule: Literal["tokens", "equal"],
    share_max: float = 0.5,
) -> list[float]:
    """Weights of contributions with these (tokens, inner steps); they sum to 1.

    tokens: tokens * tokens / steps, "quantity times quality" (Sec. 3.2). With three or more
    contributors no share exceeds `share_max`: what is above it goes to the others in proportion.
    Below 1 / M it cannot hold, then all are equal. Raises LocalProtocolError MISUSE for an empty
    list and for counts that are not positive.
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
    return weights if len(weights) < CLIP_CONTRIBUTORS_MIN else _limited(weights, share_max)


def _limited(weights: list[float], share_max: float) -> list[float]:
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


def merge(
    fragment: Fragment,
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    *,
    clip_ratio: float = 3.0,
    law: Literal["layout", "mean"] = "layout",
) -> Merged:
    """The merged outer gradient (n,), float32.

    Per piece, with norms from three non-zero contributors on clipped to `clip_ratio` times their
    median (0: never): the weighted mean, or where the layout says so the radial-directional average
    (sum w ||v||) * unit(sum w unit(v)), at most sqrt(non-zero contributors) times as long as the
    mean. It is the mean where there is one contributor, or where the directions cancel out.

    `contributions` are sorted by learner; `weights` sum to 1. `law` "mean" overrules the layout.
    Raises LocalProtocolError MISUSE otherwise. The result is finite unless the input is of the
    order of float32's limit; the caller checks what it commits.
    """
    _check(fragment, contributions, weights)
    shares = np.array(weights, np.float64)
    norms = _norms(fragment, contributions)
    clips = _clips(norms, clip_ratio)
    mean_factors = shares * clips
    units = np.divide(shares, norms, out=np.zeros_like(norms), where=norms >= NORM_MIN)
    units[[law == "mean" or piece.law == "mean" for piece in fragment.pieces]] = 0.0
    # Fewer than two contributors to a piece leave nothing to average, and keep their bits.
    units[np.count_nonzero(units, axis=1) < 2] = 0.0
    mean, direction = _accumulate(fragment, contributions, mean_factors, units)
    if direction.size:
        _replace_mean(fragment, mean, direction, mean_factors * norms, units * norms)
    return Merged(mean, int(np.count_nonzero(clips < 1.0)), norms)


def _norms(fragment: Fragment, contributions: Sequence[Contribution]) -> F64:
    """(k, M) norms per piece and learner: square sums of chunks, added in offset order."""
    squares = np.zeros((len(fragment.pieces), len(contributions)))
    for column, contribution in enumerate(contributions):
        for offset, chunk in contribution.chunks:
            touched = fragment.pieces_of(offset, chunk.count)
            squares[touched.start : touched.stop, column] += chunk.square_sums()
    return np.sqrt(squares)


def _clips(norms: F64, clip_ratio: float) -> F64:
    """(k, M) factors up to 1 that bring each norm down to the limit of its piece.

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
    return clips


def _accumulate(
    fragment: Fragment, contributions: Sequence[Contribution], mean_factors: F64, units: F64
) -> tuple[F32, F32]:
    """sum of mean_factors * v (n,) and, of the pieces where units is not 0, sum of units * v (n,).

    The factors (k, M) are rounded to float32 once. Without any unit the second sum is empty.
    """
    mean = np.zeros(fragment.elements, np.float32)
    direction = np.zeros(fragment.elements if units.any() else 0, np.float32)
    longest = max(chunk.count for each in contributions for _, chunk in each.chunks)
    scratch = np.empty(longest, np.float32)
    for column, offset, chunk in _in_cache_order(contributions):
        values = scratch[: chunk.count]
        chunk.values(values)
        touched = fragment.pieces_of(offset, chunk.count)
        rows, end = slice(touched.start, touched.stop), offset + chunk.count
        bounds = read_only(fragment.spans(offset, chunk.count))
        for factors, total in ((mean_factors, mean), (units, direction)):
            if total.size:
                column_factors = factors[rows, column].astype(np.float32)
                add_scaled(read_only(values), bounds, read_only(column_factors), total[offset:end])
    return mean, direction


def _in_cache_order(
    contributions: Sequence[Contribution],
) -> Iterator[tuple[int, int, DecodedChunk]]:
    """(column, offset, chunk) such that every element meets the learners in name order.

    Learners usually cut their contributions alike; then all chunks of one slice come together, so
    that its sums stay in cache. Otherwise one learner comes after another: slower, the same bits.
    """
    cuts = [[(offset, chunk.count) for offset, chunk in each.chunks] for each in contributions]
    if all(cut == cuts[0] for cut in cuts):
        for number, (offset, _) in enumerate(cuts[0]):
            for column, each in enumerate(contributions):
                yield column, offset, each.chunks[number][1]
    else:
        for column, each in enumerate(contributions):
            for offset, chunk in each.chunks:
                yield column, offset, chunk


def _replace_mean(
    fragment: Fragment, mean: F32, direction: F32, weighted_norms: F64, shares: F64
) -> None:
    """mean = direction, made as long as the mean norm and the cap allow, piece by piece.

    `weighted_norms` (k, M) are w * ||v||; `shares` (k, M) are w for who takes part in a direction.
    Pieces without a direction that the contributors have in common keep the mean.
    """
    mean_norms, direction_norms = _piece_norms(fragment, mean), _piece_norms(fragment, direction)
    caps = np.sqrt(np.count_nonzero(shares, axis=1)) * mean_norms
    lengths = np.minimum(_sum_over_learners(weighted_norms), caps)
    usable = direction_norms > DIRECTION_MIN * _sum_over_learners(shares)
    for row in np.flatnonzero(usable):
        part = slice(int(fragment.bounds[row]), int(fragment.bounds[row + 1]))
        gain = np.float32(lengths[row] / direction_norms[row])
        np.multiply(direction[part], gain, out=mean[part])


def _piece_norms(fragment: Fragment, values: F32) -> F64:
    squares = np.empty(len(fragment.pieces))
    float_square_sums(read_only(values), read_only(fragment.bounds), squares)
    return np.sqrt(squares)


def _sum_over_learners(terms: F64) -> F64:
    """(k,) sums of (k, M), learner by learner: numpy's own sum may go pairwise."""
    total = np.zeros(terms.shape[0])
    for column in range(terms.shape[1]):
        total += terms[:, column]
    return total


def _check(
    fragment: Fragment, contributions: Sequence[Contribution], weights: Sequence[float]
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


_njit: Callable[..., Callable[[object], object]] = numba.njit  # pyright: ignore


def _kernel(function: Function) -> Function:
    return cast(Function, _njit(nogil=True, cache=True, fastmath=False)(function))


@_kernel
def add_scaled(values: F32, bounds: I64, factors: F32, total: F32) -> None:
    """total (n,) += factors[span] * values (n,); a factor of 0 leaves its span untouched.

    Product and sum are rounded one after the other, so that no CPU may fuse them.
    """
    for span in range(factors.size):
        factor = factors[span]
        if factor != np.float32(0):
            part = values[bounds[span] : bounds[span + 1]]
            part_total = total[bounds[span] : bounds[span + 1]]
            for i in range(part.size):
                part_total[i] += factor * part[i]


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, before a merge has to wait for it."""
    values, bounds = np.ones(3, np.float32), np.array([0, 3], np.int64)
    factors, squares = np.ones(1, np.float32), np.empty(1)
    add_scaled(read_only(values), read_only(bounds), read_only(factors), np.zeros(3, np.float32))
    float_square_sums(read_only(values), read_only(bounds), squares)
