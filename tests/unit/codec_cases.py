"""Codecs, fragments and sums that tests of codecs, of the layout and of merging share."""

from __future__ import annotations

from itertools import accumulate, pairwise

from narrows.proto.codec import F32, I64
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import CodecName

CODECS: tuple[CodecName, ...] = ("int4-zstd", "int8-zstd", "f32-blosc2")


def fragment_of(*lengths: int) -> Fragment:
    """A fragment whose pieces have these lengths."""
    offsets = [0, *accumulate(lengths)]
    pieces = zip(range(len(lengths)), lengths, offsets[:-1], strict=True)
    return Fragment(0, tuple(Piece(i, 0, n, at, "rda") for i, n, at in pieces), offsets[-1])


def lane_square_sums(values: F32, bounds: I64) -> list[float]:
    """(s,) sums of value**2 of the spans in float64. Those of codes are exact, whatever the order;
    for floats element i of a span is added to lane i mod 16, and then the lanes in order."""
    sums = []
    for first, end in pairwise(bounds):
        lanes = [0.0] * 16
        for index, value in enumerate(values[first:end].tolist()):
            lanes[index % 16] += value * value
        sums.append(sum(lanes, 0.0))
    return sums
