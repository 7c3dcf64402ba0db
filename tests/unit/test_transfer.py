"""A fragment to chunks and back: coverage, exactness, digests."""

from __future__ import annotations

import numpy as np
import pytest

from narrows.proto.codec import F32
from narrows.proto.codec.transfer import (
    EncodedChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    encode_fragment,
    values_of,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import LayoutEntry

LAYOUT = (
    LayoutEntry("embedding", (40, 8), "float32", "mean"),
    LayoutEntry("weight", (30, 30), "float32", "rda"),
    LayoutEntry("bias", (30,), "float32", "mean"),
)


@pytest.fixture
def fragment() -> Fragment:
    return build_table(LAYOUT, 1)[0]


def encoded(fragment: Fragment, values: F32, codec: str) -> tuple[list[EncodedChunk], F32]:
    reconstructed = np.full_like(values, np.nan)
    chunks = encode_fragment(
        fragment, values, codec_name=codec, rho=0.5, chunk_elements=257,
        reconstructed=reconstructed,
    )  # fmt: skip
    return list(chunks), reconstructed


@pytest.mark.parametrize("codec", ["raw32", "f32-blosc2", "bf16", "int8-zstd", "int4-zstd"])
def test_the_receiver_gets_exactly_what_the_sender_reconstructed(
    fragment: Fragment, codec: str
) -> None:
    values = np.random.default_rng(1).standard_normal(fragment.elements).astype(np.float32)
    chunks, reconstructed = encoded(fragment, values, codec)
    decoded = [
        (c.offset, decode_chunk(fragment, codec, c.offset, c.count, c.payload)) for c in chunks
    ]
    assert sum(chunk.count for chunk in chunks) == fragment.elements
    assert np.array_equal(values_of(fragment, decoded), reconstructed)


def test_publications_move_two_copies_to_the_same_bits(fragment: Fragment) -> None:
    rng = np.random.default_rng(2)
    copy = rng.standard_normal(fragment.elements).astype(np.float32)
    step = (0.01 * rng.standard_normal(fragment.elements)).astype(np.float32)
    chunks, _ = encoded(fragment, step, "int4-zstd")
    decoded = [
        (c.offset, decode_chunk(fragment, "int4-zstd", c.offset, c.count, c.payload))
        for c in chunks
    ]
    here = advance_copy(fragment, copy, decoded)
    there = advance_copy(fragment, copy.copy(), decoded[::-1])
    assert digest_of(here) == digest_of(there)
    assert digest_of(here) != digest_of(copy)


def test_an_infinite_value_is_refused_before_anything_is_sent(fragment: Fragment) -> None:
    values = np.zeros(fragment.elements, np.float32)
    values[3] = np.inf
    with pytest.raises(LocalProtocolError) as caught:
        encoded(fragment, values, "int4-zstd")
    assert caught.value.code is ErrorCode.NOT_FINITE
