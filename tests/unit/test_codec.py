"""Codecs: the stored bits, exact reconstruction, bounded errors, any cut. And payloads that no
encoder writes: refused by code, before they can do harm; never anything else."""

import gc
import json
import random
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from merging_cases import CODECS, awkward, fragment_of, lane_square_sums
from numpy.typing import NDArray

from narrows.proto.codec import (
    F32,
    RMS_SAMPLES_MAX,
    DecodedChunk,
    EncodedChunk,
    PushChunk,
    advance_copy,
    assemble,
    decode_chunk,
    digest_of,
    empty_f32,
    encode_codes,
    encode_push,
    encode_step,
    encode_values,
    kernels,
    memory,
    piece_scales,
    read_only,
    recut,
    round_to_dtype,
    sample_places,
    values_of,
)
from narrows.proto.codec.memory import empty_u8
from narrows.proto.codec.payload import CODECS as BY_NAME
from narrows.proto.codec.payload import payload_bytes_max
from narrows.proto.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from narrows.proto.layout import BLOCK, Fragment
from narrows.proto.messages import CHUNK_ELEMENTS_MAX, PAYLOAD_BYTES_MAX, CodecName, DtypeName
from narrows.proto.workers import Workers

CODED = tuple(name for name in CODECS if BY_NAME[name].coded)
LIMIT = {"int4-zstd": 7, "int8-zstd": 127}  # As in PROTOCOL.md, not as in the code.
GOLDEN_FILE = Path(__file__).with_name("golden_codecs.json")
LENGTHS = (1, 40, 255, 310)
CHUNK_ELEMENTS = 256
RHO = 0.5


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The stored bits; with --write-golden those of the code are stored first."""
    if request.config.getoption("--write-golden"):
        new = {"codecs": {name: bits(name) for name in CODECS}, "content_digest": content_digest()}
        GOLDEN_FILE.write_text(json.dumps(new, indent=1) + "\n")
    return dict(json.loads(GOLDEN_FILE.read_text()))


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def same_bits(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()


def push(
    fragment: Fragment, one: F32, two: F32, codec: CodecName, rho: float, chunk_elements: int
) -> list[PushChunk]:
    """The push `one - two`."""
    return [*encode_push(fragment, one, two, codec=codec, rho=rho, chunk_elements=chunk_elements)]


def step(
    fragment: Fragment, one: F32, two: F32, codec: CodecName, rho: float, chunk_elements: int
) -> tuple[list[EncodedChunk], F32]:
    """The publication `two - one`, and the copy that follows `one`."""
    advanced = np.full_like(one, np.nan)
    chunks = encode_step(
        fragment, two, one,
        codec=codec, rho=rho, chunk_elements=chunk_elements, advanced=advanced,
    )  # fmt: skip
    return list(chunks), advanced


def decoded(
    fragment: Fragment, codec: CodecName, chunk_elements: int, chunks: Sequence[EncodedChunk]
) -> list[DecodedChunk]:
    return [
        decode_chunk(fragment, codec, chunk_elements, each.index, each.payload) for each in chunks
    ]


def refused(fragment: Fragment, codec: CodecName, payload: bytes) -> ErrorCode:
    """The code with which the payload of a fragment of one chunk is refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_chunk(fragment, codec, 1 << 20, 0, payload)
    assert len(str(caught.value)) < 1024
    return caught.value.code


def test_every_name_has_an_entry_of_that_name() -> None:
    assert tuple(BY_NAME) == get_args(CodecName)
    assert all(entry.name == name for name, entry in BY_NAME.items())


# The stored bits.


def awkward_pair(fragment: Fragment) -> tuple[F32, F32]:
    """Two vectors whose difference is 0 in piece 1, with some negative zeros."""
    one = awkward(fragment.elements, 0, size=0.5, spread=7)
    two = one + awkward(fragment.elements, 77, size=0.5, spread=7) * np.float32(2.0**-6)
    still = fragment.pieces[1]
    two[still.offset : still.offset + still.count] = one[still.offset : still.offset + still.count]
    one[-3:] = -0.0
    two[-2:] = -0.0
    return one, two


