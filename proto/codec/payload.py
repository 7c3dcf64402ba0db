"""The bytes of one chunk, and back. Hostile input stops here: peers wrote what a decoder reads.

A chunk is cut into spans at the bounds of the tensor pieces. Payloads, little-endian:

- A codec with codes: one bfloat16 scale per span, then one zstd frame (with content size) of the
  packed codes. The value of an element is scale * code. A scale is 0 or from 2**-100 to 2**100, so
  that this product and the encoder's are exact and finite in float32.
- `f32-blosc2`: float32 values as one Blosc2 chunk (see `_decode_blosc2`), all finite.

An entry of CODECS says all in which a codec differs from the others. Another one with codes is an
entry with its kernels, its name in `messages.CodecName` and PROTOCOL.md, and golden bytes.

A decoder trusts the bounds alone, which are local: they give the exact size of the content before
a byte of it is read. It raises RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import blosc2
import numpy as np
import zstandard
from numpy.typing import NDArray

from narrows.proto.codec import kernels
from narrows.proto.codec.kernels import F32, F64, I8, I64, RUN, U8, U16, fits, read_only
from narrows.proto.codec.memory import empty_f32, empty_u8
from narrows.proto.errors import ErrorCode, fault
from narrows.proto.messages import LOSSLESS, CodecName


@dataclass(frozen=True)
class Codec:
    """How the values of a chunk become its content, which travels compressed."""

    name: CodecName
    bits: int
    """Bits of an element in the content."""
    limit: int = 0
    """Largest magnitude of a code. -limit - 1 has no positive twin and is refused. 0: there are no
    codes, and the content is the float32 values."""

    # For codes of less than a byte an entry gives its kernels. Without them the codes are the
    # content, and nobody copies them.
    pack: Callable[[U8, U8], None] | None = None
    """Kernel (codes, packed): from a byte of two's complement per code. It packs each run of RUN
    codes by itself, the last one may be shorter, and bits behind the last code are 0."""
    unpack: Callable[[U8, I8], None] | None = None
    """Kernel (packed, codes), the inverse."""
    lowest: Callable[[U8], int] = lambda packed: int(packed.view(np.int8).min())
    """The smallest code, found without unpacking."""

    @property
    def coded(self) -> bool:
        """Whether the values are whole multiples of a scale."""
        return self.limit > 0

    def content_bytes(self, count: int) -> int:
        """Bytes of the content of `count` elements."""
        return -(-count * self.bits // 8)

    def content_of(self, codes: I8) -> U8:
        """The content for codes (n,), read-only; it may share their memory."""
        bytes_of_codes = read_only(codes).view(np.uint8)
        if self.pack is None:
            return bytes_of_codes
        packed = empty_u8(self.content_bytes(codes.size))
        self.pack(bytes_of_codes, packed)
        return read_only(packed)


CODECS: Final[dict[CodecName, Codec]] = {
    codec.name: codec
    for codec in (
        Codec(
            "int4-zstd",
            bits=4,
            limit=7,
            pack=kernels.pack_nibbles,
            unpack=kernels.unpack_nibbles,
            lowest=kernels.lowest_nibble,
        ),
        Codec("int8-zstd", bits=8, limit=127),
        Codec("f32-blosc2", bits=32),
    )
}
"""Every codec, in the order of `messages.CodecName`."""

SCALE_MIN: Final = 2.0**-100
"""Smallest scale but 0. Below it, products with codes could be subnormal, hence inexact."""

SCALE_MAX: Final = 2.0**100
"""Largest scale. 127 times it is finite, and no honest outer gradient comes near it."""

_SCALE_BITS_MIN: Final = 27 << 7
_SCALE_BITS_MAX: Final = 227 << 7
"""SCALE_MIN and SCALE_MAX as bfloat16 bit patterns."""

WINDOW_BYTES_MAX: Final = 8 << 20
"""Largest zstd window that is accepted; our own frames need no more than their content."""

LEVEL: Final = 1
"""zstd's level, in both kinds of payload. Higher ones are slower and gain nothing here;
levels below 0 leave the entropy coder out."""

_bad = partial(fault, code=ErrorCode.BAD_PAYLOAD)
_compress_blosc2 = cast(Callable[..., bytes], blosc2.compress2)
_decompress_blosc2 = cast(Callable[..., Any], blosc2.decompress2)

# Idle contexts. One serves one thread at a time, and making one costs as much as compressing ten
# thousand codes; pop and append of a list are atomic, so threads share them without a lock.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


@dataclass(frozen=True, eq=False, slots=True)
class DecodedChunk:
    """The checked content of a payload, as compact as it came: a broker holds many at once."""

    codec: Codec
    bounds: I64
    """(s + 1,) bounds of the spans, from 0 to `count`."""
    scales: F32
    """(s,); all 1 for a codec without codes."""
    content: U8 | F32
    """uint8 (codec.content_bytes(n),) packed codes, or float32 (n,). Read-only."""

    def __post_init__(self) -> None:
        assert self.scales.size == self.bounds.size - 1, f"{self.scales.size} scales"
        assert self.content.nbytes == self.codec.content_bytes(self.count), self.content.shape

    @property
    def count(self) -> int:
        """Elements of the chunk."""
        return int(self.bounds[-1])

    def values(self, out: F32) -> None:
        """out (n,) = the values, exact."""
        assert fits(out, self.count, writable=True), f"{out.dtype} {out.shape}"
        if self.codec.coded:
            out[:] = 0
            self.add_to(out, out)
        else:
            out[:] = self.floats()

    def add_to(self, base: F32, out: F32) -> None:
        """out (n,) = base + the values; where a value is 0, the bits of base. May be in place.

        The product scale * code is exact, so the sum is rounded once, with or without a fused
        multiply-add, and every machine gets the same bits.
        """
        assert fits(base, self.count), f"{base.dtype} {base.shape}"
        assert fits(out, self.count, writable=True), f"{out.dtype} {out.shape}"
        if self.codec.coded:
            codes = self._all_codes()
            kernels.add_codes(read_only(base), codes, self.bounds, self.scales, out)
        else:
            kernels.add_nonzero(read_only(base), self.floats(), out)

    def square_sums(self) -> F64:
        """(s,) sums of value**2 of the spans of codes, float64: exact, since each is an integer of
        at most 34 bits times scale**2."""
        integers = np.empty(self.scales.size, np.int64)
        kernels.code_square_sums(self._all_codes(), self.bounds, integers)
        return integers * self.scales.astype(np.float64) ** 2

    def codes_of(self, first: int, end: int, scratch: I8) -> I8:
        """The codes first..end, one byte each, read-only. They may lie in `scratch`.

        `first` is a multiple of RUN, because packed codes can be cut there only. So is `end`,
        unless it is `count`.
        """
        assert self.codec.coded, self.codec.name
        assert 0 <= first <= end <= self.count, f"{first} to {end} of {self.count}"
        assert first % RUN == 0 and (end % RUN == 0 or end == self.count), f"{first} to {end}"
        place = slice(self.codec.content_bytes(first), self.codec.content_bytes(end))
        packed = self.content.view(np.uint8)[place]
        if self.codec.unpack is None:
            return read_only(packed.view(np.int8))
        codes = scratch[: end - first]
        self.codec.unpack(packed, codes)
        return read_only(codes)

    def floats(self, first: int = 0, end: int | None = None) -> F32:
        """The values first..end of a chunk without codes, read-only."""
        assert not self.codec.coded, self.codec.name
        return self.content.view(np.float32)[first:end]

    def multiples(self) -> I8 | F32:
        """(n,), read-only: a value is its scale times this."""
        return self._all_codes() if self.codec.coded else self.floats()

    def _all_codes(self) -> I8:
        return self.codes_of(0, self.count, empty_u8(self.count).view(np.int8))


def payload_bytes_max(codec: Codec, count: int, spans: int) -> int:
    """Largest payload of `count` elements in `spans` spans, in bytes."""
    assert count > 0 and spans > 0, f"{spans} spans of {count} elements"
    size_bytes = codec.content_bytes(count)
    if not codec.coded:
        return size_bytes + _BLOSC2_HEADER.size
    # ZSTD_compressBound of zstd.h.
    margin = max(0, (128 << 10) - size_bytes) >> 11
    return 2 * spans + size_bytes + (size_bytes >> 8) + margin


def code_payload(codec: Codec, codes: I8, bounds: I64, scales: F32) -> tuple[bytes, DecodedChunk]:
    """The payload of codes (n,) within the codec's limit, and what its receiver will hold."""
    halves = (scales.view(np.uint32) >> np.uint32(16)).astype("<u2")
    # The decoder's check: no receiver may refuse what we send.
    assert bool(_valid(halves).all()) and np.array_equal(_widened(halves), scales), scales
    content = codec.content_of(codes)
    try:
        compressor = _compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=LEVEL)
    payload = halves.tobytes() + compressor.compress(content.data)
    _compressors.append(compressor)
    assert len(payload) <= payload_bytes_max(codec, codes.size, scales.size), len(payload)
    return payload, DecodedChunk(codec, read_only(bounds), read_only(scales), content)


