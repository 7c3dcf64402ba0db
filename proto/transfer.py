"""A fragment to encoded chunks and back: what both ends of a transfer share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codecs import DecodedChunk, add_values, codec, piece_scales
from narrows.proto.fragments import Fragment
from narrows.proto.frames import digest

F32: TypeAlias = NDArray[np.float32]

STATE_CODEC = "raw32"
"""Full states and version 0 travel without loss."""


@dataclass(frozen=True)
class EncodedChunk:
    """Elements [offset, offset + count) of a fragment as they travel."""

    offset: int
    count: int
    payload: bytes
    payload_digest: int


def digest_of(values: F32) -> int:
    """xxh3_64 of a vector's little-endian float32 bytes: the digest of a (fragment, version)."""
    return digest(np.ascontiguousarray(values, dtype="<f4").data.cast("B"))


def encode_fragment(
    fragment: Fragment,
    values: F32,
    *,
    codec_name: str,
    rho: float,
    chunk_elements: int,
    reconstructed: F32,
) -> Iterator[EncodedChunk]:
    """Encodes a fragment chunk by chunk, in order, so that sending can start at once.

    Shapes: values and reconstructed are (fragment.elements,). `reconstructed` is filled with
    exactly what the receiver decodes; it is complete when the iterator is exhausted.
    Raises LocalProtocolError NOT_FINITE if a value is not finite.
    """
    scheme = codec(codec_name)
    scales = np.zeros(0, np.float32)
    if scheme.quantised:
        scales = piece_scales(values, fragment.bounds, rho)
    for offset, count in fragment.chunks(chunk_elements):
        pieces = fragment.pieces_of(offset, count)
        span_scales = scales[pieces.start : pieces.stop] if scheme.quantised else scales
        stop = offset + count
        payload = scheme.encode(
            values[offset:stop],
            fragment.spans(offset, count),
            span_scales,
            reconstructed[offset:stop],
        )
        yield EncodedChunk(offset, count, payload, digest(payload))


def decode_chunk(
    fragment: Fragment, codec_name: str, offset: int, count: int, payload: bytes | memoryview
) -> DecodedChunk:
    """Checks and unpacks one chunk. Raises RemoteProtocolError if the payload is not valid."""
    return codec(codec_name).decode(payload, fragment.spans(offset, count))


def values_of(fragment: Fragment, chunks: Sequence[tuple[int, DecodedChunk]]) -> F32:
    """The decoded values of a complete set of (offset, chunk), shape (fragment.elements,)."""
    values = np.empty(fragment.elements, np.float32)
    for offset, chunk in chunks:
        chunk.values(values[offset : offset + chunk.count])
    return values


def advance_copy(fragment: Fragment, copy: F32, chunks: Sequence[tuple[int, DecodedChunk]]) -> F32:
    """The next published copy: copy + what a publication carries, a new array.

    Exact: a product of scale and code has at most 15 significant bits, so the sum is one
    correctly rounded operation and has the same bits everywhere (DESIGN, numbers on the wire).
    """
    values = values_of(fragment, chunks)
    add_values(copy, values, values)
    return values
