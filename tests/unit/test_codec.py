"""Codecs: the stored bits, exact reconstruction, bounded errors, any cut, and a numpy twin."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import xxhash
from codec_cases import (
    CODECS,
    CODED,
    LIMIT,
    decoded,
    f32,
    fragment_of,
    lane_square_sums,
    push,
    same_bits,
    step,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from narrows.proto.codec import (
    F32,
    RMS_SAMPLES_MAX,
    DecodedChunk,
    EncodedChunk,
    PushChunk,
    advance_copy,
    digest_of,
    empty_f32,
    encode_codes,
    encode_values,
    memory,
    piece_scales,
    read_only,
    recut,
    round_to_dtype,
    sample_places,
    values_of,
)
from narrows.proto.codec.memory import empty_u8
from narrows.proto.codec.payload import payload_bytes_max
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import BLOCK, Fragment
from narrows.proto.messages import CHUNK_ELEMENTS_MAX, PAYLOAD_BYTES_MAX, CodecName, DtypeName

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_codecs.json").read_text())


# The stored bits.


def awkward(count: int, first: int) -> F32:
    index = np.arange(count, dtype=np.int64) + first
    whole = (index * 2_654_435_761 % (1 << 24) - (1 << 23)).astype(np.float32)
    return whole * np.float32(2.0**-24) * np.exp2((index % 7 - 3).astype(np.float32))


def awkward_pair(fragment: Fragment) -> tuple[F32, F32]:
    """Two vectors whose difference is 0 in piece 1, with some negative zeros."""
    one = awkward(fragment.elements, 0)
    two = one + awkward(fragment.elements, 77) * np.float32(2.0**-6)
    still = fragment.pieces[1]
    two[still.offset : still.offset + still.count] = one[still.offset : still.offset + still.count]
    one[-3:] = -0.0
    two[-2:] = -0.0
    return one, two


@pytest.mark.parametrize("codec", CODECS)
def test_payloads_are_the_stored_bytes(codec: CodecName) -> None:
    """zstd and Blosc2 have a say in the bytes: if only these differ, a library has changed, and old
    and new payloads decode to the same values."""
    fragment, stored = fragment_of(*GOLDEN["lengths"]), GOLDEN["codecs"][codec]
    one, two = awkward_pair(fragment)
    cut = GOLDEN["chunk_elements"]
    sent = push(fragment, one, two, codec, GOLDEN["rho"], cut)
    published, advanced = step(fragment, one, two, codec, GOLDEN["rho"], cut)
    old = [EncodedChunk(i, bytes.fromhex(text), 0) for i, text in enumerate(stored["push"])]
    for chunks in (sent, old):
        got = decoded(fragment, codec, cut, chunks)
        values = values_of(fragment, got)
        assert xxhash.xxh3_64_hexdigest(values.tobytes()) == stored["values"]
        assert [square_sums(chunk).tolist() for chunk in got] == stored["square_sums"]
    assert xxhash.xxh3_64_hexdigest(advanced.tobytes()) == stored["advanced"]
    assert [each.payload.hex() for each in sent] == stored["push"]
    assert [each.payload.hex() for each in published] == stored["step"]


def square_sums(chunk: DecodedChunk) -> NDArray[np.float64]:
    """Sums of squares of the spans; those of floats, in 16 lanes, are in the stored digest too."""
    if chunk.coded:
        return chunk.square_sums()
    return np.array(lane_square_sums(chunk.floats(), chunk.bounds))


def test_this_cpu_computes_the_stored_bits() -> None:
    """One digest over codes, scales and sums of 200,003 elements: no library has a say in them. A
    generic CPU computes the stored merges, through the same kernels."""
    hasher = xxhash.xxh3_128()
    fragment = fragment_of(1, 2, 255, 69_742, 129_999, 4)
    one, two = awkward_pair(fragment)
    for codec in CODECS:
        for chunk in push(fragment, one, two, codec, 0.7, 1 << 16):
            hasher.update(chunk.decoded.scales.tobytes() + chunk.decoded.codes.tobytes())
            hasher.update(square_sums(chunk.decoded).tobytes())
        hasher.update(step(fragment, one, two, codec, 0.7, 1 << 16)[1].tobytes())
    out = np.empty_like(one)
    for dtype in get_args(DtypeName)[1:]:
        round_to_dtype(one * np.float32(1000), dtype, out)
        hasher.update(out.tobytes())
    assert hasher.hexdigest() == GOLDEN["content_digest"]


# Properties of any transfer.


@dataclass(frozen=True)
class Case:
    """Two vectors of one fragment, and how their difference is coded."""

    fragment: Fragment
    one: F32
    two: F32
    rho: float
    chunk_elements: int

    def push(self, codec: CodecName) -> list[PushChunk]:
        return push(self.fragment, self.one, self.two, codec, self.rho, self.chunk_elements)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fragment = fragment_of(*draw(st.lists(st.integers(1, 700), min_size=1, max_size=5)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
    one, step = rng.standard_t(3, (2, fragment.elements)).astype(np.float32)
    step[rng.random(fragment.elements) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    one[rng.random(fragment.elements) < 0.1] = draw(st.sampled_from([0.0, -0.0, 1e-40]))
    scaled = np.float32(size) * one
    two = scaled + np.float32(size * 0.1) * step
    return Case(
        fragment,
        scaled,
        two,
        draw(st.sampled_from([0.01, 0.5, 4.0])),
        draw(st.sampled_from([256, 512, 1024, 1 << 20])),
    )


@pytest.mark.parametrize("codec", CODECS)
@given(case=cases())
def test_a_receiver_holds_what_the_sender_kept(codec: CodecName, case: Case) -> None:
    sent = case.push(codec)
    assert [each.index for each in sent] == [*range(len(sent))]
    got = decoded(case.fragment, codec, case.chunk_elements, sent)
    for each, chunk in zip(sent, got, strict=True):
        assert each.payload_digest == xxhash.xxh3_64_intdigest(each.payload)
        assert chunk.codes.tobytes() == each.decoded.codes.tobytes()
        assert same_bits(chunk.scales, each.decoded.scales)
        assert (chunk.codec, chunk.count) == (codec, each.decoded.count)
        assert len(each.payload) <= payload_bytes_max(codec, chunk.count, chunk.scales.size)
        values = np.full(chunk.count, np.nan, np.float32)
        chunk.values(values)
        if chunk.coded:
            assert chunk.square_sums().tolist() == lane_square_sums(values, chunk.bounds)
    assert codec in CODED or same_bits(values_of(case.fragment, got), case.one - case.two)


@pytest.mark.parametrize("codec", CODECS)
@given(case=cases(), other=st.sampled_from([256, 1024, 1 << 20]))
def test_the_copy_advances_alike_at_both_ends_and_a_push_may_be_cut_anew(
    codec: CodecName, case: Case, other: int
) -> None:
    fragment, size = case.fragment, case.chunk_elements
    published, advanced = step(fragment, case.one, case.two, codec, case.rho, size)
    got = decoded(fragment, codec, size, published)
    assert same_bits(advance_copy(fragment, case.one, got), advanced)
    values = values_of(fragment, got)
    assert same_bits(advanced, np.where(values == 0, case.one, case.one + values))
    push_chunks = [each.decoded for each in case.push(codec)]
    anew = recut(fragment, push_chunks, codec=codec, chunk_elements=other)
    expected = replace(case, chunk_elements=other).push(codec)
    assert [each.payload for each in anew] == [each.payload for each in expected]


@pytest.mark.parametrize("codec", CODED)
def test_a_code_is_rounded_half_to_even_and_clamped(codec: CodecName) -> None:
    limit = LIMIT[codec]
    values = f32(0.5, 1.5, 2.5, -2.5, limit - 0.4, limit + 0.6, -1000)
    rho = float(1 / np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    fragment = fragment_of(values.size)
    (chunk,) = push(fragment, values, np.zeros_like(values), codec, rho, 256)
    assert chunk.decoded.scales.tolist() == [1.0]
    expected = [0, 2, 2, -2, limit, limit, -limit]
    assert values_of(fragment, [chunk.decoded]).tolist() == expected


# Scales.


def unsampled(count: int) -> int:
    """An element of a piece on which no sample falls."""
    sampled = sample_places(np.array([0, count]), RMS_SAMPLES_MAX)[0]
    return int(np.setdiff1d(np.arange(count), sampled)[5])


def test_a_scale_comes_from_samples_unless_none_of_them_has_moved() -> None:
    dense, spike = np.random.default_rng(0).normal(size=100_003), np.zeros(70_001)
    spike[unsampled(70_001)] = 3
    values = np.concatenate([dense, spike]).astype(np.float32)
    bounds = np.array([0, 100_003, 170_004])
    scales = piece_scales(values, bounds, 0.5)
    places, among = sample_places(bounds, RMS_SAMPLES_MAX)
    assert piece_scales(values[places], among, 0.5)[0] == scales[0], "on a GPU"
    assert scales[1] == 1.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("codec", CODECS)
def test_values_that_nobody_could_use_are_not_sent(codec: CodecName, bad: float) -> None:
    # In a large piece, where the samples of the scale may miss it.
    fragment = fragment_of(40_000)
    one, two = np.ones(40_000, np.float32), np.zeros(40_000, np.float32)
    place = unsampled(40_000)
    one[place], two[place] = bad, -bad
    for send in (push, step):
        with pytest.raises(LocalProtocolError, match="learning rate") as caught:
            send(fragment, one, two, codec, 0.5, 1 << 16)
        assert caught.value.code is ErrorCode.NOT_FINITE
    one[:] = 1e38 if codec in CODED else np.nan
    with pytest.raises(LocalProtocolError, match="learning rate"):
        push(fragment, one, two, codec, 0.5, 1 << 16)


# Edges.


def test_a_lossless_state_keeps_every_bit() -> None:
    fragment = fragment_of(300, 1, 400)
    values = awkward(701, 3)
    values[:3] = f32(-0.0, 1e-45, 3.4e38)
    chunks = list(encode_values(fragment, values, chunk_elements=256))
    assert same_bits(values_of(fragment, decoded(fragment, "f32-blosc2", 256, chunks)), values)
    values[700] = np.nan
    with pytest.raises(LocalProtocolError):
        list(encode_values(fragment, values, chunk_elements=256))


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_products_are_exact_and_finite_at_both_ends(codec: CodecName, scale: float) -> None:
    codes = np.array([-7, -1, 0, 1, 7], np.int8)
    (chunk,) = encode_codes(fragment_of(5), codec, f32(scale), codes, 256)
    (got,) = decoded(fragment_of(5), codec, 256, [chunk])
    assert values_of(fragment_of(5), [got]).tolist() == [-7 * scale, -scale, 0, scale, 7 * scale]
    assert got.square_sums().tolist() == [100 * scale**2]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 2, 255, 65_536, CHUNK_ELEMENTS_MAX])
def test_the_largest_size_holds_even_where_nothing_can_be_compressed(
    codec: CodecName, count: int
) -> None:
    one = np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)
    rho = 0.01 if codec == "int8-zstd" else 0.2
    (chunk,) = push(fragment_of(count), one, np.zeros_like(one), codec, rho, 1 << 20)
    assert len(chunk.payload) <= payload_bytes_max(codec, count, 1) <= PAYLOAD_BYTES_MAX


def test_threads_encode_the_same_bytes() -> None:
    fragment = fragment_of(5000)
    rows = np.random.default_rng(0).normal(size=(40, 5000)).astype(np.float32)

    def there_and_back(row: int) -> bytes:
        case = Case(fragment, rows[row], rows[row - 1], 0.5, 1024)
        sent = case.push("int4-zstd")
        got = values_of(fragment, decoded(fragment, "int4-zstd", 1024, sent))
        assert same_bits(got, values_of(fragment, [each.decoded for each in sent]))
        return b"".join(each.payload for each in sent)

    alone = [*map(there_and_back, range(len(rows)))]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(there_and_back, range(len(rows)))) == alone


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_digest_is_made_of_the_digests_of_blocks(count: int) -> None:
    values = awkward(count, 5)
    parts = [values[at : at + BLOCK].tobytes() for at in range(0, count, BLOCK)]
    heads = b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)
    assert digest_of(values) == xxhash.xxh3_64_intdigest(heads)
    # A strided or read-only vector is no other one.
    assert digest_of(read_only(np.repeat(values, 2)[::2])) == digest_of(values)
    values[-1] = -values[-1]
    assert digest_of(values) != xxhash.xxh3_64_intdigest(heads)


# Lent memory.


def test_memory_comes_back_when_the_last_view_is_gone_and_what_is_idle_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    monkeypatch.setattr(memory, "_idle", {})
    monkeypatch.setattr(memory, "IDLE_BYTES_MAX", 1 << 20)
    array = empty_f32(100_000)
    place, view = array.ctypes.data, read_only(array[10:20].view(np.int8)[3:])
    del array
    assert memory.idle_bytes() == 0
    del view
    assert 400_000 <= memory.idle_bytes() <= 450_000
    again = empty_f32(100_000)
    assert again.ctypes.data == place and memory.idle_bytes() == 0
    many = [empty_u8(1 << 14) for _ in range(100)]
    del many
    assert memory.idle_bytes() == 1 << 20
    del again
    assert 400_000 <= memory.idle_bytes() <= 450_000, "other sizes make room"
