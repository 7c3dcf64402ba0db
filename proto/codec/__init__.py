"""Values to bytes and back: a fragment in regular chunks, with its scales and digests.

`kernels` has the loops, `memory` lends arrays, `payload` makes the bytes of one chunk, and this
module cuts a fragment into chunks. Decoders trust nothing in a payload: peers wrote it. Encoders
give the same bits on every machine, because both ends must hold the same published copy.

A scale belongs to a tensor piece, not to a chunk: so chunks can be cut anew without another
result. Every receiver of a publication adds the same exact products to the same published copy, and
holds the same bits. `chunks` and `decoded` are all DecodedChunks of a fragment, in order.

Encoders are generators, so that sending starts with the first chunk. Chunks are independent, and
kernels release the GIL. So whoever has threads gives their `spread`; the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from narrows.proto.codec import kernels
from narrows.proto.codec.kernels import (
    F32,
    F64,
    I8,
    I64,
    NOTHING,
    RUN,
    all_finite,
    fits,
    kernel,
    read_only,
    round_to_dtype,
    sample_places,
    uncached_advice,
)
from narrows.proto.codec.memory import empty_f32, empty_u8
from narrows.proto.codec.payload import (
    CODECS,
    SCALE_MAX,
    SCALE_MIN,
    DecodedChunk,
    code_payload,
    decode_payload,
    float_payload,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import BLOCK, Fragment, Piece
from narrows.proto.messages import LOSSLESS, CodecName
from narrows.proto.wire import digest

__all__ = [
    "CODECS", "F32", "F64", "I8", "I64", "RMS_SAMPLES_MAX", "RUN", "DecodedChunk", "EncodedChunk",
    "PushChunk", "Spread", "advance_copy", "all_finite", "assemble", "decode_chunk", "digest_of",
    "empty_f32", "encode_codes", "encode_push", "encode_step", "encode_values", "kernel",
    "piece_scales", "read_only", "recut", "round_to_dtype", "sample_places", "uncached_advice",
    "values_of", "warm_up",
]  # fmt: skip

Spread: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or one that shares the calls between threads: results in order, and the first error."""

NOWHERE: Final = np.empty(0, np.float32)
"""Stands for an output that nobody wants."""

RMS_SAMPLES_MAX: Final = 1 << 14
"""Elements of a piece from which its rms is computed, with a relative error of about one per cent.
To read all of them would take as long as the coding itself."""

PIECES: Final = 4
"""Pieces whose rms one thread computes at a time."""


@dataclass(frozen=True, eq=False)
class EncodedChunk:
    """Regular chunk `index` of a fragment as it travels."""

    index: int
    payload: bytes
    payload_digest: int


@dataclass(frozen=True, eq=False)
class PushChunk(EncodedChunk):
    """A chunk of a push. Its sender keeps what the receiver will hold: at most 1 byte an element,
    unless the push is lossless."""

    decoded: DecodedChunk


def piece_scales(
    minuend: F32, bounds: I64, rho: float, *, subtrahend: F32 = NOTHING, spread: Spread = map
) -> F32:
    """The scales (k,) of the pieces of minuend - subtrahend (n,): rho * rms, as bfloat16.

    `bounds` (k + 1,) cut the pieces. The rms is taken from at most RMS_SAMPLES_MAX elements of a
    piece (kernels.sampled_mean_squares); zeros do not count. A scale below 2**-100 is 0. Given only
    the samples and their bounds (`sample_places`), it gives the same scales, except for a piece
    whose samples are all 0: that one must be given whole.

    Raises LocalProtocolError NOT_FINITE if an rms is not finite or a scale exceeds 2**100.
    """
    assert rho > 0 and fits(minuend, int(bounds[-1])), f"rho {rho}, {minuend.shape}"
    assert subtrahend is NOTHING or fits(subtrahend, minuend.size), subtrahend.shape
    minuend, subtrahend, bounds = read_only(minuend), read_only(subtrahend), read_only(bounds)

    def sampled(first: int) -> F64:
        own = bounds[first : first + PIECES + 1]
        mean_squares = np.empty(own.size - 1, np.float64)
        kernels.sampled_mean_squares(minuend, subtrahend, own, RMS_SAMPLES_MAX, mean_squares)
        return mean_squares

    means = list(spread(sampled, range(0, bounds.size - 1, PIECES)))
    exact = rho * np.sqrt(np.concatenate(means))
    _check_finite(bool(np.all(exact <= SCALE_MAX)))
    scales = exact.astype(np.float32)
    round_to_dtype(scales, "bfloat16", scales)
    scales[scales < SCALE_MIN] = 0.0
    return read_only(scales)


