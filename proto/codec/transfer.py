"""A fragment to encoded chunks and back: the code that both ends of a transfer share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from narrows.proto.codec.buffers import empty_f32
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.codecs import RMS_SAMPLES_MAX, codec, piece_scales
from narrows.proto.codec.kernels import F32, I64, NOTHING, sample_places
from narrows.proto.codec.scales import decode_scales
from narrows.proto.fragments import Fragment
from narrows.proto.frames import digest

STATE_CODEC = "f32-blosc2"
"""Codec of full states and of version 0, which travel without loss: they are nobody's difference,
so nothing would ever correct an error."""


@dataclass(frozen=True)
class EncodedChunk:
    """Elements [offset, offset + count) of a fragment as they travel."""

    offset: int
    count: int
    payload: bytes
    payload_digest: int


def error_ratio(
    fragment: Fragment, chunks: Iterable[EncodedChunk], residual_at: Callable[[I64], F32]
) -> float:
    """The squared error of quantised chunks, in units of the error that their steps explain.

    A step explains scale**2 / 12 per element. The ratio is about 1 as long as no value exceeds the
    range of the codes. It is computed from samples: `residual_at(places)` is the residual there.
    Where the residual is 0 there was nothing to send.
    """
    places, bounds = sample_places(fragment.bounds, RMS_SAMPLES_MAX)
    scales = np.zeros(len(fragment.pieces))
    for chunk in chunks:
        pieces = fragment.pieces_of(chunk.offset, chunk.count)
        head = memoryview(chunk.payload)[: 2 * (pieces.stop - pieces.start)]
        scales[pieces.start : pieces.stop] = decode_scales(head)
    sampled = np.diff(bounds)
    errors = residual_at(places).astype(np.float64) ** 2
    weights = np.repeat(np.diff(fragment.bounds) / sampled, sampled) * (errors > 0)
    explained = float(weights @ np.repeat(scales**2 / 12, sampled))
    ratio = float(weights @ errors) / max(explained, 1e-300)
    assert ratio >= 0, ratio
    return ratio


def digest_of(values: F32) -> int:
    """xxh3_64 of a vector's little-endian float32 bytes: the digest of a (fragment, version)."""
    assert values.ndim == 1, values.shape
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
    scales = piece_scales(values, fragment.bounds, rho) if scheme.quantised else None

    def encode(place: slice, bounds: I64, span_scales: F32) -> bytes:
        return scheme.encode(values[place], bounds, span_scales, reconstructed[place])

    yield from _chunks(fragment, chunk_elements, scales, encode)


def encode_push(
    fragment: Fragment,
    base: F32,
    local: F32,
    residual: F32 | None,
    *,
    codec_name: str,
    rho: float,
    chunk_elements: int,
    next_residual: F32,
) -> Iterator[EncodedChunk]:
    """Encodes the outer gradient (base - local) + residual, as `encode_fragment` does.

    `next_residual` (n,) gets the part that is not sent. It is true up to the chunk that was yielded
    last.
    """
    scheme = codec(codec_name)
    scales = None
    if scheme.quantised:
        addend = NOTHING if residual is None else residual
        scales = piece_scales(base, fragment.bounds, rho, subtrahend=local, addend=addend)

    def encode(place: slice, bounds: I64, span_scales: F32) -> bytes:
        carried = None if residual is None else residual[place]
        return scheme.encode_push(
            base[place], local[place], carried, bounds, span_scales, next_residual[place]
        )

    yield from _chunks(fragment, chunk_elements, scales, encode)


def encode_step(
    fragment: Fragment,
    params: F32,
    published: F32,
    *,
    codec_name: str,
    rho: float,
    chunk_elements: int,
    advanced: F32,
) -> Iterator[EncodedChunk]:
    """Encodes the publication params - published, as `encode_fragment` does.

    `advanced` (n,) gets the next published copy, bit for bit what `advance_copy` makes.
    """
    scheme = codec(codec_name)
    scales = None
    if scheme.quantised:
        scales = piece_scales(params, fragment.bounds, rho, subtrahend=published)

    def encode(place: slice, bounds: I64, span_scales: F32) -> bytes:
        return scheme.encode_step(
            params[place], published[place], bounds, span_scales, advanced[place]
        )

    yield from _chunks(fragment, chunk_elements, scales, encode)


def _chunks(
    fragment: Fragment,
    chunk_elements: int,
    scales: F32 | None,
    encode: Callable[[slice, I64, F32], bytes],
) -> Iterator[EncodedChunk]:
    """The chunks of a fragment; `encode` gets their place, the spans and the scales of these.

    A scale belongs to a piece, not to a chunk: chunks can be cut anew without another result.
    """
    pieces_max = len(fragment.pieces)
    assert scales is None or scales.shape == (pieces_max,), f"{pieces_max} pieces"
    encoded = 0
    for offset, count in fragment.chunks(chunk_elements):
        pieces = fragment.pieces_of(offset, count)
        span_scales = NOTHING if scales is None else scales[pieces.start : pieces.stop]
        place = slice(offset, offset + count)
        payload = encode(place, fragment.spans(offset, count), span_scales)
        encoded += count
        yield EncodedChunk(offset, count, payload, digest(payload))
    assert encoded == fragment.elements, f"{encoded} of {fragment.elements} elements"


def decode_chunk(
    fragment: Fragment, codec_name: str, offset: int, count: int, payload: bytes | memoryview
) -> DecodedChunk:
    """Checks and unpacks one chunk. Raises RemoteProtocolError if the payload is not valid."""
    return codec(codec_name).decode(payload, fragment.spans(offset, count))


def values_of(fragment: Fragment, chunks: Sequence[tuple[int, DecodedChunk]]) -> F32:
    """The decoded values of a complete set of (offset, chunk), shape (fragment.elements,)."""
    _check_complete(fragment, chunks)
    values = empty_f32(fragment.elements)
    for offset, chunk in chunks:
        chunk.values(values[offset : offset + chunk.count])
    return values


def advance_copy(fragment: Fragment, copy: F32, chunks: Sequence[tuple[int, DecodedChunk]]) -> F32:
    """The next published copy: the copy plus the step that a publication carries; a new array.

    A product of scale and code has at most 15 significant bits, so the sum is one correctly
    rounded operation and has the same bits everywhere.
    """
    assert copy.shape == (fragment.elements,), copy.shape
    _check_complete(fragment, chunks)
    advanced = empty_f32(fragment.elements)
    for offset, chunk in chunks:
        place = slice(offset, offset + chunk.count)
        chunk.add_to(copy[place], advanced[place])
    return advanced


def _check_complete(fragment: Fragment, chunks: Sequence[tuple[int, DecodedChunk]]) -> None:
    """Without every element once, uninitialised memory would pass for values."""
    elements = sum(chunk.count for _, chunk in chunks)
    assert elements == fragment.elements, f"{elements} of {fragment.elements} elements"