def float_payload(values: F32, bounds: I64) -> tuple[bytes, DecodedChunk]:
    """The `f32-blosc2` payload of finite values (n,), and what its receiver will hold."""
    payload = _compress_blosc2(
        np.ascontiguousarray(values),
        codec=blosc2.Codec.ZSTD,
        clevel=LEVEL,
        filters=[blosc2.Filter.SHUFFLE],
        typesize=4,
        nthreads=1,
    )
    assert len(payload) <= payload_bytes_max(CODECS[LOSSLESS], values.size, 1), len(payload)
    return payload, _float_chunk(values, bounds)


def decode_payload(codec: Codec, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
    """The checked content of `payload`, which is not referred to afterwards.

    Raises RemoteProtocolError: TOO_LARGE beyond `payload_bytes_max`, NOT_FINITE for values and
    scales that are not finite, BAD_PAYLOAD for anything else that no encoder writes.
    """
    what = f"{codec.name} payload"
    count = int(bounds[-1])
    spans = bounds.size - 1
    view = memoryview(payload).cast("B")
    bytes_max = payload_bytes_max(codec, count, spans)
    if view.nbytes > bytes_max:
        raise fault(
            what, expected=f"at most {bytes_max} bytes", got=view.nbytes, code=ErrorCode.TOO_LARGE
        )
    if not codec.coded:
        return _float_chunk(_decode_blosc2(view, count), bounds)

    if view.nbytes < 2 * spans:
        raise _bad(what, expected=f"{spans} scales", got=f"{view.nbytes} bytes")
    halves = np.frombuffer(view[: 2 * spans], "<u2")
    wrong = halves[~_valid(halves)]
    if wrong.size:
        scale = _widened(wrong[:1])[0]
        code = ErrorCode.BAD_PAYLOAD if np.isfinite(scale) else ErrorCode.NOT_FINITE
        raise fault("scale", expected="0 or 2**-100 to 2**100", got=scale, code=code)

    content = _decompress_zstd(view[2 * spans :], codec.content_bytes(count))
    chunk = DecodedChunk(codec, read_only(bounds), read_only(_widened(halves)), content)
    lowest = codec.lowest(content)
    if lowest < -codec.limit:
        raise _bad(what, expected=f"codes from {-codec.limit}", got=lowest)
    if count * codec.bits % 8:
        # Unpacking skips the bits behind the last code, and packing makes them 0.
        run = (count - 1) // RUN * RUN
        codes = chunk.codes_of(run, count, np.empty(RUN, np.int8))
        if not np.array_equal(codec.content_of(codes), content[codec.content_bytes(run) :]):
            raise _bad(f"{what}: bits behind the last code", expected="0", got="1")
    return chunk


def _valid(halves: U16) -> NDArray[np.bool_]:
    # Bit patterns of positive floats have the order of integers. Those of negative numbers and of
    # NaN are larger, so two comparisons refuse everything wrong.
    in_range = (halves >= _SCALE_BITS_MIN) & (halves <= _SCALE_BITS_MAX)
    return cast(NDArray[np.bool_], in_range | (halves == 0))


def _widened(halves: U16) -> F32:
    """(n,) float32 values of bfloat16 bit patterns."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float_chunk(values: F32, bounds: I64) -> DecodedChunk:
    scales = read_only(np.ones(bounds.size - 1, np.float32))
    return DecodedChunk(CODECS[LOSSLESS], read_only(bounds), scales, read_only(values))


def _decompress_zstd(frame: memoryview, size_bytes: int) -> U8:
    """The content (size_bytes,) of one whole frame that declares this size, with nothing after it.

    The library allocates the size that a frame declares, whatever limit its caller gives, and 13
    bytes can ask for exabytes: so the header is compared before anything is decompressed.
    """
    try:
        head = zstandard.get_frame_parameters(frame)
        if head.content_size != size_bytes or head.window_size > WINDOW_BYTES_MAX:
            raise _bad(
                "zstd frame",
                expected=f"{size_bytes} bytes, window up to {WINDOW_BYTES_MAX}",
                got=f"{head.content_size}, {head.window_size}",
            )
        try:
            decompressor = _decompressors.pop()
        except IndexError:
            decompressor = zstandard.ZstdDecompressor()
        content = np.frombuffer(decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise _bad("zstd frame", expected="one whole frame", got=error) from None
    if content.size != size_bytes:
        raise _bad("zstd frame", expected=f"{size_bytes} bytes", got=content.size)
    # Only after success: a context that has met a damaged frame is not used again.
    _decompressors.append(decompressor)
    return content


_BLOSC2_HEADER: Final = struct.Struct("<4B3I15sB")
_BLOSC2_FLAGS: Final = frozenset((0x07, 0x85, 0x87, 0x95, 0x97))
_BLOSC2_FILTERS: Final = b"\1\0\0\0\0\0\5" + bytes(8)
_BLOSC2_ZEROS: Final = 0x10


def _decode_blosc2(chunk: memoryview, count: int) -> F32:
    """The finite values of a Blosc2 chunk.

    A hostile header can ask for any amount of memory, name plugins, and leave content unwritten, so
    that old memory shows. So the whole header must be as `float_payload` writes it:

    bytes 0, 1: the formats 5 and 1 · 2: coded or stored, blocks split or not · 3: 4 bytes an item ·
    4:8, 8:12, 12:16: bytes of content, of a block, of the chunk with this header · 16:31: shuffle,
    then zstd · 31: 0, or 0x10 for all zeros, and nothing follows the header.
    """
    if chunk.nbytes < _BLOSC2_HEADER.size:
        raise _bad(
            "Blosc2 chunk", expected=f"at least {_BLOSC2_HEADER.size} bytes", got=chunk.nbytes
        )
    header = _BLOSC2_HEADER.unpack_from(chunk)
    version, coder_version, flags, item_bytes, content, block, size, filters, special = header
    as_written = (
        (version, coder_version, item_bytes) == (5, 1, 4)
        and flags in _BLOSC2_FLAGS
        and content == 4 * count
        and 0 < block <= 4 * count
        and size == chunk.nbytes
        and filters == _BLOSC2_FILTERS
        and (special, size == _BLOSC2_HEADER.size) in ((0, False), (_BLOSC2_ZEROS, True))
    )
    if not as_written:
        raise _bad(
            "Blosc2 chunk",
            expected=f"{4 * count} bytes of shuffled float32, coded by zstd",
            got=bytes(chunk[: _BLOSC2_HEADER.size]).hex(),
        )
    values = empty_f32(count)
    try:
        # A copy: the library needs aligned bytes.
        _decompress_blosc2(bytes(chunk), dst=values, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise _bad("Blosc2 chunk", expected="content that decodes", got=error) from None
    if not kernels.all_finite(values):
        raise fault(
            f"{LOSSLESS} payload",
            expected="finite values",
            got="nan or inf",
            code=ErrorCode.NOT_FINITE,
        )
    return values
