"""Sums over the contributions to a fragment: in name order, slice by slice, with fixed bits. [pure]

Everything is summed over learners in name order, over elements in element order, in the precision
that is written here, without fast-math. Slices are small enough that the sums of one stay in cache
while all learners are added to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from narrows.proto.codec import F32, F64, I8, I64, RUN, DecodedChunk, empty_f32, kernel, read_only
from narrows.proto.fragments import Fragment

SLICE: Final = 1024 * RUN
"""Elements whose sums stay in cache while all learners are added to them."""

LANES: Final = 16
"""Partial sums of a dot product, as of a square sum (PROTOCOL.md, section 9)."""


@dataclass(frozen=True)
class DecodedVector:
    """The outer gradient of one fragment that a learner contributes, decoded."""

    learner: str
    chunks: Sequence[tuple[int, DecodedChunk]]
    """(offset, chunk) in offset order, covering the fragment without gap or overlap."""


class Part(NamedTuple):
    """One slice of one contribution, as kernels take it."""

    column: int
    """Place of the learner in name order."""
    where: slice
    """Elements of the fragment."""
    pieces: slice
    """Pieces of the fragment that it touches."""
    codes: I8 | F32
    bounds: I64
    scales: F32


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
    for part in parts_of(fragment, contributions):
        column, where, pieces = part.column, part.where, part.pieces
        if column == 0:  # Only now, so that the zeros are in cache when they are added to.
            clear(mean[where])
            clear(direction[where])
        accumulate(
            part.codes,
            part.bounds,
            part.scales,
            mean_rows[column, pieces],
            unit_rows[column, pieces],
            mean[where],
            direction[where],
        )
    return mean, direction


def dots(fragment: Fragment, contributions: Sequence[DecodedVector], reference: F32) -> F64:
    """Products (k, M) of each contribution with `reference` (n,), per piece, in float64.

    Those of the slices of a piece are added in the order of their offsets.
    """
    assert reference.size == fragment.elements
    products = np.zeros((len(fragment.pieces), len(contributions)))
    lanes, found = np.empty(LANES), np.empty(len(fragment.pieces))
    reference = read_only(reference)
    for part in parts_of(fragment, contributions):
        sums = found[: part.scales.size]
        dot(part.codes, part.bounds, part.scales, reference[part.where], lanes, sums)
        products[part.pieces, part.column] += sums
    return products


def parts_of(fragment: Fragment, contributions: Sequence[DecodedVector]) -> Iterator[Part]:
    """The slices of all contributions. What one yields is valid until the next one."""
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
        yield Part(column, where, pieces, codes, bounds, chunk.scales[own])


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


def sum_over_learners(terms: F64) -> F64:
    """Sums (k,) of (k, M), learner by learner: numpy's own sum may go pairwise."""
    total = np.zeros(terms.shape[0])
    for column in range(terms.shape[1]):
        total += terms[:, column]
    return total


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


@kernel
def dot(codes: I8 | F32, bounds: I64, scales: F32, reference: F32, lanes: F64, out: F64) -> None:
    """out (s,) = sum of (scale * code) * reference of each span in float64, in lanes.

    The sum of code * reference is taken first: element i of a span goes to lane i mod LANES, then
    the lanes are added in order. It is multiplied by the scale at last.
    """
    for span in range(out.size):
        part = codes[bounds[span] : bounds[span + 1]]
        own = reference[bounds[span] : bounds[span + 1]]
        lanes[:] = 0.0
        whole = part.size - part.size % LANES
        for start in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] += np.float64(part[start + lane]) * np.float64(own[start + lane])
        for lane in range(part.size - whole):
            lanes[lane] += np.float64(part[whole + lane]) * np.float64(own[whole + lane])
        total = 0.0
        for lane in range(LANES):
            total += lanes[lane]
        out[span] = total * np.float64(scales[span])


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, before a merge has to wait for it."""
    ones, bounds = read_only(np.ones(3, np.float32)), read_only(np.array([0, 3], np.int64))
    factor, total = read_only(np.ones(1, np.float32)), np.zeros(3, np.float32)
    clear(total)
    for codes in (ones, read_only(np.ones(3, np.int8))):
        accumulate(codes, bounds, factor, factor, factor, total, total)
        dot(codes, bounds, factor, ones, np.empty(LANES), np.empty(1))
