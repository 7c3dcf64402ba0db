"""Outer gradients and parameters to payload bytes and back, exactly and within known sizes.

A payload belongs to one chunk of a fragment. The chunk is cut into spans at the bounds of the
tensor pieces; a quantised codec has one scale per span. Payloads, little-endian throughout:

- `raw32`: float32 values.  `bf16`: bfloat16 values.  Both must be finite.
- `int8-zstd`, `int4-zstd`: one bfloat16 scale per span, then one zstd frame (with content size)
  of the codes: a byte each, -127..127, or packed in pairs, -7..7 (see kernels.pack).

A scale is 0 or from 2**-100 to 2**100, so that scale * code is exact and finite in float32.
An empty chunk has an empty payload. Decoders trust nothing but the bounds, which are local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from narrows.proto import kernels, zstd_frame
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from narrows.proto.kernels import F32, F64, I8, I64, U8, check_arrays, chunk_elements, read_only
from narrows.proto.messages import DtypeName
from narrows.proto.scales import (
    SCALE_MAX,
    SCALE_MIN,
    decode_scales,
    encode_scales,
    upper_halves,
    widened,
)

RMS_SAMPLES_MAX: Final = 1 << 14
"""Elements of a piece that its rms is taken from: a relative error of about one per cent."""

INFINITE_BITS: Final = 0x7F800000


class Codec(Protocol):
    """One way to put float32 values into bytes. Stateless; any number of threads may use it."""

    @property
    def name(self) -> str:
        """The name that is agreed at join and stands in every header."""
        ...

    @property
    def quantised(self) -> bool:
        """Whether `encode` uses the scales."""
        ...

    def payload_bytes_max(self, count: int, spans: int) -> int:
        """Largest payload of a chunk of `count` elements in `spans` spans, in bytes."""
        ...

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        """The payload of `values` (n,); `reconstructed` (n,) gets what the decoder will see.

        `bounds` (s + 1,) rises from 0 to n. `scales` (s,) come from `piece_scales`; they are
        ignored unless the codec is quantised. Values beyond the range of the codes are clamped:
        the rest is in values - reconstructed. Raises LocalProtocolError: NOT_FINITE if a value is
        not finite (as bfloat16, for bf16), MISUSE if the arrays do not fit together.
        """
        ...

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        """The chunk in `payload`, which is not referred to afterwards.

        Raises RemoteProtocolError: TOO_LARGE beyond payload_bytes_max, NOT_FINITE for values and
        scales that are not, BAD_PAYLOAD for anything else that no encoder writes.
        """
        ...


@dataclass(frozen=True, eq=False, slots=True)
class DecodedChunk:
    """The checked content of a payload, as compact as it came: scale * code is the value."""

    codec: str
    bounds: I64
    """(s + 1,), from 0 to `count`."""
    scales: F32
    """(s,); 1 for codecs that are not quantised."""
    codes: NDArray[np.generic]
    """int8 (n,), uint8 ((n + 1) // 2,) packed nibbles, uint16 (n,) bfloat16, or float32 (n,)."""

    @property
    def count(self) -> int:
        """Elements."""
        return int(self.bounds[-1])

    @property
    def nbytes(self) -> int:
        """Memory that the chunk holds, in bytes."""
        return self.bounds.nbytes + self.scales.nbytes + self.codes.nbytes

    def values(self, out: F32) -> None:
        """out (n,) = scale * code, exact: equal to the encoder's `reconstructed`."""
        check_arrays(self.count, out=out)
        if self.codes.itemsize == 1:
            kernels.scale_codes(self._whole_codes(), self.bounds, self.scales, out)
        else:
            out[:] = self._floats()

    def square_sums(self) -> F64:
        """(s,) sums of value**2 per span.

        Quantised: exact, the integer sum of code**2 times scale**2 (at most 34 + 16 bits).
        Otherwise float64, in element order.
        """
        if self.codes.itemsize == 1:
            integers = np.empty(self.scales.size, np.int64)
            kernels.code_square_sums(self._whole_codes(), self.bounds, integers)
            return integers * self.scales.astype(np.float64) ** 2
        sums = np.empty(self.scales.size, np.float64)
        kernels.float_square_sums(read_only(self._floats()), self.bounds, sums)
        return sums

    def _whole_codes(self) -> I8:
        """The codes (n,), one byte each."""
        if self.codes.dtype == np.int8:
            return self.codes.view(np.int8)
        whole = np.empty(self.count, np.int8)
        kernels.unpack(self.codes.view(np.uint8), whole)
        return read_only(whole)

    def _floats(self) -> F32:
        """The values (n,) of a codec that is not quantised."""
        if self.codes.dtype == np.float32:
            return self.codes.view(np.float32)
        return widened(self.codes.view(np.uint16))


@dataclass(frozen=True, slots=True)
class _FloatCodec:
    """raw32 and bf16: the values themselves, with all or the upper half of their bits."""

    name: str
    item_bytes: int
    quantised: bool = False

    def payload_bytes_max(self, count: int, spans: int) -> int:
        return count * self.item_bytes

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        check_arrays(chunk_elements(bounds), values=values, reconstructed=reconstructed)
        round_to_dtype(values, "float32" if self.item_bytes == 4 else "bfloat16", reconstructed)
        if not _all_finite(reconstructed):
            raise _not_finite(f"values to be sent as {self.name}")
        if self.item_bytes == 4:
            return reconstructed.tobytes()
        return upper_halves(reconstructed).tobytes()

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        size_bytes = self.payload_bytes_max(chunk_elements(bounds), bounds.size - 1)
        _check_size(self.name, memoryview(payload), size_bytes, size_bytes)
        # Copied: the payload may lie at any address and belongs to the socket.
        kind = np.dtype(np.float32 if self.item_bytes == 4 else np.uint16)
        codes = np.frombuffer(payload, kind).copy()
        scales = np.ones(bounds.size - 1, np.float32)
        chunk = DecodedChunk(self.name, read_only(bounds), read_only(scales), read_only(codes))
        if not _all_finite(chunk._floats()):  # pyright: ignore[reportPrivateUsage]
            raise _bad(self.name, "value", "finite values", "nan or inf", ErrorCode.NOT_FINITE)
        return chunk


@dataclass(frozen=True, slots=True)
class _QuantisedCodec:
    """int8-zstd and int4-zstd: whole multiples of a scale, entropy-coded."""

    name: str
    limit: int
    """Largest magnitude of a code."""
    packed: bool
    """Two codes share a byte."""
    quantised: bool = True

    def payload_bytes_max(self, count: int, spans: int) -> int:
        return 2 * spans + zstd_frame.frame_bytes_max(self._code_bytes(count)) if count else 0

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        count = chunk_elements(bounds)
        check_arrays(count, values=values, reconstructed=reconstructed)
        head = encode_scales(scales, bounds.size - 1)
        if not _all_finite(values):
            raise _not_finite(f"values to be sent as {self.name}")
        if count == 0:
            return b""
        codes = np.empty(count, np.int8)
        inputs = read_only(values), read_only(bounds), read_only(scales)
        kernels.quantise(*inputs, np.float32(self.limit), codes, reconstructed)
        return head + zstd_frame.compress(self._pack(codes))

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        count, spans, view = chunk_elements(bounds), bounds.size - 1, memoryview(payload).cast("B")
        _check_size(self.name, view, 2 * spans, self.payload_bytes_max(count, spans))
        scales = decode_scales(view[: 2 * spans])
        size_bytes = self._code_bytes(count)
        body = zstd_frame.decompress(view[2 * spans :], size_bytes) if count else b""
        return DecodedChunk(self.name, read_only(bounds), scales, self._codes(body, count))

    def _code_bytes(self, count: int) -> int:
        return (count + 1) // 2 if self.packed else count

    def _pack(self, codes: I8) -> U8:
        whole = codes.view(np.uint8)
        if not self.packed:
            return whole
        packed = np.empty(self._code_bytes(codes.size), np.uint8)
        kernels.pack(read_only(whole), packed)
        return packed

    def _codes(self, body: bytes, count: int) -> NDArray[np.generic]:
        """The codes in a decompressed body of the right size, checked."""
        if not self.packed:
            codes = np.frombuffer(body, np.int8)
            if count and int(codes.min()) < -self.limit:
                raise _bad(self.name, "code", f"codes from -{self.limit}", str(codes.min()))
            return codes
        packed = np.frombuffer(body, np.uint8)
        if kernels.has_lowest_nibble(packed):
            raise _bad(self.name, "code", f"codes from -{self.limit}", "-8")
        if count % 2 and packed[-1] >> 4:
            raise _bad(self.name, "unused nibble", "0", str(packed[-1] >> 4))
        return packed


_CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        _FloatCodec("raw32", item_bytes=4),
        _FloatCodec("bf16", item_bytes=2),
        _QuantisedCodec("int8-zstd", limit=127, packed=False),
        _QuantisedCodec("int4-zstd", limit=7, packed=True),
    )
}


