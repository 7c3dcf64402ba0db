"""Fragments for tests of codecs, and short ways to code them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest

from narrows.proto.codec import (
    F32,
    I64,
    DecodedChunk,
    EncodedChunk,
    PushChunk,
    decode_chunk,
    encode_push,
    encode_step,
)
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import CodecName

CODECS: tuple[CodecName, ...] = ("int4-zstd", "int8-zstd", "f32-blosc2")
CODED = CODECS[:2]
LIMIT = {"int4-zstd": 7, "int8-zstd": 127}


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def fragment_of(*lengths: int) -> Fragment:
    """A fragment whose pieces have these lengths."""
    offsets = [0, *accumulate(lengths)]
    pieces = zip(range(len(lengths)), lengths, offsets[:-1], strict=True)
    return Fragment(0, tuple(Piece(i, 0, n, at, "rda") for i, n, at in pieces), offsets[-1])


def same_bits(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()


def push(
    fragment: Fragment, one: F32, two: F32, codec: CodecName, rho: float, chunk_elements: int
) -> list[PushChunk]:
    """The push `one - two`."""
    return [*encode_push(fragment, one, two, codec=codec, rho=rho, chunk_elements=chunk_elements)]


def step(
    fragment: Fragment, one: F32, two: F32, codec: CodecName, rho: float, chunk_elements: int
) -> tuple[list[EncodedChunk], F32]:
    """The publication `two - one`, and the copy that follows `one`."""
    advanced = np.full_like(one, np.nan)
    chunks = encode_step(
        fragment, two, one,
        codec=codec, rho=rho, chunk_elements=chunk_elements, advanced=advanced,
    )  # fmt: skip
    return list(chunks), advanced


def decoded(
    fragment: Fragment, codec: CodecName, chunk_elements: int, chunks: Sequence[EncodedChunk]
) -> list[DecodedChunk]:
    return [
        decode_chunk(fragment, codec, chunk_elements, each.index, each.payload) for each in chunks
    ]


def refused(fragment: Fragment, codec: CodecName, payload: bytes) -> ErrorCode:
    """The code with which the payload of a fragment of one chunk is refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_chunk(fragment, codec, 1 << 20, 0, payload)
    assert len(str(caught.value)) < 1024
    return caught.value.code


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