def encode_push(
    fragment: Fragment,
    published: F32,
    local: F32,
    *,
    codec: CodecName,
    rho: float,
    chunk_elements: int,
    advanced: F32 = NOWHERE,
    spread: Spread = map,
) -> Iterator[PushChunk]:
    """The outer gradient published - local (n,), chunk by chunk.

    Values beyond the range of the codes are clamped: the rest stays in the learner's parameters.
    `advanced` (n,), if it is given, gets local + the coded values, chunk by chunk.
    Raises LocalProtocolError NOT_FINITE if a difference is not finite.
    """
    assert fits(published, fragment.elements) and fits(local, fragment.elements), published.shape
    coder = CODECS[codec]
    scales = NOTHING
    if coder.coded:
        scales = piece_scales(published, fragment.bounds, rho, subtrahend=local, spread=spread)

    def encode(cut: Cut) -> PushChunk:
        index, place, bounds, pieces = cut
        minuend = read_only(published[place])
        subtrahend = read_only(local[place])
        out = advanced[place]
        if coder.coded:
            codes = empty_u8(minuend.size).view(np.int8)
            own_scales = scales[pieces]
            largest = kernels.quantise_difference(
                minuend, subtrahend, bounds, own_scales, np.float32(coder.limit), codes, out
            )
            _check_finite(largest < kernels.INFINITE_BITS)
            return _sealed(index, code_payload(coder, codes, bounds, own_scales))
        with np.errstate(over="ignore", invalid="ignore"):  # The result is refused below.
            difference = minuend - subtrahend
        _check_finite(all_finite(difference))
        if out.size:
            kernels.add_nonzero(subtrahend, read_only(difference), out)
        return _sealed(index, float_payload(difference, bounds))

    yield from spread(encode, _cuts(fragment, chunk_elements))


def encode_step(
    fragment: Fragment,
    global_: F32,
    published: F32,
    *,
    codec: CodecName,
    rho: float,
    chunk_elements: int,
    advanced: F32,
) -> Iterator[EncodedChunk]:
    """The publication global_ - published (n,), chunk by chunk; raises as `encode_push`.

    `advanced` (n,) gets the next published copy, bit for bit what `advance_copy` makes.
    """
    assert fits(advanced, fragment.elements, writable=True), advanced.shape
    return _bare(
        encode_push(
            fragment,
            global_,
            published,
            codec=codec,
            rho=rho,
            chunk_elements=chunk_elements,
            advanced=advanced,
        )
    )


def encode_values(
    fragment: Fragment, values: F32, *, chunk_elements: int, spread: Spread = map
) -> Iterator[EncodedChunk]:
    """The values (n,) without loss, for STATE and SEED; raises as `encode_push`."""
    return _bare(_lossless(fragment, values, chunk_elements, spread))


