"""Helpers for tests of codecs: short ways to write arrays, to encode, and to expect a refusal."""

from __future__ import annotations

import numpy as np
import pytest

from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.codecs import codec
from narrows.proto.codec.kernels import F32, I64, add_nonzero, read_only
from narrows.proto.errors import ErrorCode, RemoteProtocolError

QUANTISED = ("int8-zstd", "int4-zstd")
FLOATS = ("raw32", "f32-blosc2", "bf16")


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def bounds_of(*bounds: int) -> I64:
    return np.array(bounds, np.int64)


def encode(name: str, values: F32, bounds: I64, scales: F32) -> tuple[bytes, F32]:
    reconstructed = np.full_like(values, np.nan)
    return codec(name).encode(values, bounds, scales, reconstructed), reconstructed


def values_of(chunk: DecodedChunk) -> list[float]:
    out = np.full(chunk.count, np.nan, np.float32)
    chunk.values(out)
    return out.tolist()


def add_values(base: F32, values: F32, out: F32) -> None:
    """out = base + values as every receiver adds them; `out` may be one of the two."""
    add_nonzero(read_only(base), read_only(values), out)


def half(value: float) -> bytes:
    """A bfloat16 number, little-endian."""
    return (f32(value).view(np.uint32) >> 16).astype("<u2").tobytes()


def refused(name: str, payload: bytes, bounds: I64) -> ErrorCode:
    with pytest.raises(RemoteProtocolError) as caught:
        codec(name).decode(payload, bounds)
    assert len(str(caught.value)) < 1024
    return caught.value.code