def codec(name: str) -> Codec:
    """The codec of that name. Raises RemoteProtocolError UNKNOWN_CODEC."""
    if name not in _CODECS:
        known = f"one of {', '.join(_CODECS)}"
        raise RemoteProtocolError(
            ErrorCode.UNKNOWN_CODEC, "no such codec", expected=known, got=repr(name[:64])
        )
    return _CODECS[name]


def codec_names() -> tuple[str, ...]:
    """Names of all codecs, for the join."""
    return tuple(_CODECS)


def piece_scales(values: F32, bounds: I64, rho: float) -> F32:
    """Scales (k,) of the pieces that `bounds` (k + 1,) cuts `values` (n,) into: rho * rms.

    The rms is taken from a fixed subsample of at most RMS_SAMPLES_MAX elements of the piece
    (kernels.sampled_mean_squares), so a scale depends on the piece's length and values only.
    Rounded to bfloat16; below 2**-100 it is 0, and everything stays with the sender. Raises
    LocalProtocolError: NOT_FINITE if an rms is not finite or a scale exceeds 2**100.
    """
    check_arrays(chunk_elements(bounds), values=values)
    means = np.empty(bounds.size - 1, np.float64)
    kernels.sampled_mean_squares(read_only(values), read_only(bounds), RMS_SAMPLES_MAX, means)
    exact = rho * np.sqrt(means)
    if not np.all(exact <= SCALE_MAX):
        raise _not_finite("scale of an outer gradient")
    scales = np.empty(exact.size, np.float32)
    round_to_dtype(exact.astype(np.float32), "bfloat16", scales)
    scales[scales < SCALE_MIN] = 0.0
    return scales


