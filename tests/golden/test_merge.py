"""The bits of a merge, stored, and compared with plain numpy: a journal is replayed with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from narrows.broker.config import load_config
from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.model import GlobalModel, version_zero
from narrows.broker.merging.policy import policy_of
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.weights import token_weights
from narrows.proto.codec.chunk import DecodedChunk, float_square_sums
from narrows.proto.codec.kernels import F32, F64
from narrows.proto.codec.transfer import decode_chunk, encode_fragment
from narrows.proto.config import override
from narrows.proto.fragments import build_table
from narrows.proto.messages import LayoutEntry

LAYOUT = (
    LayoutEntry("embedding", (37, 64), "float32", "mean"),
    LayoutEntry("hidden", (300, 257), "float32", "rda"),
    LayoutEntry("norm", (5,), "float32", "mean"),
    LayoutEntry("out", (64, 64), "float32", "rda"),
)
LEARNERS = 5
CONFIG = load_config(
    None,
    {
        "fragments.count": 1,
        "codec.chunk_elements": 20_000,
        "outer.lr": 0.7,
        "outer.momentum": 0.6,
        "merge.weights": "tokens",
        "merge.norm_limit": 0.0,
    },
)
TABLE = build_table(LAYOUT, 1)
PART = TABLE[0]


def awkward(seed: int) -> F32:
    """Values of many magnitudes, from integers alone: no library draws them."""
    index = np.arange(PART.elements, dtype=np.int64) + 7919 * seed
    whole = (index * 2_654_435_761 % (1 << 24) - (1 << 23)).astype(np.float32)
    values: F32 = whole * np.float32(2.0**-20) * np.exp2((index % 13 - 6).astype(np.float32))
    return values


def coded(values: F32) -> list[tuple[int, DecodedChunk]]:
    chunks = encode_fragment(
        PART, values, codec_name="int4-zstd", rho=0.5, chunk_elements=20_000,
        reconstructed=np.empty_like(values),
    )  # fmt: skip
    return [
        (c.offset, decode_chunk(PART, "int4-zstd", c.offset, c.count, c.payload)) for c in chunks
    ]


def round_of(version: int) -> tuple[list[Contribution], dict[int, tuple[int, DecodedChunk]]]:
    """Contributions of a version; the last learner is an outlier, whose norms are clipped."""
    contributed: list[Contribution] = []
    chunks: dict[int, tuple[int, DecodedChunk]] = {}
    for learner in range(LEARNERS):
        scale = np.float32(100.0 if learner == LEARNERS - 1 else 1.0)
        own = coded(scale * awkward(10 * version + learner))
        handles = tuple(range(len(chunks), len(chunks) + len(own)))
        chunks.update(zip(handles, own, strict=True))
        counts = 1000 + 100 * learner, 10 + learner
        contributed.append(Contribution(f"l{learner}", "0" * 32, 1, *counts, handles))
    return contributed, chunks


def digest_of_everything(norm_limit: float = 0.0, robust: str = "off") -> str:
    """Digest of global parameters, momentum, published copy and history after three merges."""
    hasher = xxhash.xxh3_128()
    config = override(CONFIG, {"merge.norm_limit": norm_limit, "merge.robust": robust})
    model = GlobalModel(config, TABLE, [version_zero(awkward(0))])
    for version in (1, 2, 3):
        model.install(model.merge(0, version, *round_of(version), policy_of(config)))
        state = model.fragments[0]
        for array in (state.global_, state.momentum, state.published):
            hasher.update(array.tobytes())
        if norm_limit:
            hasher.update(state.history.rounds[-1].norms.tobytes())
    return hasher.hexdigest()


def digests() -> list[str]:
    """The old rule first, then the history's with each average."""
    rules = [(0.0, "off"), (1.5, "off"), (1.5, "trimmed"), (1.5, "centered")]
    return [digest_of_everything(*rule) for rule in rules]


DIGESTS = [
    "73fd188b887abc80f671dd0cce590c4b",
    "f09473bcd1ee21aa4fb3d2fe178ed68f",
    "761ecbe0ce4cf3a7e80ecf20b9732536",
    "e51c5ea43e79dc8f2e6846454edeabac",
]


def test_this_cpu_computes_the_stored_bits() -> None:
    assert digests() == DIGESTS


def test_a_generic_cpu_computes_the_stored_bits(tmp_path: Path) -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    script = "import runpy, sys\nprint(runpy.run_path(sys.argv[1])['digests']())\n"
    done = subprocess.run(
        [sys.executable, "-c", script, __file__],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(DIGESTS)


def twin_merge(vectors: Sequence[F32], weights: Sequence[float], norms: NDArray[np.float64]) -> F32:
    """PROTOCOL.md's arithmetic in plain numpy: float32, one rounding at a time."""
    merged = np.zeros(PART.elements, np.float32)
    for row, piece in enumerate(PART.pieces):
        part = slice(piece.offset, piece.offset + piece.count)
        own = norms[row]
        limit = 3.0 * float(np.median(own[own >= 2.0**-100]))
        clips = [min(1.0, limit / norm) if norm > limit else 1.0 for norm in own]
        mean, direction = np.zeros(piece.count, np.float32), np.zeros(piece.count, np.float32)
        length = 0.0
        shares = 0.0
        for vector, weight, norm, clip in zip(vectors, weights, own, clips, strict=True):
            mean += np.float32(weight * clip) * vector[part]
            direction += np.float32(weight / norm) * vector[part]
            length += weight * clip * norm
            shares += weight / norm * norm
        merged[part] = mean
        if piece.rule == "rda":
            cap = np.sqrt(len(vectors)) * norm_of(mean)
            gain = np.float32(min(length, cap) / norm_of(direction))
            merged[part] = direction * gain
    return merged


def norm_of(values: F32) -> float:
    sums: F64 = float_square_sums(values, np.array([0, values.size]))
    return float(np.sqrt(sums[0]))


def test_a_merge_has_the_bits_of_its_twin() -> None:
    contributed, chunks = round_of(1)
    vectors: list[F32] = []
    for done in contributed:
        vector = np.empty(PART.elements, np.float32)
        for handle in done.handles:
            offset, chunk = chunks[handle]
            chunk.values(vector[offset : offset + chunk.count])
        vectors.append(vector)
    weights = token_weights([(d.tokens, d.steps) for d in contributed], rule="tokens")
    model = GlobalModel(CONFIG, TABLE, [version_zero(awkward(0))])
    outcome = model.merge(0, 1, contributed, chunks, policy_of(CONFIG))
    contributions = [DecodedVector(d.learner, [chunks[h] for h in d.handles]) for d in contributed]
    merged = merge_vectors(PART, contributions, weights)
    assert merged.clipped >= 3
    twin = twin_merge(vectors, weights, merged.norms)
    assert merged.outer_grad.tobytes() == twin.tobytes()
    # The first Nesterov step, from no momentum.
    rate, mu = np.float32(CONFIG.outer.lr), np.float32(CONFIG.outer.momentum)
    speed = np.float32(0) * mu + twin
    params = awkward(0) - (twin + speed * mu) * rate
    assert outcome.state.global_.tobytes() == params.tobytes()
    assert outcome.state.momentum.tobytes() == speed.tobytes()