def bits(codec: CodecName) -> dict[str, Any]:
    """All that is stored of a codec: payloads in hex, and what they decode to."""
    fragment = fragment_of(*LENGTHS)
    one, two = awkward_pair(fragment)
    sent = [each.payload.hex() for each in push(fragment, one, two, codec, RHO, CHUNK_ELEMENTS)]
    published, advanced = step(fragment, one, two, codec, RHO, CHUNK_ELEMENTS)
    return {
        "push": sent,
        "step": [each.payload.hex() for each in published],
        "advanced": xxhash.xxh3_64_hexdigest(advanced.tobytes()),
        **meaning(codec, sent),
    }


def meaning(codec: CodecName, payloads: list[str]) -> dict[str, Any]:
    """The values and sums of squares in the payloads of a push."""
    fragment = fragment_of(*LENGTHS)
    chunks = [EncodedChunk(i, bytes.fromhex(text), 0) for i, text in enumerate(payloads)]
    got = decoded(fragment, codec, CHUNK_ELEMENTS, chunks)
    return {
        "values": xxhash.xxh3_64_hexdigest(values_of(fragment, got).tobytes()),
        "square_sums": [square_sums(chunk).tolist() for chunk in got],
    }


@pytest.mark.parametrize("codec", CODECS)
def test_payloads_are_the_stored_bytes(codec: CodecName, golden: dict[str, Any]) -> None:
    """zstd and Blosc2 have a say in the bytes: if only these differ, a library has changed, and old
    and new payloads decode to the same values."""
    stored = golden["codecs"][codec]
    assert meaning(codec, stored["push"]).items() <= stored.items()
    assert bits(codec) == stored


def square_sums(chunk: DecodedChunk) -> NDArray[np.float64]:
    """Sums of squares of the spans; those of floats, in 16 lanes, are in the stored digest too."""
    if chunk.codec.coded:
        return chunk.square_sums()
    return np.array(lane_square_sums(chunk.floats(), chunk.bounds))


def content_digest() -> str:
    """One digest over codes, scales and sums of 200,003 elements in every codec."""
    hasher = xxhash.xxh3_128()
    fragment = fragment_of(1, 2, 255, 69_742, 129_999, 4)
    one, two = awkward_pair(fragment)
    for codec in CODECS:
        for chunk in push(fragment, one, two, codec, 0.7, 1 << 16):
            hasher.update(chunk.decoded.scales.tobytes() + chunk.decoded.content.tobytes())
            hasher.update(square_sums(chunk.decoded).tobytes())
        hasher.update(step(fragment, one, two, codec, 0.7, 1 << 16)[1].tobytes())
    out = np.empty_like(one)
    for dtype in get_args(DtypeName)[1:]:
        round_to_dtype(one * np.float32(1000), dtype, out)
        hasher.update(out.tobytes())
    return hasher.hexdigest()


def test_this_cpu_computes_the_stored_bits(golden: dict[str, Any]) -> None:
    """No library has a say in them. A generic CPU computes the stored merges, through the same
    kernels."""
    assert content_digest() == golden["content_digest"]


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
    """Holds `decode_chunk`."""
    sent = case.push(codec)
    assert [each.index for each in sent] == [*range(len(sent))]
    got = decoded(case.fragment, codec, case.chunk_elements, sent)
    for each, chunk in zip(sent, got, strict=True):
        assert each.payload_digest == xxhash.xxh3_64_intdigest(each.payload)
        assert chunk.content.tobytes() == each.decoded.content.tobytes()
        assert same_bits(chunk.scales, each.decoded.scales)
        assert (chunk.codec.name, chunk.count) == (codec, each.decoded.count)
        bytes_max = payload_bytes_max(BY_NAME[codec], chunk.count, chunk.scales.size)
        assert len(each.payload) <= bytes_max
        values = np.full(chunk.count, np.nan, np.float32)
        chunk.values(values)
        if chunk.codec.coded:
            assert chunk.square_sums().tolist() == lane_square_sums(values, chunk.bounds)
    assert codec in CODED or same_bits(values_of(case.fragment, got), case.one - case.two)


