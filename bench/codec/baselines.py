"""Messages that others would send: the same outer gradient through other quantisers and
compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import blosc2
import numpy as np
import zstandard

from narrows.proto.codec import F32, blosc2_chunk, round_to_dtype, upper_halves, widened

BLOCK: Final = 256
LEVEL: Final = 1
BUCKETS: Final = 256
DEVIATIONS: Final = 6.0


@dataclass(frozen=True)
class CodecBaseline:
    """A way to code values (n,) float32 to a message and back."""

    name: str
    encode: Callable[[F32], Any]
    decode: Callable[[Any], F32]
    """The values that the receiver gets; not part of the time to encode."""
    size_bytes: Callable[[Any], int] = len
    """Bytes of the message on the wire."""


def baselines() -> list[CodecBaseline]:
    """The baselines that this environment can run."""
    available = [
        CodecBaseline("zstd float32", lambda v: _zstd(v.data), _float32),
        CodecBaseline("zstd bf16", lambda v: _zstd(_bf16(v).data), _of_bf16),
        CodecBaseline("blosc2 float32", blosc2_chunk.compress, _blosc2_float32),
        CodecBaseline("blosc2 bf16", lambda v: _blosc2(_bf16(v)), _blosc2_bf16),
        CodecBaseline("absmax int8, by 256", partial(_absmax, 127), _of_absmax, _absmax_bytes),
        CodecBaseline("absmax int4, by 256", partial(_absmax, 7), _of_absmax, _absmax_bytes),
        CodecBaseline("uniform 8 bit, numpy", _uniform8, lambda m: m[1][m[0]], _uniform8_bytes),
    ]
    for optional in (_eager_torch, _hivemind, _torchao):
        try:
            available += optional()
        except ImportError:
            continue
    return available


def _zstd(content: Any) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(content)


def _float32(message: bytes) -> F32:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(message), np.float32)


def _bf16(values: F32) -> Any:
    rounded = np.empty_like(values)
    round_to_dtype(values, "bfloat16", rounded)
    return upper_halves(rounded)


def _of_bf16(message: bytes) -> F32:
    return widened(np.frombuffer(zstandard.ZstdDecompressor().decompress(message), np.uint16))


def _blosc2(halves: Any) -> bytes:
    compress: Any = getattr(blosc2, "compress2")  # noqa: B009
    packed: bytes = compress(
        halves, typesize=2, codec=blosc2.Codec.ZSTD, clevel=LEVEL,
        filters=[blosc2.Filter.SHUFFLE], filters_meta=[0], nthreads=1,
    )  # fmt: skip
    return packed


def _blosc2_bf16(message: bytes) -> F32:
    decompress: Any = getattr(blosc2, "decompress2")  # noqa: B009
    return widened(np.frombuffer(decompress(message), np.uint16))


def _blosc2_float32(message: bytes) -> F32:
    count = int.from_bytes(message[4:8], "little") // blosc2_chunk.ITEM_BYTES
    return blosc2_chunk.decompress(memoryview(message), count)


def _absmax(limit: int, values: F32) -> tuple[Any, Any, int, int]:
    """One float32 scale per block, codes of fixed length, no entropy coder."""
    blocks = np.resize(values, (-(-values.size // BLOCK), BLOCK))
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(limit)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(blocks * inverse).astype(np.int8), scales, values.size, limit


def _of_absmax(message: tuple[Any, Any, int, int]) -> F32:
    codes, scales, count, _ = message
    sent: F32 = (codes * scales).reshape(-1)[:count].astype(np.float32)
    return sent


def _absmax_bytes(message: tuple[Any, Any, int, int]) -> int:
    _, scales, count, limit = message
    bits = 8 if limit > 7 else 4
    return count * bits // 8 + 4 * int(scales.size)


def _uniform8(values: F32) -> tuple[Any, F32]:
    """The algorithm of hivemind.compression.Uniform8BitQuantization: 256 even steps over +-3
    standard deviations; the value of a step is the mean of its members."""
    offset = values.mean()
    scale = max(DEVIATIONS * values.std() / BUCKETS, np.finfo(np.float32).tiny)
    codes = np.clip(np.rint((values - offset) / scale) + BUCKETS // 2, 0, BUCKETS - 1)
    indices = codes.astype(np.uint8)
    sums = np.bincount(indices, weights=values, minlength=BUCKETS)
    counts = np.bincount(indices, minlength=BUCKETS)
    return indices, (sums / np.maximum(counts, 1)).astype(np.float32)


def _uniform8_bytes(message: tuple[Any, F32]) -> int:
    return int(message[0].size) + 4 * BUCKETS


def _eager_torch() -> list[CodecBaseline]:
    """The whole work of a push in eager torch: difference, residual, rms, codes, residual, zstd."""
    import torch

    carried: dict[int, Any] = {}

    def encode(values: F32) -> tuple[bytes, Any]:
        base: Any = torch.from_numpy(values)
        if base.numel() not in carried:
            carried[base.numel()] = torch.zeros_like(base), torch.zeros_like(base)
        local, residual = carried[base.numel()]
        outer_grad = (base - local) + residual
        scale = 0.5 * outer_grad.square().mean().sqrt().clamp(min=1e-30)
        codes = (outer_grad / scale).clamp(-7, 7).round().to(torch.int8)
        sent = codes * scale
        _residual = outer_grad - sent
        padded = codes if codes.numel() % 2 == 0 else torch.nn.functional.pad(codes, (0, 1))
        half = padded.numel() // 2
        packed = (padded[:half] & 15) | (padded[half:] << 4)
        return _zstd(packed.numpy().data), sent

    return [
        CodecBaseline(
            "eager torch, our int4", encode, lambda m: m[1].numpy(), lambda m: len(m[0]) + 2
        )
    ]


def _hivemind() -> list[CodecBaseline]:
    """hivemind's own compressors, if it is installed."""
    import torch

    rules: Any = import_module("hivemind.compression")

    def named(name: str, rule: Any) -> CodecBaseline:
        return CodecBaseline(
            f"hivemind {name}",
            lambda v: rule.compress(torch.from_numpy(v)),
            lambda m: rule.extract(m).numpy(),
            lambda m: int(m.ByteSize()),
        )

    return [
        named("uniform 8 bit", rules.Uniform8BitQuantization()),
        named("fp16", rules.Float16Compression()),
    ]


def _torchao() -> list[CodecBaseline]:
    """torchao's quantisers by block of 256, if it is installed."""
    import torch

    q: Any = import_module("torchao.quantization.quant_primitives")

    def encode(values: F32) -> tuple[Any, Any, Any]:
        x: Any = torch.from_numpy(values)[None]
        scale, zero = q.choose_qparams_affine(
            x, q.MappingType.SYMMETRIC, (1, BLOCK), torch.int8, quant_min=-7, quant_max=7
        )
        codes = q.quantize_affine(x, (1, BLOCK), scale, zero, torch.int8, -7, 7)
        return codes, scale, zero

    def decode(message: tuple[Any, Any, Any]) -> F32:
        values = q.dequantize_affine(
            message[0], (1, BLOCK), message[1], message[2], torch.int8, -7, 7
        )
        sent: F32 = values[0].numpy()
        return sent

    def size_bytes(message: tuple[Any, Any, Any]) -> int:
        return int(message[0].numel()) // 2 + 4 * int(message[1].numel())

    return [CodecBaseline("torchao int4, by 256", encode, decode, size_bytes)]
