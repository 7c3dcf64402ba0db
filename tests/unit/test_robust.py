"""The robust averages beside plain numpy, and what a liar can do to them."""

from __future__ import annotations

import numpy as np
import pytest
from merge_cases import contribution, decoded, one_fragment

from narrows.broker.merging.history import EMPTY
from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.robust import BLOCK, NETWORK_MAX, trimmed
from narrows.broker.merging.sums import DecodedVector, dots
from narrows.proto.codec import F32

MIXED = one_fragment((300, "rda"), (7, "mean"), (1200, "rda"), (BLOCK, "mean"), (64, "mean"))


def vectors(count: int, seed: int) -> list[F32]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=MIXED.elements).astype(np.float32) for _ in range(count)]


def named(found: list[F32], codec_name: str, chunk_elements: int = 1 << 16) -> list[DecodedVector]:
    return [
        contribution(
            f"{i:03d}", MIXED, each, codec_name=codec_name, chunk_elements=chunk_elements + 256 * i
        )
        for i, each in enumerate(found)
    ]


@pytest.mark.parametrize("codec_name", ["raw32", "int4-zstd", "int8-zstd"])
@pytest.mark.parametrize("count", [3, 4, 8])
def test_the_trimmed_mean_has_the_bits_of_its_twin(codec_name: str, count: int) -> None:
    ones = named(vectors(count, count), codec_name, chunk_elements=512)
    found = merge_vectors(MIXED, ones, [1 / count] * count, clip_ratio=0, robust="trimmed")
    drop = trimmed(count)
    kept = np.sort(np.stack([decoded(one, MIXED) for one in ones]), axis=0)[drop : count - drop]
    total = np.zeros(MIXED.elements, np.float32)
    for row in kept:
        total += row
    twin = total * np.float32(1.0 / (count - 2 * drop))
    assert found.outer_grad.tobytes() == twin.tobytes()


def test_many_contributors_are_sorted_another_way_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones = named(vectors(5, 1), "raw32")
    shares = [0.2] * 5
    first = merge_vectors(MIXED, ones, shares, robust="trimmed").outer_grad
    monkeypatch.setattr("narrows.broker.merging.robust.NETWORK_MAX", 2)
    assert NETWORK_MAX > 5
    assert merge_vectors(MIXED, ones, shares, robust="trimmed").outer_grad.tobytes() == (
        first.tobytes()
    )


@pytest.mark.parametrize("robust", ["trimmed", "centered"])
def test_two_contributors_have_the_plain_average(robust: str) -> None:
    ones = named(vectors(2, 2), "raw32")
    plain = merge_vectors(MIXED, ones, [0.5, 0.5]).outer_grad
    assert robust in ("trimmed", "centered")
    found = merge_vectors(
        MIXED, ones, [0.5, 0.5], robust="trimmed" if robust == "trimmed" else "centered"
    )
    assert found.outer_grad.tobytes() == plain.tobytes()


def test_one_liar_does_not_leave_the_range_of_the_others() -> None:
    honest = vectors(3, 3)
    liar = np.full(MIXED.elements, 1e30, np.float32)
    ones = named([*honest, liar], "raw32")
    found = merge_vectors(MIXED, ones, [0.25] * 4, clip_ratio=0, robust="trimmed").outer_grad
    assert np.all(found <= np.max(honest, axis=0)) and np.all(found >= np.min(honest, axis=0))


def test_centered_clipping_holds_everybody_within_the_radius() -> None:
    """Distances and the mean by the definition, in float64."""
    rng = np.random.default_rng(4)
    center = rng.normal(size=MIXED.elements).astype(np.float32)
    found = [center + each for each in vectors(4, 5)]
    found[3] = -100 * center
    ones = named(found, "raw32")
    history = EMPTY
    names = [(f"{i:03d}", "0") for i in range(3)]
    norms = np.array([[np.sqrt(piece.count) for piece in MIXED.pieces]] * 3, np.float32)
    for version in (1, 2):
        history = history.after(version, names, norms)
    result = merge_vectors(
        MIXED, ones, [0.25] * 4, norm_limit=1000.0, robust="centered", history=history,
        center=center,
    )  # fmt: skip
    radii = history.measure([one.learner for one in ones], len(MIXED.pieces)).medians
    for row, piece in enumerate(MIXED.pieces):
        where = slice(piece.offset, piece.offset + piece.count)
        middle = center[where].astype(np.float64)
        total = np.zeros(piece.count)
        for each in found:
            away = each[where].astype(np.float64) - middle
            total += 0.25 * away * min(1.0, radii[row] / float(np.linalg.norm(away)))
        np.testing.assert_allclose(result.outer_grad[where], middle + total, rtol=1e-3, atol=1e-4)


def test_dots_equal_those_of_numpy() -> None:
    reference = vectors(1, 6)[0]
    for codec_name in ("raw32", "int4-zstd", "bf16"):
        ones = named(vectors(2, 7), codec_name, chunk_elements=512)
        found = dots(MIXED, ones, reference)
        for column, one in enumerate(ones):
            values = decoded(one, MIXED).astype(np.float64) * reference
            for row, piece in enumerate(MIXED.pieces):
                own = values[piece.offset : piece.offset + piece.count]
                assert found[row, column] == pytest.approx(own.sum(), abs=1e-9 * np.abs(own).sum())