@pytest.mark.parametrize("codec", CODECS)
@given(case=cases(), other=st.sampled_from([256, 1024, 1 << 20]))
def test_the_copy_advances_alike_at_both_ends_and_a_push_may_be_cut_anew(
    codec: CodecName, case: Case, other: int
) -> None:
    """Holds `recut`."""
    fragment = case.fragment
    size = case.chunk_elements
    published, advanced = step(fragment, case.one, case.two, codec, case.rho, size)
    got = decoded(fragment, codec, size, published)
    assert same_bits(advance_copy(fragment, case.one, got), advanced)
    values = values_of(fragment, got)
    assert same_bits(advanced, np.where(values == 0, case.one, case.one + values))
    push_chunks = [each.decoded for each in case.push(codec)]
    anew = recut(fragment, push_chunks, codec=codec, chunk_elements=other)
    expected = replace(case, chunk_elements=other).push(codec)
    assert [each.payload for each in anew] == [each.payload for each in expected]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("chunk_elements", [1024, 3 * 1024, 2 * BLOCK])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_codes_the_same_bits(
    codec: CodecName, chunk_elements: int, threads: int
) -> None:
    """Holds `encode_push`, `assemble`."""
    fragment = fragment_of(*[7] * 9, 3 * BLOCK, 2 * BLOCK + 17)
    one, two = awkward_pair(fragment)
    published, advanced = step(fragment, one, two, codec, 0.5, chunk_elements)
    payloads = [(codec, each.payload) for each in published]
    with closing(Workers(threads, "test")) as pool:
        chunks = encode_push(
            fragment, two, one,
            codec=codec, rho=0.5, chunk_elements=chunk_elements, spread=pool.spread,
        )  # fmt: skip
        assert [each.payload for each in chunks] == [payload for _, payload in payloads]
        copy, digest = assemble(
            fragment, one, payloads, chunk_elements=chunk_elements, spread=pool.spread
        )
        assert same_bits(copy, advanced) and digest == digest_of(advanced)
        payloads[2] = (codec, b"")
        with pytest.raises(RemoteProtocolError):
            assemble(fragment, one, payloads, chunk_elements=chunk_elements, spread=pool.spread)


@pytest.mark.parametrize("codec", CODED)
def test_a_code_is_rounded_half_to_even_and_clamped(codec: CodecName) -> None:
    """Holds `quantise_difference`."""
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
    """Holds `piece_scales`."""
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
    """Holds `encode_push`."""
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
    """Holds `payload_bytes_max`."""
    one = np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)
    rho = 0.01 if codec == "int8-zstd" else 0.2
    (chunk,) = push(fragment_of(count), one, np.zeros_like(one), codec, rho, 1 << 20)
    assert len(chunk.payload) <= payload_bytes_max(BY_NAME[codec], count, 1) <= PAYLOAD_BYTES_MAX


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
    """Holds `empty_f32`."""
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


# Malice: the digest of a payload catches damage, and not this.

ZSTD = b"\x28\xb5\x2f\xfd"


def half(value: float) -> bytes:
    """A bfloat16 number, little-endian."""
    return (f32(value).view(np.uint32) >> 16).astype("<u2").tobytes()


