"""Contributions for tests of the merge, and an independent slow twin of it in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from narrows.broker.merging.sums import DecodedVector
from narrows.proto.codec import F32, F64
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.codecs import codec, piece_scales
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import LayoutEntry, MergeRule


def one_fragment(*pieces: tuple[int, MergeRule]) -> Fragment:
    """A fragment with pieces of these sizes and merge rules."""
    layout = [LayoutEntry(f"t{i}", (n,), "float32", rule) for i, (n, rule) in enumerate(pieces)]
    (fragment,) = build_table(layout, 1)
    return fragment


def contribution(
    learner: str,
    fragment: Fragment,
    values: F32,
    *,
    codec_name: str = "raw32",
    chunk_elements: int = 1 << 16,
) -> DecodedVector:
    """`values` (n,) of a learner as the broker has them after decoding."""
    coder = codec(codec_name)
    scales = np.ones(len(fragment.pieces), np.float32)
    if coder.quantised:
        scales = piece_scales(values, fragment.bounds, 0.25)
    chunks: list[tuple[int, DecodedChunk]] = []
    for offset, count in fragment.chunks(chunk_elements):
        rows = fragment.pieces_of(offset, count)
        part, bounds = values[offset : offset + count], fragment.spans(offset, count)
        payload = coder.encode(part, bounds, scales[rows.start : rows.stop], np.empty_like(part))
        chunks.append((offset, coder.decode(payload, bounds)))
    return DecodedVector(learner, chunks)


def decoded(one: DecodedVector, fragment: Fragment) -> F32:
    """The values (n,) of a contribution as the codec carried them."""
    out = np.empty(fragment.elements, np.float32)
    for offset, chunk in one.chunks:
        chunk.values(out[offset : offset + chunk.count])
    return out


def slow_merge(
    vectors: Sequence[F32],
    weights: Sequence[float],
    fragment: Fragment,
    *,
    clip_ratio: float = 3.0,
    rule: str = "layout",
) -> F64:
    """The merge by its definition: clip every vector, then average them piece by piece."""
    result: list[F64] = []
    for piece in fragment.pieces:
        parts = [v[piece.offset : piece.offset + piece.count].astype(np.float64) for v in vectors]
        if clip_ratio:
            parts = slow_clip(parts, clip_ratio)
        is_radial = rule == "layout" and piece.rule == "rda"
        result.append((slow_radial if is_radial else slow_mean)(parts, weights))
    return np.concatenate(result)


def slow_clip(parts: list[F64], ratio: float) -> list[F64]:
    lengths = sorted(float(np.linalg.norm(part)) for part in parts if part.any())
    if len(lengths) < 3:
        return parts
    middle = len(lengths) // 2
    median = lengths[middle] if len(lengths) % 2 else (lengths[middle - 1] + lengths[middle]) / 2
    return [part * min(1.0, ratio * median / (float(np.linalg.norm(part)) or 1)) for part in parts]


def slow_mean(parts: list[F64], weights: Sequence[float]) -> F64:
    total = np.zeros_like(parts[0])
    for weight, part in zip(weights, parts, strict=True):
        total += weight * part
    return total


def slow_radial(parts: list[F64], weights: Sequence[float]) -> F64:
    """(sum w |v|) * phi(sum w phi(v)), phi(x) = x / |x|, with the cap; algorithm of App. D.2."""
    mean = slow_mean(parts, weights)
    lengths = [float(np.linalg.norm(part)) for part in parts]
    there = sum(length > 0 for length in lengths)
    if there < 2:
        return mean
    directions = [part / (length or 1) for part, length in zip(parts, lengths, strict=True)]
    direction = slow_mean(directions, weights)
    length = float(np.linalg.norm(direction))
    reach = sum(w for w, each in zip(weights, lengths, strict=True) if each > 0)
    if length <= 1e-6 * reach:
        return mean
    radius = sum(w * each for w, each in zip(weights, lengths, strict=True))
    return direction / length * min(radius, math.sqrt(there) * float(np.linalg.norm(mean)))
