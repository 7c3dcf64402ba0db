"""The global model: merge, publish, install, version 0 from chunks and from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from coding import add_values
from safetensors.numpy import save_file

from narrows.broker.config import BrokerConfig
from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.model import GlobalModel, version_zero
from narrows.broker.merging.policy import policy_of
from narrows.broker.storage.initial import read_initial
from narrows.proto.codec import F32
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.transfer import decode_chunk, digest_of, encode_fragment, values_of
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import build_table
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import LayoutEntry

Chunks = dict[int, tuple[int, DecodedChunk]]

LAYOUT = (
    LayoutEntry("embedding", (16, 8), "float32", "mean"),
    LayoutEntry("weight", (20, 20), "float32", "rda"),
)
TABLE = build_table(LAYOUT, 1)
PART = TABLE[0]
CONFIG = BrokerConfig()
POLICY = policy_of(CONFIG)


def vector(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(PART.elements).astype(np.float32)


def new_model(config: BrokerConfig = CONFIG) -> GlobalModel:
    return GlobalModel(config, TABLE, [version_zero(vector(0))])


def contributions(
    outer_grads: dict[str, F32], codec: str = "int4-zstd"
) -> tuple[list[Contribution], Chunks]:
    chunks: Chunks = {}
    contributed: list[Contribution] = []
    for name, values in sorted(outer_grads.items()):
        handles: list[int] = []
        for chunk in encode_fragment(
            PART, values, codec_name=codec, rho=0.5, chunk_elements=300,
            reconstructed=np.empty_like(values),
        ):  # fmt: skip
            handles.append(len(chunks))
            decoded = decode_chunk(PART, codec, chunk.offset, chunk.count, chunk.payload)
            chunks[len(chunks)] = (chunk.offset, decoded)
        contributed.append(Contribution(name, "0" * 32, 1, 1000, 10, tuple(handles)))
    return contributed, chunks


def test_a_learner_that_applies_the_publication_has_the_published_copy() -> None:
    model = new_model()
    held = model.fragments[0].published
    for version in (1, 2, 3):
        outcome = model.merge(
            0,
            version,
            *contributions({"a": vector(version), "b": vector(9)}),
            POLICY,
        )
        model.install(outcome)
        publication = model.publication(0, version)
        assert publication is not None
        codec = CONFIG.codec.publish
        step = values_of(
            PART,
            [
                (c.offset, decode_chunk(PART, codec, c.offset, c.count, c.payload))
                for c in publication.chunks
            ],
        )
        after = np.empty_like(held)
        add_values(held, step, after)
        held = after
        assert digest_of(held) == publication.digest == model.fragments[0].digest
        assert np.array_equal(held, model.fragments[0].published)


def test_a_merge_changes_nothing_until_it_is_installed() -> None:
    model = new_model()
    before = model.fragments[0]
    model.merge(0, 1, *contributions({"a": vector(1)}), POLICY)
    assert model.fragments[0] is before
    assert model.publication(0, 1) is None


def test_what_the_publication_drops_is_published_later() -> None:
    model = new_model()
    model.install(model.merge(0, 1, *contributions({"a": vector(1)}), POLICY))
    gap = np.abs(model.fragments[0].global_ - model.fragments[0].published).max()
    still = np.zeros(PART.elements, np.float32)
    for version in range(2, 12):
        model.install(model.merge(0, version, *contributions({"a": still}), POLICY))
    after = np.abs(model.fragments[0].global_ - model.fragments[0].published).max()
    assert 0 < after < gap


def test_only_the_last_publications_are_kept() -> None:
    model = new_model()
    for version in range(1, PUBLICATIONS_KEPT + 3):
        model.install(model.merge(0, version, *contributions({"a": vector(version)}), POLICY))
    assert model.publication(0, 2) is None
    assert model.publication(0, 3) is not None


def test_a_step_to_infinity_is_refused_and_changes_nothing() -> None:
    model = new_model(replace(CONFIG, outer=replace(CONFIG.outer, lr=10.0)))
    before = model.fragments[0]
    huge = np.full(PART.elements, -1e38, np.float32)
    with pytest.raises(FloatingPointError), np.errstate(over="ignore"):
        model.merge(0, 1, *contributions({"a": huge}, codec="raw32"), policy_of(model.config))
    assert model.fragments[0] is before


def test_version_zero_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "init.safetensors"
    tensors = {
        e.name: np.arange(e.shape[0] * e.shape[1], dtype=np.float32).reshape(e.shape)
        for e in LAYOUT
    }
    save_file(tensors, path)
    state = read_initial(path, LAYOUT, TABLE)[0]
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    np.testing.assert_array_equal(
        state.published,
        np.concatenate([flat[p.tensor][p.start : p.start + p.count] for p in PART.pieces]),
    )
    assert state.version == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {"embedding": np.zeros((16, 8), np.float32)},
        {"embedding": np.zeros((16, 8), np.float32), "weight": np.zeros((10, 40), np.float32)},
        {
            "embedding": np.zeros((16, 8), np.float32),
            "weight": np.full((20, 20), np.nan, np.float32),
        },
    ],
    ids=["missing", "another shape", "not finite"],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, F32]) -> None:
    path = tmp_path / "init.safetensors"
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="weight"):
        read_initial(path, LAYOUT, TABLE)
