"""Weighted sums over the contributions to a fragment: in one order, slice by slice, fixed bits.

Everything is added contribution by contribution in the round's order, over elements in element
order, in the precision that is written here, without fast-math. A slice is small enough that its
sums stay in cache while all contributions are added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codec import F32, F64, I8, I64, RUN, DecodedChunk, empty_f32, kernel, read_only
from narrows.proto.layout import Fragment

SLICE: Final = 1024 * RUN
"""Elements of a slice, whose sums stay in cache. Chunks and slices begin at multiples of RUN,
because packed codes can be cut there only."""

LANES: Final = 16
"""Partial sums of a sum of squares: enough to fill the widest vector unit. The number is part of
the promised bits."""

ROWS: Final = 8
"""Rows of LANES elements that are added at once. The number does not change the bits."""


Vector: TypeAlias = Sequence[DecodedChunk]
"""The outer gradient of one fragment that a learner contributes, decoded: its regular chunks in
order, which cover the fragment. Only the last one may be shorter than the first."""


def norms_of(fragment: Fragment, vectors: Sequence[Vector]) -> F64:
    """Norms (k, M) per piece and contribution, the same whatever the chunks."""
    squares = np.zeros((len(fragment.pieces), len(vectors)))
    for column, vector in enumerate(vectors):
        lanes = np.zeros((len(fragment.pieces), LANES))
        for number, chunk in enumerate(vector):
            offset, count = fragment.chunk(number, vector[0].count)
            pieces = _pieces(fragment, offset, count)
            if chunk.codec.coded:
                # Squared codes add up to a whole number, and scale**2 has 16 bits. Up to 2**23
                # elements the product is exact in float64, even if all codes are the largest of
                # int8. So every cut gives the same sum.
                squares[pieces, column] += chunk.square_sums()
            else:
                begun = _begun(fragment, offset, pieces)
                add_squares(read_only(chunk.floats()), chunk.bounds, begun, lanes[pieces])
        squares[:, column] += in_order(lanes)
    return np.sqrt(squares)


def weighted_sums(
    fragment: Fragment, vectors: Sequence[Vector], weights: F64, units: F64
) -> tuple[F32, F64, F64]:
    """Sums over the contributions to a fragment of n elements in k pieces.

    `weights` (M,) and `units` (k, M) are rounded to float32 once. A piece with a unit above 0 is
    radial. Returns the sum (n,) of unit * v in radial pieces and of weight * v in the others; and
    of the radial pieces the norms (k,) of that sum, and of the sum of weight * v, which is needed
    for its length alone.
    """
    assert units.shape == (len(fragment.pieces), len(vectors)) and len(weights) == len(vectors)
    factors = weights.astype(np.float32)
    rows = read_only(units.T.astype(np.float32))
    radial: NDArray[np.bool_] = read_only(np.asarray(units.any(axis=1)))
    mean_lanes = np.zeros((len(fragment.pieces), LANES))
    value_lanes = np.zeros((len(fragment.pieces), LANES))
    values = empty_f32(fragment.elements)
    mean = empty_f32(min(SLICE, fragment.elements))
    scratch = np.empty(SLICE, np.int8)
    # Nearly always all contributions are cut alike, and so share their spans.
    spans: dict[tuple[int, int], I64] = {}
    for first in range(0, fragment.elements, SLICE):
        count = min(SLICE, fragment.elements - first)
        own_values = values[first : first + count]
        own_mean = mean[:count]
        # They become 0 only now, so that they are in cache when the first product is added.
        own_values[:] = 0.0
        own_mean[:] = 0.0
        for column, vector in enumerate(vectors):
            _add(
                fragment,
                vector,
                first,
                radial=radial,
                weight=factors[column],
                units=rows[column],
                mean=own_mean,
                values=own_values,
                scratch=scratch,
                spans=spans,
            )
        touched = _pieces(fragment, first, count)
        if radial[touched].any():
            bounds = read_only(fragment.spans(first, count))
            begun = _begun(fragment, first, touched)
            add_squares(read_only(own_mean), bounds, begun, mean_lanes[touched])
            add_squares(read_only(own_values), bounds, begun, value_lanes[touched])
    return values, np.sqrt(in_order(value_lanes)), np.sqrt(in_order(mean_lanes))


def in_order(terms: F64) -> F64:
    """Sums (k,) of (k, M), column by column: numpy's own sum may go pairwise."""
    sums: F64 = np.add.accumulate(terms, axis=1)[:, -1]
    return sums