def encode_codes(
    fragment: Fragment,
    codec: CodecName,
    scales: F32,
    codes: I8,
    chunk_elements: int,
    spread: Spread = map,
) -> Iterator[PushChunk]:
    """A push whose codes (n,) and scales of pieces (k,) a GPU has made.

    The caller has clamped the codes to the codec's limit: a check would read them once more.
    """
    coder = CODECS[codec]
    assert coder.coded and codes.shape == (fragment.elements,), f"{codec}, {codes.shape}"
    assert fits(scales, len(fragment.pieces)), scales.shape

    def encode(cut: Cut) -> PushChunk:
        index, place, bounds, pieces = cut
        return _sealed(index, code_payload(coder, codes[place], bounds, scales[pieces]))

    yield from spread(encode, _cuts(fragment, chunk_elements))


def recut(
    fragment: Fragment, decoded: Sequence[DecodedChunk], *, codec: CodecName, chunk_elements: int
) -> Iterator[PushChunk]:
    """The same values in chunks of another size. `decoded` are all chunks of a push, in order."""
    assert all(chunk.codec.name == codec for chunk in decoded), codec
    if not CODECS[codec].coded:
        yield from _lossless(fragment, values_of(fragment, decoded), chunk_elements, map)
        return
    codes = empty_u8(fragment.elements).view(np.int8)
    scales = np.empty(len(fragment.pieces), np.float32)
    for place, chunk in _places(fragment, decoded):
        touched = fragment.pieces_of(place.start, chunk.count)
        scales[touched.start : touched.stop] = chunk.scales
        codes[place] = chunk.codes_of(0, chunk.count, codes[place])
    yield from encode_codes(fragment, codec, scales, codes, chunk_elements)


def decode_chunk(
    fragment: Fragment,
    codec: CodecName,
    chunk_elements: int,
    index: int,
    payload: bytes | memoryview,
) -> DecodedChunk:
    """The checked content of regular chunk `index`. Raises RemoteProtocolError as `payload.decode`,
    and BAD_CHUNK for a chunk that the fragment does not have."""
    offset, count = fragment.chunk(index, chunk_elements)
    return decode_payload(CODECS[codec], payload, fragment.spans(offset, count))


def values_of(fragment: Fragment, chunks: Sequence[DecodedChunk]) -> F32:
    """The values (n,) of all chunks, in order; a new array."""
    values = empty_f32(fragment.elements)
    for place, chunk in _places(fragment, chunks):
        chunk.values(values[place])
    return values


def advance_copy(fragment: Fragment, copy: F32, chunks: Sequence[DecodedChunk]) -> F32:
    """The next published copy (n,): `copy` plus the step in all chunks, in order; a new array."""
    assert fits(copy, fragment.elements), copy.shape
    advanced = empty_f32(fragment.elements)
    for place, chunk in _places(fragment, chunks):
        chunk.add_to(copy[place], advanced[place])
    return advanced


def assemble(
    fragment: Fragment,
    previous: F32 | None,
    payloads: Sequence[tuple[CodecName, bytes]],
    *,
    chunk_elements: int,
    spread: Spread = map,
) -> tuple[F32, int]:
    """The published copy (n,) that all payloads of a transfer lead to, a new array, and its digest.

    `payloads` are those of all chunks, in order, each with its codec. They are added to `previous`
    (n,), the copy before; None: they are the copy. A chunk is added and its blocks are digested
    while it is in cache. Raises as `decode_chunk`.
    """
    assert len(payloads) == fragment.chunk_count(chunk_elements), f"{len(payloads)} chunks"
    values = empty_f32(fragment.elements)
    chunks = math.lcm(BLOCK, chunk_elements) // chunk_elements  # So many are whole blocks.

    def add(first: int) -> bytes:
        for index in range(first, min(first + chunks, len(payloads))):
            codec, payload = payloads[index]
            decoded = decode_chunk(fragment, codec, chunk_elements, index, payload)
            place = slice(index * chunk_elements, index * chunk_elements + decoded.count)
            if previous is None:
                decoded.values(values[place])
            else:
                decoded.add_to(previous[place], values[place])
        return _block_digests(values[first * chunk_elements : (first + chunks) * chunk_elements])

    blocks = b"".join(spread(add, range(0, len(payloads), chunks)))
    return values, digest(blocks)