def add_values(base: F32, values: F32, out: F32) -> None:
    """out (n,) = base + values in float32; where a value is 0, the bits of base. May be in place.

    With values = scale * code the product is exact, so the sum is rounded once, with or without a
    fused multiply-add: every machine gets the same bits. Source: DESIGN 6, "Reconstruction is
    exact"; the rule for 0 keeps -0.0, which -0.0 + 0.0 would not.
    """
    check_arrays(base.size, values=values, out=out)
    kernels.add_nonzero(read_only(base), read_only(values), out)


def round_to_dtype(values: F32, dtype: DtypeName, out: F32) -> None:
    """out (n,) = values rounded to `dtype` and back, half to even: what a parameter would hold.

    Values beyond the range become infinite, as in every such cast. May be in place.
    """
    check_arrays(values.size, out=out)
    if dtype == "bfloat16":
        kernels.round_bfloat16(read_only(values.view(np.uint32)), out.view(np.uint32))
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            out[:] = values.astype(np.float16)
    else:
        out[:] = values


def warm_up() -> None:
    """Compiles every kernel, or loads it from numba's cache, by coding a few elements.

    A process that starts others calls it first: they find the cache filled.
    """
    values, bounds = np.array([1.0, -2.0, 3.0], np.float32), np.array([0, 3], np.int64)
    out, scales = np.empty_like(values), piece_scales(values, bounds, 0.5)
    for each in _CODECS.values():
        chunk = each.decode(each.encode(values, bounds, scales, out), bounds)
        chunk.values(out)
        chunk.square_sums()
    add_values(values, values, out)


def _all_finite(values: F32) -> bool:
    return kernels.largest_bits(read_only(values.view(np.uint32))) < INFINITE_BITS


def _check_size(name: str, payload: memoryview, bytes_min: int, bytes_max: int) -> None:
    if not bytes_min <= payload.nbytes <= bytes_max:
        too_large = payload.nbytes > bytes_max
        code = ErrorCode.TOO_LARGE if too_large else ErrorCode.BAD_PAYLOAD
        raise _bad(name, "size", f"{bytes_min} to {bytes_max} bytes", str(payload.nbytes), code)


def _bad(
    name: str, what: str, expected: str, got: str, code: ErrorCode = ErrorCode.BAD_PAYLOAD
) -> RemoteProtocolError:
    return RemoteProtocolError(code, f"{name} payload: {what}", expected=expected, got=got)


def _not_finite(what: str) -> LocalProtocolError:
    return LocalProtocolError(
        ErrorCode.NOT_FINITE,
        f"{what}: not finite, or too large",
        remedy="training has diverged here; nothing was sent",
    )