def _add(
    fragment: Fragment,
    vector: Vector,
    first: int,
    *,
    radial: NDArray[np.bool_],
    weight: np.float32,
    units: F32,
    mean: F32,
    values: F32,
    scratch: I8,
    spans: dict[tuple[int, int], I64],
) -> None:
    """Adds one contribution to the sums of the slice that begins at `first`, chunk by chunk.

    `radial` and `units` are (k,), those of all pieces. `mean` and `values` are the slice's own.
    `scratch` (SLICE,) holds codes meanwhile. `spans` keeps the bounds of the pieces between two
    elements for the next contribution.
    """
    end = first + values.size
    chunk_elements = vector[0].count
    for number in range(first // chunk_elements, -(-end // chunk_elements)):
        chunk = vector[number]
        offset, count = fragment.chunk(number, chunk_elements)
        start = max(first, offset)
        stop = min(end, offset + count)
        if (start, stop) not in spans:
            spans[start, stop] = read_only(fragment.spans(start, stop - start))
        codes: I8 | F32
        if chunk.codec.coded:
            codes = chunk.codes_of(start - offset, stop - offset, scratch)
        else:
            codes = read_only(chunk.floats(start - offset, stop - offset))
        pieces = _pieces(fragment, start, stop - start)
        before = fragment.pieces_of(offset, count).start
        place = slice(start - first, stop - first)
        accumulate(
            codes,
            spans[start, stop],
            chunk.scales[pieces.start - before : pieces.stop - before],
            radial[pieces],
            weight,
            units[pieces],
            mean[place],
            values[place],
        )


def _pieces(fragment: Fragment, offset: int, count: int) -> slice:
    """The pieces that `count` elements from `offset` touch."""
    touched = fragment.pieces_of(offset, count)
    return slice(touched.start, touched.stop)


def _begun(fragment: Fragment, offset: int, pieces: slice) -> I64:
    """Elements of each piece that lie before `offset`."""
    return read_only(np.maximum(offset - fragment.bounds[:-1][pieces], 0))


@kernel
def accumulate(
    codes: I8 | F32,
    bounds: I64,
    scales: F32,
    radial: NDArray[np.bool_],
    weight: np.float32,
    units: F32,
    mean: F32,
    values: F32,
) -> None:
    """Adds weight * v to mean (n,) in radial spans and to values (n,) in the others, and unit * v
    to values in radial ones, where v = scale * code.

    v is exact. The product is rounded, and then the sum, so no CPU may fuse the two. A factor of 0
    leaves its span untouched.
    """
    for span in range(scales.size):
        scale = scales[span]
        unit = units[span]
        here = slice(bounds[span], bounds[span + 1])
        part = codes[here]
        part_values = values[here]
        part_mean = mean[here] if radial[span] else part_values
        if unit != np.float32(0):
            for i in range(part.size):
                value = scale * np.float32(part[i])
                part_mean[i] += weight * value
                part_values[i] += unit * value
        elif weight != np.float32(0):
            for i in range(part.size):
                part_mean[i] += weight * (scale * np.float32(part[i]))


@kernel
def add_squares(values: F32, bounds: I64, begun: I64, lanes: F64) -> None:
    """Adds value**2 in float64 to the lanes (s, LANES) of its span.

    Element i of a piece goes to lane i mod LANES, in element order; `begun` (s,) elements of each
    piece came with earlier slices.
    """
    for span in range(begun.size):
        part = values[bounds[span] : bounds[span + 1]]
        own = lanes[span]
        # `head` elements lead on to lane 0, then come whole rows of lanes, then the rest.
        phase = begun[span] % LANES
        head = min(part.size, (LANES - phase) % LANES)
        for i in range(head):
            own[phase + i] += np.float64(part[i]) * np.float64(part[i])
        step = ROWS * LANES
        whole = head + (part.size - head) // step * step
        for start in range(head, whole, step):
            for lane in range(LANES):
                total = own[lane]
                # Some rows at once: to load and store a lane takes as long as several additions.
                for row in range(ROWS):
                    value = np.float64(part[start + row * LANES + lane])
                    total += value * value
                own[lane] = total
        for i in range(whole, part.size):
            own[(i - whole) % LANES] += np.float64(part[i]) * np.float64(part[i])
