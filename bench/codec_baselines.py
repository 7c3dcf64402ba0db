"""What others would send: the same outer gradient through other quantisers and compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import blosc2  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import zstandard

from narrows.proto.kernels import F32
from narrows.proto.rounding import round_to_dtype
from narrows.proto.scales import upper_halves

BLOCK: Final = 256
LEVEL: Final = 1
BUCKETS: Final = 256
DEVIATIONS: Final = 6.0


@dataclass(frozen=True)
class Baseline:
    """A way to code values: bytes on the wire, and what the receiver would see."""

    name: str
    code: Callable[[F32], tuple[int, F32]]


def baselines() -> list[Baseline]:
    """Those that this environment can run."""
    found = [
        Baseline("zstd float32", lambda v: (_zstd(v.tobytes()), v)),
        Baseline("zstd bf16", lambda v: (_zstd(upper_halves(_bf16(v)).tobytes()), _bf16(v))),
        Baseline("blosc2 float32", lambda v: (_blosc(v, 4), v)),
        Baseline("blosc2 bf16", lambda v: (_blosc(upper_halves(_bf16(v)), 2), _bf16(v))),
        Baseline("absmax int8, by 256", lambda v: _absmax(v, 127)),
        Baseline("absmax int4, by 256", lambda v: _absmax(v, 7)),
        Baseline("uniform 8 bit (hivemind)", _uniform8),
    ]
    try:
        import torch
    except ImportError:
        return found
    found.append(Baseline("eager torch, our int4", _eager(torch)))
    return found


def _bf16(values: F32) -> F32:
    rounded = np.empty_like(values)
    round_to_dtype(values, "bfloat16", rounded)
    return rounded


def _zstd(content: Any) -> int:
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(content))


def _blosc(values: Any, item_bytes: int) -> int:
    compress: Any = getattr(blosc2, "compress2")  # noqa: B009
    packed: bytes = compress(
        values,
        typesize=item_bytes,
        codec=blosc2.Codec.ZSTD,
        clevel=LEVEL,
        filters=[blosc2.Filter.SHUFFLE],
        filters_meta=[0],
        nthreads=1,
    )
    return len(packed)


def _absmax(values: F32, limit: int) -> tuple[int, F32]:
    """One float32 scale per block, codes of fixed length, no entropy coder."""
    blocks = np.resize(values, (-(-values.size // BLOCK), BLOCK))
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(limit)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(blocks * inverse).astype(np.int8)
    bits = 8 if limit > 7 else 4
    sent = (codes * scales).reshape(-1)[: values.size].astype(np.float32)
    return values.size * bits // 8 + 4 * len(blocks), sent


def _uniform8(values: F32) -> tuple[int, F32]:
    """hivemind.compression.Uniform8BitQuantization: 256 even steps over +-3 deviations, and the
    mean of each step's members as its value."""
    offset = values.mean()
    scale = max(DEVIATIONS * values.std() / BUCKETS, np.finfo(np.float32).tiny)
    codes = np.clip(np.rint((values - offset) / scale) + BUCKETS // 2, 0, BUCKETS - 1)
    indices = codes.astype(np.uint8)
    sums = np.bincount(indices, weights=values, minlength=BUCKETS)
    counts = np.bincount(indices, minlength=BUCKETS)
    book = (sums / np.maximum(counts, 1)).astype(np.float32)
    return values.size + 4 * BUCKETS, book[indices]


def _eager(torch: Any) -> Callable[[F32], tuple[int, F32]]:
    """All that a push does, in eager torch: difference, residual, rms, codes, remainder, zstd."""
    carried: dict[int, Any] = {}

    def code(values: F32) -> tuple[int, F32]:
        base = torch.from_numpy(values)
        if base.numel() not in carried:
            carried[base.numel()] = torch.zeros_like(base), torch.zeros_like(base)
        local, residual = carried[base.numel()]
        outer_grad = (base - local) + residual
        scale = 0.5 * outer_grad.square().mean().sqrt().clamp(min=1e-30)
        codes = (outer_grad / scale).clamp(-7, 7).round().to(torch.int8)
        sent = codes * scale
        _remainder = outer_grad - sent
        padded = codes if codes.numel() % 2 == 0 else torch.nn.functional.pad(codes, (0, 1))
        half = padded.numel() // 2
        packed = (padded[:half] & 15) | (padded[half:] << 4)
        return _zstd(packed.numpy().tobytes()) + 2, sent.numpy()

    return code