def raw_frame(
    content: bytes, *, size: int | None = None, dictionary: int = 0, window: int | None = None
) -> bytes:
    """A hand-made zstd frame of one raw block; `size` is what it declares.

    Without `window`, a descriptor byte of RFC 8878, the frame is a single segment.
    """
    flags = 0x80 | (0x20 if window is None else 0) | (3 if dictionary else 0)
    head = ZSTD + bytes([flags]) + (b"" if window is None else bytes([window]))
    head += dictionary.to_bytes(4, "little") if dictionary else b""
    head += (len(content) if size is None else size).to_bytes(4, "little")
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def repeated_frame(length: int, *, size: int) -> bytes:
    """A frame whose one block repeats a zero byte `length` times and that declares `size`."""
    head = ZSTD + bytes([0xA0]) + size.to_bytes(4, "little")
    return head + (length << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"


def good_payload(fragment: Fragment, codec: CodecName) -> bytes:
    values = (np.arange(fragment.elements) % 15 - 7).astype(np.float32)
    (chunk,) = push(fragment, values, np.zeros_like(values), codec, 0.2, 1 << 20)
    return chunk.payload


def decode(fragment: Fragment, codec: CodecName, payload: bytes) -> DecodedChunk | None:
    """The chunk, harmless if it was accepted; None if it was refused."""
    try:
        chunk = decode_chunk(fragment, codec, 1 << 20, 0, payload)
    except RemoteProtocolError as error:
        assert error.code in (ErrorCode.BAD_PAYLOAD, ErrorCode.TOO_LARGE, ErrorCode.NOT_FINITE)
        return None
    values = values_of(fragment, [chunk])
    assert np.isfinite(values).all()
    if codec in CODED:
        assert np.isfinite(chunk.square_sums()).all()
        scales = np.repeat(chunk.scales, np.diff(fragment.bounds))
        assert np.all(np.abs(values) <= LIMIT[codec] * scales)
    return chunk


@pytest.mark.parametrize(
    ("codec", "lengths", "payload", "code"),
    [
        *(
            (codec, (1,), half(scale) + raw_frame(b"\1"), code)
            for codec in CODED
            for code, scales in (
                (ErrorCode.NOT_FINITE, (np.nan, np.inf, -np.inf)),
                (ErrorCode.BAD_PAYLOAD, (-1.0, -0.0, 2.0**-101, 2.0**101, 3e38)),
            )
            for scale in scales
        ),
        # A scale of about 1e-40.
        *((codec, (1,), b"\1\0" + raw_frame(b"\1"), ErrorCode.BAD_PAYLOAD) for codec in CODED),
        # Codes without a twin of the other sign, and padding that is used.
        ("int8-zstd", (3,), half(1) + raw_frame(b"\x01\x80\x02"), ErrorCode.BAD_PAYLOAD),
        ("int4-zstd", (4,), half(1) + raw_frame(b"\x11\x18"), ErrorCode.BAD_PAYLOAD),
        ("int4-zstd", (4,), half(1) + raw_frame(b"\x81\x11"), ErrorCode.BAD_PAYLOAD),
        ("int4-zstd", (3,), half(1) + raw_frame(b"\x11\x11"), ErrorCode.BAD_PAYLOAD),
        ("int4-zstd", (3,), half(1) + raw_frame(b"\x11\x81"), ErrorCode.BAD_PAYLOAD),
        ("int4-zstd", (1,), half(1) + raw_frame(b"\x10"), ErrorCode.BAD_PAYLOAD),
        *(
            (codec, (1, 3), bytes(payload_bytes_max(BY_NAME[codec], 4, 2) + 1), ErrorCode.TOO_LARGE)
            for codec in CODECS
        ),
    ],
)
def test_scales_codes_and_sizes_out_of_bounds_are_refused(
    codec: CodecName, lengths: tuple[int, ...], payload: bytes, code: ErrorCode
) -> None:
    """Holds `decode`."""
    assert refused(fragment_of(*lengths), codec, payload) is code


GOOD = raw_frame(b"\x21\x03")
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x21\x03")
SKIPPABLE = bytes.fromhex("502a4d1802000000") + b"\x21\x03"


def test_a_hand_made_frame_is_accepted() -> None:
    for frame in (GOOD, raw_frame(b"\x21\x03", window=0x68)):
        chunk = decode_chunk(fragment_of(3), "int4-zstd", 256, 0, half(2) + frame)
        assert values_of(fragment_of(3), [chunk]).tolist() == [2.0, 6.0, 4.0]


BAD_FRAMES = {
    "nothing": b"",
    "magic only": ZSTD,
    "no magic": GOOD[1:],
    "no content size": UNSIZED,
    "declares less": raw_frame(b"\x21\x03", size=1),
    "declares more": raw_frame(b"\x21\x03", size=3),
    "is shorter": raw_frame(b"\x21"),
    "holds less than declared": raw_frame(b"\x21", size=2),
    "holds more than declared": raw_frame(b"\x21\x03\x01", size=2),
    "bomb that declares the right size": repeated_frame(128 << 10, size=2),
    "bomb": repeated_frame(128 << 10, size=128 << 10),
    "bomb of 7 exabytes": bytes.fromhex("28b52ffde06c06060663636363"),
    "window beyond 8 MiB": raw_frame(b"\x21\x03", window=0x69),
    "window of 1 GiB": raw_frame(b"\x21\x03", window=0xA0),
    "dictionary": raw_frame(b"\x21\x03", dictionary=7),
    "trailing byte": GOOD + b"\0",
    "two frames": GOOD + GOOD,
    "skippable frame after": GOOD + SKIPPABLE,
    "skippable frame before": SKIPPABLE + GOOD,
    "skippable frame only": SKIPPABLE,
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_bad_frames_are_refused_without_memory_for_them(what: str) -> None:
    """Holds `decode`."""
    fragment = fragment_of(3)
    payload = half(2) + BAD_FRAMES[what]
    refused(fragment, "int4-zstd", payload)
    tracemalloc.start()
    try:
        code = refused(fragment, "int4-zstd", payload)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code is (ErrorCode.TOO_LARGE if len(payload) > 30 else ErrorCode.BAD_PAYLOAD)
    assert peak_bytes < 64 << 10
    # A context that met the frame does not spoil the next payload.
    assert decode(fragment, "int4-zstd", half(2) + GOOD) is not None


@pytest.mark.parametrize("index", [-1, 2, 1 << 48])
def test_a_chunk_that_the_fragment_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(RemoteProtocolError, match=r"bad_chunk: .*expected 0 to 1, got"):
        decode_chunk(fragment_of(300), "int4-zstd", 256, index, b"")


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_does_not_refer_to_the_payload(codec: CodecName) -> None:
    fragment = fragment_of(300, 7)
    payload = bytearray(b"x" + good_payload(fragment, codec))
    # In the middle of a message a payload stands at any address.
    chunk = decode_chunk(fragment, codec, 512, 0, memoryview(payload)[1:])
    before = values_of(fragment, [chunk])
    payload[:] = bytes(len(payload))
    assert values_of(fragment, [chunk]).tolist() == before.tolist()
    assert not (chunk.content.flags.writeable or chunk.scales.flags.writeable)


fragments = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(lambda n: fragment_of(*n))


@pytest.mark.parametrize("codec", CODECS)
@given(fragment=fragments, data=st.data())
def test_arbitrary_and_damaged_payloads_do_no_harm(
    codec: CodecName, fragment: Fragment, data: st.DataObject
) -> None:
    decode(fragment, codec, data.draw(st.binary(max_size=200)))
    count = BY_NAME[codec].content_bytes(fragment.elements)
    body = data.draw(st.binary(min_size=count, max_size=count))
    decode(fragment, codec, half(2) * len(fragment.pieces) + raw_frame(body))
    payload = bytearray(good_payload(fragment, codec))
    cut = data.draw(st.integers(0, len(payload) - 1))
    tail = data.draw(st.binary(min_size=1, max_size=9))
    for damaged in (payload[:cut], payload + tail, payload + payload):
        assert decode(fragment, codec, bytes(damaged)) is None
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decode(fragment, codec, bytes(payload))
    decode(fragment, codec, bytes(payload[cut:] + payload[:cut]))


THOUSAND = fragment_of(1000)
(STATE,) = encode_values(THOUSAND, np.arange(1000, dtype=np.float32), chunk_elements=1024)


@pytest.mark.parametrize("place", range(32))
def test_a_blosc2_header_is_as_ours_or_refused(place: int) -> None:
    """Every byte of it but the flags (other ones may fit) and the size of a block."""
    for bit in range(8):
        payload = bytearray(STATE.payload)
        payload[place] ^= 1 << bit
        if place == 2 and payload[place] in (0x07, 0x85, 0x87, 0x95, 0x97):
            continue
        if 8 <= place < 12 and 0 < int.from_bytes(payload[8:12], "little") <= 4000:
            continue
        assert refused(THOUSAND, "f32-blosc2", bytes(payload)) is ErrorCode.BAD_PAYLOAD


def test_damaged_blosc2_content_is_refused_or_decodes_to_something() -> None:
    rng = random.Random(1)
    refusals = 0
    for _ in range(3000):
        payload = bytearray(STATE.payload)
        for _ in range(rng.choice((1, 2, 8))):
            payload[rng.randrange(32, len(payload))] = rng.randrange(256)
        refusals += decode(THOUSAND, "f32-blosc2", bytes(payload)) is None
    assert refusals > 300


def test_states_may_be_stored_values_or_no_more_than_a_header_for_zeros() -> None:
    (zeros,) = encode_values(THOUSAND, np.zeros(1000, np.float32), chunk_elements=1024)
    assert len(zeros.payload) == 32
    chunk = decode_chunk(THOUSAND, "f32-blosc2", 1024, 0, zeros.payload)
    assert chunk.floats().tolist() == [0.0] * 1000
    # Stored, not coded: the header, then the values as they are.
    sizes = (12).to_bytes(4, "little") * 2 + (44).to_bytes(4, "little")
    head = b"\5\1\7\4" + sizes + b"\1\0\0\0\0\0\5" + bytes(9)
    assert decode(fragment_of(3), "f32-blosc2", head + f32(0.5, -1, 0.25).tobytes()) is not None
    for bad in (np.nan, np.inf, -np.inf):
        payload = head + f32(0.5, bad, 0.25).tobytes()
        assert refused(fragment_of(3), "f32-blosc2", payload) is ErrorCode.NOT_FINITE


# The folder of compiled kernels: what lies there is executed, so it is this user's alone.


FOLDERS = (".", "narrows", "narrows/numba")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory, not yet there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    return tmp_path / ".cache"


def test_kernels_are_kept_in_a_folder_of_this_user_alone(cache: Path) -> None:
    """Holds `kernel`."""
    compiled: Any = kernels.kernel(lambda: 2)
    assert str(compiled.stats.cache_path).startswith(f"{cache}/narrows/numba/")
    assert [(cache / name).stat().st_mode & 0o777 for name in FOLDERS] == [0o700] * 3


@pytest.mark.parametrize(
    ("name", "mode", "other"),
    [
        *((name, mode, 0) for name in FOLDERS for mode in (0o770, 0o707)),
        (".", 0o700, 1),
    ],
)
def test_a_folder_that_others_own_or_may_write_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int, other: int
) -> None:
    """Holds `own_folder`."""
    (kernels.own_folder().parents[1] / name).chmod(mode)
    monkeypatch.setattr("os.geteuid", lambda: cache.stat().st_uid + other)
    with pytest.raises(
        PermissionError, match=f"others own or may write {cache / name}: chmod go-w"
    ):
        kernels.own_folder()


@pytest.mark.parametrize("given", ["", f"{__file__}/below"])
def test_without_a_folder_nothing_is_kept(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beside the module either, where numba goes on to."""
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    monkeypatch.setattr("numba.config.CACHE_DIR", given)
    monkeypatch.setattr(kernels, "_refusals", [])
    compiled: Any = kernels.kernel(lambda: 2)
    assert compiled.stats.cache_path is None and __file__ in kernels.uncached_advice()
