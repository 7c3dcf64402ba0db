"""int8-zstd and int4-zstd: whole multiples of a scale, entropy-coded.

Most codes of an outer gradient are small. The entropy coder turns that into bits saved, so the
step decides about the rate, not the width of a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codec import kernels, zstd_frame
from narrows.proto.codec.buffers import empty_f32, empty_u8
from narrows.proto.codec.chunk import DecodedChunk, bad_payload, check_size, not_finite
from narrows.proto.codec.kernels import (
    F32,
    I8,
    I64,
    U8,
    check_inputs,
    check_outputs,
    chunk_elements,
    read_only,
)
from narrows.proto.codec.scales import decode_scales, encode_scales
from narrows.proto.limits import CHUNK_ELEMENTS_MAX

ZEROS: Final = read_only(np.zeros(CHUNK_ELEMENTS_MAX, np.float32))
"""The addend where there is none."""


@dataclass(frozen=True, slots=True)
class QuantisedCodec:
    """See codecs.Codec."""

    name: str
    limit: int
    """Largest magnitude of a code."""
    packed: bool
    """Two codes share a byte."""
    quantised: bool = True

    def __post_init__(self) -> None:
        # A nibble holds -8 to 7, a byte -128 to 127; the lowest one has no positive twin.
        assert self.limit == (7 if self.packed else 127), self

    def payload_bytes_max(self, count: int, spans: int) -> int:
        assert count >= 0 and spans >= 0, f"{spans} spans of {count} elements"
        return 2 * spans + zstd_frame.frame_bytes_max(self._code_bytes(count)) if count else 0

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        count = chunk_elements(bounds)
        check_inputs(count, values=values)
        check_outputs(count, reconstructed=reconstructed)
        head = encode_scales(scales, bounds.size - 1)
        codes = empty_u8(count).view(np.int8)
        inputs = read_only(values), read_only(bounds), read_only(scales)
        self._check(kernels.quantise(*inputs, np.float32(self.limit), codes))
        kernels.scale_codes(read_only(codes), *inputs[1:], reconstructed)
        return self._payload(head, codes)

    def encode_push(
        self,
        base: F32,
        local: F32,
        residual: F32 | None,
        bounds: I64,
        scales: F32,
        next_residual: F32,
    ) -> bytes:
        # One kernel for both cases: an addend of zeros costs less than a second compiled loop.
        residual = ZEROS[: base.size] if residual is None else residual
        head, codes = self._difference(base, local, residual, bounds, scales, next_residual)
        return self._payload(head, codes)

    def encode_step(
        self, params: F32, published: F32, bounds: I64, scales: F32, advanced: F32
    ) -> bytes:
        zeros, rest = ZEROS[: params.size], empty_f32(params.size)
        check_outputs(params.size, advanced=advanced)
        head, codes = self._difference(params, published, zeros, bounds, scales, rest)
        inputs = read_only(published), read_only(codes), read_only(bounds), read_only(scales)
        kernels.add_codes(*inputs, advanced)
        return self._payload(head, codes)

    def payload(self, codes: I8, scales: F32) -> bytes:
        """The payload of codes (n,) that were made elsewhere, with the scales (s,) of their spans.

        The caller has made sure that all codes are within the limit: a GPU clamps them as it
        makes them, and to look again would read them once more.
        """
        return self._payload(encode_scales(scales, scales.size), codes)

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        count, spans, view = chunk_elements(bounds), bounds.size - 1, memoryview(payload).cast("B")
        check_size(self.name, view, 2 * spans, self.payload_bytes_max(count, spans))
        scales = decode_scales(view[: 2 * spans])
        size_bytes = self._code_bytes(count)
        body = zstd_frame.decompress(view[2 * spans :], size_bytes) if count else empty_u8(0)
        return DecodedChunk(self.name, read_only(bounds), scales, self._codes(body, count))

    def _difference(
        self, minuend: F32, subtrahend: F32, addend: F32, bounds: I64, scales: F32, rest: F32
    ) -> tuple[bytes, I8]:
        """The coded scales, and the codes."""
        count = chunk_elements(bounds)
        check_inputs(count, minuend=minuend, subtrahend=subtrahend, addend=addend)
        check_outputs(count, rest=rest)
        head = encode_scales(scales, bounds.size - 1)
        codes = empty_u8(count).view(np.int8)
        values = read_only(minuend), read_only(subtrahend), read_only(addend)
        spans = read_only(bounds), read_only(scales)
        limit = np.float32(self.limit)
        self._check(kernels.quantise_difference(*values, *spans, limit, codes, rest))
        return head, codes

    def _check(self, largest_bits: int) -> None:
        if largest_bits >= kernels.INFINITE_BITS:
            raise not_finite(f"values to be sent as {self.name}")

    def _payload(self, head: bytes, codes: I8) -> bytes:
        if not codes.size:
            return b""
        whole = codes.view(np.uint8)
        if self.packed:
            packed = empty_u8(self._code_bytes(codes.size))
            kernels.pack(read_only(whole), packed)
            whole = packed
        payload = head + zstd_frame.compress(whole)
        # Paired with the check of `decode`: no receiver may refuse what we send.
        assert len(payload) <= self.payload_bytes_max(codes.size, len(head) // 2), len(payload)
        return payload

    def _code_bytes(self, count: int) -> int:
        return (count + 1) // 2 if self.packed else count

    def _codes(self, body: U8, count: int) -> NDArray[np.generic]:
        """The codes in a decompressed body of the right size, checked."""
        assert body.size == self._code_bytes(count), f"{body.size} bytes for {count} codes"
        codes = body.view(np.int8)
        if self.packed:
            codes = empty_u8(count).view(np.int8)
            kernels.unpack(read_only(body), codes)
            if count % 2 and body[-1] >> 4:
                raise bad_payload(self.name, "unused nibble", "0", str(body[-1] >> 4))
        # -128 and -8 have no positive twin, so no encoder sends them.
        if count and int(codes.min()) < -self.limit:
            raise bad_payload(self.name, "code", f"codes from -{self.limit}", str(codes.min()))
        return read_only(body if self.packed else codes)
