"""Robust averages: the coordinate-wise trimmed mean, and centered clipping. [pure]

Both take the place of the mean from three contributors on. The bits are promised like those of the
mean: slice by slice, learners in name order, without fast-math.

Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization" (ICML
2021), for centered clipping. Its center, the last aggregate, is the outer momentum's here; its
radius comes from the history of norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from narrows.broker.merging.sums import DecodedVector, dots, weighted_sums
from narrows.proto.codec import F32, F64, I64, RUN, empty_f32, float_square_sums, kernel, read_only
from narrows.proto.fragments import Fragment

TRIM_SHARE: Final = 4
"""One contribution in so many is trimmed at each end, at least one."""

BLOCK: Final = 64 * RUN
"""Elements of all contributions that are sorted together, so that they stay in cache."""

NETWORK_MAX: Final = 32
"""Contributors up to which the kernel sorts; its steps grow with their square."""


def trimmed(count: int) -> int:
    """Contributions that the trimmed mean drops at each end of a coordinate."""
    assert count >= 3, "two contributions have no middle"
    return max(1, count // TRIM_SHARE)


def trimmed_mean(
    fragment: Fragment, contributions: Sequence[DecodedVector], factors: F64, out: F32
) -> None:
    """out (n,) = per element the mean of factor * v without the largest and smallest values.

    `factors` (k, M) are rounded to float32 once. The values that are kept are added in rising
    order, from 0.
    """
    count = len(contributions)
    drop = trimmed(count)
    share = np.float32(1.0 / (count - 2 * drop))
    rows = factors.T.astype(np.float32)
    for first in range(0, fragment.elements, BLOCK):
        end = min(first + BLOCK, fragment.elements)
        spans = fragment.spans(first, end - first)
        touched = fragment.pieces_of(first, end - first)
        values = np.empty((count, end - first), np.float32)
        for row, own, each in zip(values, rows, contributions, strict=True):
            _values_into(fragment, each, first, row)
            for piece, start, stop in zip(touched, spans[:-1], spans[1:], strict=True):
                row[start:stop] *= own[piece]
        if count <= NETWORK_MAX:
            sort_rows(values)
        else:
            values.sort(axis=0)
        mean_of_rows(read_only(values), drop, share, out[first:end])


def _values_into(fragment: Fragment, vector: DecodedVector, first: int, out: F32) -> None:
    """out = values of a contribution from element `first` on."""
    end = first + out.size
    for offset, chunk in vector.chunks:
        start, stop = max(first, offset), min(end, offset + chunk.count)
        if start >= stop:
            continue
        where = out[start - first : stop - first]
        if not chunk.quantised:
            where[:] = chunk.floats(start - offset, stop - offset)
            continue
        # Packed codes can be cut at whole runs only.
        cut = (start - offset) // RUN * RUN
        upto = min(chunk.count, -(-(stop - offset) // RUN) * RUN)
        codes = chunk.codes_of(cut, upto, np.empty(upto - cut, np.int8))
        where[:] = codes[start - offset - cut : stop - offset - cut]
        before = fragment.pieces_of(offset, chunk.count).start
        spans = fragment.spans(start, stop - start)
        for span, piece in enumerate(fragment.pieces_of(start, stop - start)):
            where[spans[span] : spans[span + 1]] *= chunk.scales[piece - before]


def centered_factors(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    applied: F64,
    factors: F64,
    center: F32,
    radii: F64,
) -> F64:
    """Factors (k, M) up to 1 that bring each contribution within the radius (k,) of the center.

    `applied` (k, M) are the norms after clipping by `factors` (k, M). A NaN radius is none.
    """
    squares = float_square_sums(center, fragment.bounds)[:, None]
    products = factors * dots(fragment, contributions, center)
    distances = np.sqrt(np.maximum(0.0, applied * applied - 2.0 * products + squares))
    limits = np.where(np.isnan(radii), np.inf, radii)[:, None]
    near = np.ones_like(distances)
    np.divide(limits, distances, out=near, where=distances > limits)
    return near


def centered_mean(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    mean_factors: F64,
    rest: F64,
    center: F32,
) -> F32:
    """Sum over learners of mean_factors * v, and rest (k,) * center, (n,).

    `rest` is the weight that the clipped contributions have left to the center.
    """
    mean, _ = weighted_sums(fragment, contributions, mean_factors, np.zeros_like(mean_factors))
    add_pieces(read_only(center), fragment.bounds, read_only(rest.astype(np.float32)), mean)
    return mean


@kernel
def sort_rows(values: F32) -> None:
    """Sorts each column of (M, n) in place, by odd-even transposition of whole rows."""
    count = values.shape[0]
    for turn in range(count):
        for row in range(turn % 2, count - 1, 2):
            lower, upper = values[row], values[row + 1]
            for i in range(lower.size):
                one, other = lower[i], upper[i]
                lower[i] = one if one < other else other
                upper[i] = other if one < other else one


@kernel
def mean_of_rows(values: F32, drop: int, share: np.float32, out: F32) -> None:
    """out (n,) = share * sum of the rows of (M, n) without `drop` at each end, row by row."""
    for i in range(out.size):
        out[i] = np.float32(0)
    for row in range(drop, values.shape[0] - drop):
        own = values[row]
        for i in range(out.size):
            out[i] += own[i]
    for i in range(out.size):
        out[i] = out[i] * share


@kernel
def add_pieces(values: F32, bounds: I64, factors: F32, out: F32) -> None:
    """out (n,) += factor * value, with the factor of each piece; a factor of 0 adds nothing."""
    for piece in range(factors.size):
        factor = factors[piece]
        if factor != np.float32(0):
            for i in range(bounds[piece], bounds[piece + 1]):
                out[i] += factor * values[i]


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    values, out = np.ones((3, 3), np.float32), empty_f32(3)
    sort_rows(values)
    mean_of_rows(read_only(values), 1, np.float32(1), out)
    ones, bounds = read_only(np.ones(3, np.float32)), read_only(np.array([0, 3], np.int64))
    add_pieces(ones, bounds, read_only(np.ones(1, np.float32)), out)
