"""raw32, f32-blosc2 and bf16: the values themselves, with all of their bits or the upper half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrows.proto.codec import blosc2_chunk, kernels
from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.chunk import DecodedChunk, bad_payload, check_size, not_finite
from narrows.proto.codec.kernels import (
    F32,
    I64,
    check_inputs,
    check_outputs,
    chunk_elements,
    read_only,
)
from narrows.proto.codec.scales import upper_halves
from narrows.proto.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """See codecs.Codec."""

    name: str
    item_bytes: int
    compressed: bool = False
    """Without loss, by Blosc2."""
    quantised: bool = False

    def __post_init__(self) -> None:
        assert self.item_bytes in (2, 4), self

    def payload_bytes_max(self, count: int, spans: int) -> int:
        header_bytes = blosc2_chunk.HEADER_BYTES if self.compressed and count else 0
        return count * self.item_bytes + header_bytes

    def encode(self, values: F32, bounds: I64, scales: F32, reconstructed: F32) -> bytes:
        count = chunk_elements(bounds)
        check_inputs(count, values=values)
        check_outputs(count, reconstructed=reconstructed)
        round_to_dtype(values, "float32" if self.item_bytes == 4 else "bfloat16", reconstructed)
        if not kernels.all_finite(reconstructed):
            raise not_finite(f"values to be sent as {self.name}")
        if self.compressed and values.size:
            payload = blosc2_chunk.compress(reconstructed)
        elif self.item_bytes == 4:
            payload = reconstructed.tobytes()
        else:
            payload = upper_halves(reconstructed).tobytes()
        # Paired with the check of `decode`: no receiver may refuse what we send.
        assert len(payload) <= self.payload_bytes_max(count, bounds.size - 1), len(payload)
        return payload

    def encode_push(
        self,
        base: F32,
        local: F32,
        residual: F32 | None,
        bounds: I64,
        scales: F32,
        next_residual: F32,
    ) -> bytes:
        values = base - local if residual is None else (base - local) + residual
        # `encode` leaves what the receiver will see in it; the difference is the next residual.
        payload = self.encode(values, bounds, scales, next_residual)
        np.subtract(values, next_residual, out=next_residual)
        return payload

    def encode_step(
        self, params: F32, published: F32, bounds: I64, scales: F32, advanced: F32
    ) -> bytes:
        # `encode` leaves the step as the receiver will see it, which is added in its very order.
        payload = self.encode(params - published, bounds, scales, advanced)
        kernels.add_nonzero(read_only(published), read_only(advanced), advanced)
        return payload

    def decode(self, payload: bytes | memoryview, bounds: I64) -> DecodedChunk:
        count, view = chunk_elements(bounds), memoryview(payload).cast("B")
        size_bytes = self.payload_bytes_max(count, bounds.size - 1)
        check_size(self.name, view, 0 if self.compressed else size_bytes, size_bytes)
        if self.compressed and count:
            codes: NDArray[np.generic] = blosc2_chunk.decompress(view, count)
        else:
            # A copy: the payload may lie at any address, and its memory belongs to the socket.
            kind = np.dtype(np.float32 if self.item_bytes == 4 else np.uint16)
            codes = np.frombuffer(view, kind).copy()
        scales = np.ones(bounds.size - 1, np.float32)
        chunk = DecodedChunk(self.name, read_only(bounds), read_only(scales), read_only(codes))
        if not kernels.all_finite(chunk.floats()):
            raise bad_payload(
                self.name, "value", "finite values", "nan or inf", ErrorCode.NOT_FINITE
            )
        return chunk
