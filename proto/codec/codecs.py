"""Outer gradients and parameters to payload bytes and back, exactly and within known sizes.

A payload belongs to one chunk of a fragment. The chunk is cut into spans at the bounds of the
tensor pieces; a quantised codec has one scale per span. Payloads, little-endian throughout:

- `raw32`: float32 values.  `bf16`: bfloat16 values.  `f32-blosc2`: float32 values as one Blosc2
  chunk (see blosc2_chunk).  All must be finite.
- `int8-zstd`, `int4-zstd`: one bfloat16 scale per span, then one zstd frame (with content size)
  of the codes: a byte each, -127..127, or packed in pairs, -7..7 (see kernels.pack).

A scale is 0 or from 2**-100 to 2**100, so that scale * code is exact and finite in float32.
An empty chunk has an empty payload. Decoders trust only the bounds, which are local.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from narrows.proto.codec import kernels
from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.chunk import DecodedChunk, not_finite
from narrows.proto.codec.floats import FloatCodec
from narrows.proto.codec.kernels import F32, I64, NOTHING, check_inputs, chunk_elements, read_only
from narrows.proto.codec.quantised import QuantisedCodec
from narrows.proto.codec.scales import SCALE_MAX, SCALE_MIN
from narrows.proto.errors import ErrorCode, RemoteProtocolError

RMS_SAMPLES_MAX: Final = 1 << 14
"""Elements of a piece from which its rms is computed, with a relative error of about one per cent.
All elements would take as long as the coding itself."""


class Codec(Protocol):
    """A coding of float32 values as bytes. Stateless; any number of threads may use it."""

    @property
    def name(self) -> str:
        """The name on which peers agree at join, and which stands in every header."""
        ...

    @property
    def quantised(self) -> bool:
        """Whether `encode` uses the scales."""
        ...

    def payload_bytes_max(self, count: int, spans: int) -> int:
        """Largest payload of a chunk of `count` elements in `spans` spans, in bytes."""
        ...

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        """The payload of `values` (n,); `reconstructed` (n,) gets the values that a decoder sees.

        `bounds` (s + 1,) rises from 0 to n. `scales` (s,) come from `piece_scales`; they are
        ignored unless the codec is quantised. Values beyond the range of the codes are clamped:
        the rest is in values - reconstructed. Raises LocalProtocolError: NOT_FINITE if a value is
        not finite (as bfloat16, for bf16), MISUSE if the arrays do not fit together.
        """
        ...

    def encode_push(
        self,
        base: F32,
        local: F32,
        residual: F32 | None,
        bounds: I64,
        scales: F32,
        next_residual: F32,
    ) -> bytes:
        """The payload of (base - local) + residual; `next_residual` gets the part that is not sent.

        All (n,), float32, one rounding per operation; errors as for `encode`.
        """
        ...

    def encode_step(
        self, params: F32, published: F32, bounds: I64, scales: F32, advanced: F32
    ) -> bytes:
        """The payload of params - published; `advanced` gets the next published copy.

        It has the very bits that `DecodedChunk.add_to` gives. All (n,); errors as for `encode`.
        """
        ...

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        """The chunk in `payload`, which is not referred to afterwards.

        Raises RemoteProtocolError: TOO_LARGE beyond payload_bytes_max, NOT_FINITE for values and
        scales that are not, BAD_PAYLOAD for anything else that no encoder writes.
        """
        ...


_CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        FloatCodec("raw32", item_bytes=4),
        FloatCodec("f32-blosc2", item_bytes=4, compressed=True),
        FloatCodec("bf16", item_bytes=2),
        QuantisedCodec("int8-zstd", limit=127, packed=False),
        QuantisedCodec("int4-zstd", limit=7, packed=True),
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


def piece_scales(
    minuend: F32,
    bounds: I64,
    rho: float,
    *,
    subtrahend: F32 = NOTHING,
    addend: F32 = NOTHING,
) -> F32:
    """Scales (k,) of the pieces that `bounds` (k + 1,) cut the values (n,) into: rho * rms.

    The values are (minuend - subtrahend) + addend, where the latter two are given. The rms is
    taken from a fixed subsample of at most RMS_SAMPLES_MAX elements of the piece
    (kernels.sampled_mean_squares), so a scale depends on the piece's length and values only; zeros
    do not count.
    Rounded to bfloat16; below 2**-100 it is 0, and everything stays with the sender. Raises
    LocalProtocolError: NOT_FINITE if an rms is not finite or a scale exceeds 2**100.
    """
    assert rho > 0, rho
    count = chunk_elements(bounds)
    values = {"minuend": minuend, "subtrahend": subtrahend, "addend": addend}
    check_inputs(count, **{k: v for k, v in values.items() if v is not NOTHING})
    means = np.empty(bounds.size - 1, np.float64)
    sources = read_only(minuend), read_only(subtrahend), read_only(addend)
    kernels.sampled_mean_squares(*sources, read_only(bounds), RMS_SAMPLES_MAX, means)
    exact = rho * np.sqrt(means)
    if not np.all(exact <= SCALE_MAX):
        raise not_finite("scale of an outer gradient")
    scales = np.empty(exact.size, np.float32)
    round_to_dtype(exact.astype(np.float32), "bfloat16", scales)
    scales[scales < SCALE_MIN] = 0.0
    assert scales.size == bounds.size - 1, scales.shape
    return scales


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
        each.encode_push(values, values, None, bounds, scales, out)
        each.encode_step(values, values, bounds, scales, out)