def digest_of(values: F32) -> int:
    """The digest of a fragment's values (n,), in two levels: xxh3_64 over the xxh3_64 digests, 8
    bytes each, of the values of each block of BLOCK elements; all little-endian."""
    return digest(_block_digests(values))


def _block_digests(values: F32) -> bytes:
    flat = np.ascontiguousarray(values, dtype="<f4").data.cast("B")
    step = 4 * BLOCK
    blocks = [digest(flat[start : start + step]) for start in range(0, flat.nbytes, step)]
    return np.array(blocks, "<u8").tobytes()


def warm_up() -> None:
    """Compiles every kernel, or loads it from numba's cache, by coding a few elements.

    A process that starts others calls it first: they find the cache filled.
    """
    fragment = Fragment(0, (Piece(0, 0, 3, 0, "mean"),), 3)
    values = np.array([1.0, -2.0, 3.0], np.float32)
    for codec in CODECS:
        pushed = encode_push(fragment, values, -values, codec=codec, rho=0.5, chunk_elements=RUN)
        chunks = [decode_chunk(fragment, codec, RUN, each.index, each.payload) for each in pushed]
        values_of(fragment, chunks)
        advance_copy(fragment, values, chunks)
        if CODECS[codec].coded:
            chunks[0].square_sums()


def _lossless(
    fragment: Fragment, values: F32, chunk_elements: int, spread: Spread
) -> Iterator[PushChunk]:
    # A finite value minus 0 has the same bits. Zeros that are only read take no memory.
    return encode_push(
        fragment,
        values,
        np.zeros(fragment.elements, np.float32),
        codec=LOSSLESS,
        rho=0.0,
        chunk_elements=chunk_elements,
        spread=spread,
    )


def _sealed(index: int, coded: tuple[bytes, DecodedChunk]) -> PushChunk:
    payload, decoded = coded
    return PushChunk(index, payload, digest(payload), decoded)


def _bare(chunks: Iterator[PushChunk]) -> Iterator[EncodedChunk]:
    """Drops what the receivers hold: a broker keeps many publications, and never needs it."""
    for chunk in chunks:
        yield EncodedChunk(chunk.index, chunk.payload, chunk.payload_digest)


Cut: TypeAlias = tuple[int, slice, I64, slice]
"""A regular chunk: its index, its elements, the bounds of its spans, and the pieces that the spans
are parts of."""


def _cuts(fragment: Fragment, chunk_elements: int) -> Iterator[Cut]:
    """Every regular chunk, in order."""
    assert chunk_elements > 0, chunk_elements
    for index in range(fragment.chunk_count(chunk_elements)):
        offset, count = fragment.chunk(index, chunk_elements)
        touched = fragment.pieces_of(offset, count)
        place = slice(offset, offset + count)
        bounds = read_only(fragment.spans(offset, count))
        yield index, place, bounds, slice(touched.start, touched.stop)


def _places(
    fragment: Fragment, chunks: Sequence[DecodedChunk]
) -> Iterator[tuple[slice, DecodedChunk]]:
    elements = sum(chunk.count for chunk in chunks)
    # If chunks did not cover every element, uninitialised memory would pass for values.
    assert elements == fragment.elements, f"{elements} of {fragment.elements} elements"
    offset = 0
    for chunk in chunks:
        yield slice(offset, offset + chunk.count), chunk
        offset += chunk.count


def _check_finite(condition: bool) -> None:
    if not condition:
        raise LocalProtocolError(
            ErrorCode.NOT_FINITE,
            "values to be sent",
            expected="finite float32 values, and differences of at most 2**100",
            got="nan, inf or larger",
            remedy="training has diverged here, and nothing of it is sent: start this learner "
            "again, with a lower learning rate if it was not the data",
        )
