"""Payloads that no encoder writes: every one is refused by code, before it can do harm."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import zstandard
from coding import QUANTISED, bounds_of, encode, f32, half, refused, values_of

from narrows.proto.codec import blosc2_chunk, zstd_frame
from narrows.proto.codec.codecs import codec, codec_names
from narrows.proto.errors import ErrorCode, RemoteProtocolError


def raw_frame(
    content: bytes, *, size: int | None = None, dictionary: int = 0, window: int | None = None
) -> bytes:
    """A hand-made zstd frame of one raw block; `size` is what it declares.

    Without `window`, a descriptor byte of RFC 8878, the frame is a single segment.
    """
    flags = 0x80 | (0x20 if window is None else 0) | (3 if dictionary else 0)
    head = zstd_frame.MAGIC + bytes([flags]) + (b"" if window is None else bytes([window]))
    head += dictionary.to_bytes(4, "little") if dictionary else b""
    head += (len(content) if size is None else size).to_bytes(4, "little")
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def repeated_frame(length: int, *, size: int) -> bytes:
    """A frame whose one block repeats a zero byte `length` times and that declares `size`."""
    head = zstd_frame.MAGIC + bytes([0xA0]) + size.to_bytes(4, "little")
    return head + (length << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("raw32", f32(1, np.nan).tobytes()),
        ("raw32", f32(-np.inf, 1).tobytes()),
        ("f32-blosc2", blosc2_chunk.compress(f32(1, np.nan))),
        ("bf16", half(1) + half(np.nan)),
        ("bf16", half(-np.inf) + half(1)),
        ("int8-zstd", half(np.nan) + raw_frame(b"\1\2")),
        ("int4-zstd", half(np.inf) + raw_frame(b"\x11")),
        ("int4-zstd", half(-np.inf) + raw_frame(b"\x11")),
    ],
)
def test_nan_and_infinity_are_refused(name: str, payload: bytes) -> None:
    assert refused(name, payload, bounds_of(0, 2)) is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("scale", [-1.0, -0.0, 2.0**-101, 1e-45, 2.0**101, 3e38])
def test_scales_out_of_bounds_are_refused(name: str, scale: float) -> None:
    payload = (b"\1\0" if scale == 1e-45 else half(scale)) + raw_frame(b"\1")
    assert refused(name, payload, bounds_of(0, 1)) is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("name", "count", "codes"),
    [
        ("int8-zstd", 3, b"\x01\x80\x02"),
        ("int4-zstd", 4, b"\x11\x18"),
        ("int4-zstd", 4, b"\x81\x11"),
        ("int4-zstd", 3, b"\x11\x11"),
        ("int4-zstd", 3, b"\x11\x81"),
        ("int4-zstd", 1, b"\x10"),
    ],
)
def test_codes_without_a_twin_and_used_padding_are_refused(
    name: str, count: int, codes: bytes
) -> None:
    payload = half(1) + raw_frame(codes)
    assert refused(name, payload, bounds_of(0, count)) is ErrorCode.BAD_PAYLOAD


def test_a_hand_made_frame_is_accepted() -> None:
    for frame in (raw_frame(b"\x21\x03"), raw_frame(b"\x21\x03", window=0x68)):
        chunk = codec("int4-zstd").decode(half(2) + frame, bounds_of(0, 3))
        assert values_of(chunk) == [2.0, 6.0, 4.0]


GOOD = raw_frame(b"\x21\x03")
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x21\x03")
SKIPPABLE = bytes.fromhex("502a4d1802000000") + b"\x21\x03"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(zstd_frame.MAGIC, id="magic only"),
        pytest.param(GOOD[1:], id="no magic"),
        pytest.param(UNSIZED, id="no content size"),
        pytest.param(raw_frame(b"\x21\x03", size=1), id="declares less"),
        pytest.param(raw_frame(b"\x21\x03", size=3), id="declares more"),
        pytest.param(raw_frame(b"\x21"), id="is shorter"),
        pytest.param(raw_frame(b"\x21", size=2), id="holds less than declared"),
        pytest.param(raw_frame(b"\x21\x03\x01", size=2), id="holds more than declared"),
        pytest.param(repeated_frame(128 << 10, size=2), id="bomb that declares the right size"),
        pytest.param(repeated_frame(128 << 10, size=128 << 10), id="bomb"),
        pytest.param(bytes.fromhex("28b52ffde06c06060663636363"), id="bomb of 7 exabytes"),
        pytest.param(raw_frame(b"\x21\x03", window=0x69), id="window beyond 8 MiB"),
        pytest.param(raw_frame(b"\x21\x03", window=0xA0), id="window of 1 GiB"),
        pytest.param(raw_frame(b"\x21\x03", dictionary=7), id="dictionary"),
        pytest.param(GOOD + b"\0", id="trailing byte"),
        pytest.param(GOOD + GOOD, id="two frames"),
        pytest.param(GOOD + SKIPPABLE, id="skippable frame after"),
        pytest.param(SKIPPABLE + GOOD, id="skippable frame before"),
        pytest.param(SKIPPABLE, id="skippable frame only"),
    ],
)
def test_bad_frames_are_refused(frame: bytes) -> None:
    assert refused("int4-zstd", half(2) + frame, bounds_of(0, 3)) is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(repeated_frame(128 << 10, size=128 << 10), id="bomb"),
        pytest.param(bytes.fromhex("28b52ffde06c06060663636363"), id="bomb of 7 exabytes"),
        pytest.param(UNSIZED, id="no content size"),
        pytest.param(raw_frame(b"\x21\x03", window=0x69), id="window beyond 8 MiB"),
        pytest.param(raw_frame(b"\x21\x03", dictionary=7), id="dictionary"),
        pytest.param(SKIPPABLE + GOOD, id="skippable frame"),
    ],
)
def test_headers_are_refused_before_anything_is_decompressed(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decompressed: list[memoryview] = []
    monkeypatch.setattr("narrows.proto.codec.zstd_frame._decompress", decompressed.append)
    assert refused("int4-zstd", half(2) + frame, bounds_of(0, 3)) is ErrorCode.BAD_PAYLOAD
    assert decompressed == []


@pytest.mark.parametrize("name", codec_names())
def test_payloads_beyond_the_largest_are_too_large(name: str) -> None:
    size_bytes = codec(name).payload_bytes_max(3, 1)
    assert refused(name, bytes(size_bytes + 1), bounds_of(0, 3)) is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("name", codec_names())
def test_every_truncation_is_refused(name: str) -> None:
    payload, _ = encode(name, f32(1, -2, 3, 4), bounds_of(0, 1, 4), f32(1, 2))
    for length in range(len(payload)):
        assert refused(name, payload[:length], bounds_of(0, 1, 4)) is ErrorCode.BAD_PAYLOAD


def test_decoding_goes_on_after_a_damaged_frame() -> None:
    values = (np.arange(1000) % 15 - 7).astype(np.float32)
    payload, _ = encode("int4-zstd", values, bounds_of(0, 1000), f32(1))
    damaged = bytearray(payload)
    damaged[-3:] = b"\xff\xff\xff"
    for _ in range(3):
        refused("int4-zstd", bytes(damaged[:-1]), bounds_of(0, 1000))
        assert values_of(codec("int4-zstd").decode(payload, bounds_of(0, 1000))) == values.tolist()


def test_a_frame_of_empty_blocks_is_refused_before_anybody_walks_over_it() -> None:
    empty, last = (0).to_bytes(3, "little"), (1000 << 3 | 1).to_bytes(3, "little")
    head = zstd_frame.MAGIC + bytes([0xA0]) + (1000).to_bytes(4, "little")
    content = bytes(1000)
    for count, accepted in ((3, True), (15, False)):
        payload = half(1) + head + empty * count + last + content
        if accepted:
            codec("int8-zstd").decode(payload, bounds_of(0, 1000))
        else:
            assert refused("int8-zstd", payload, bounds_of(0, 1000)) is ErrorCode.BAD_PAYLOAD


BLOSC2 = blosc2_chunk.compress(np.arange(1000, dtype=np.float32))


@pytest.mark.parametrize("place", range(blosc2_chunk.HEADER_BYTES))
def test_a_blosc2_header_is_as_ours_or_refused(place: int) -> None:
    """Every byte of it but the flags (other ones may fit) and the size of a block."""
    for bit in range(8):
        payload = bytearray(BLOSC2)
        payload[place] ^= 1 << bit
        if place == 2 and payload[place] in blosc2_chunk.FLAGS:
            continue
        if 8 <= place < 12 and 0 < int.from_bytes(payload[8:12], "little") <= 4000:
            continue
        assert refused("f32-blosc2", bytes(payload), bounds_of(0, 1000)) is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (31, 0x40, "content that is never written"),
        (16, 160, "a filter of the user's"),
        (22, 37, "a codec that is a plugin"),
    ],
)
def test_what_a_blosc2_header_may_not_ask_for(place: int, value: int, what: str) -> None:
    payload = bytearray(BLOSC2)
    payload[place] = value
    assert refused("f32-blosc2", bytes(payload), bounds_of(0, 1000)) is ErrorCode.BAD_PAYLOAD, what


def test_damaged_blosc2_content_is_refused_or_decodes_to_something() -> None:
    """The digest of the payload catches damage; this is about malice: never a crash."""
    rng = random.Random(1)
    refusals = 0
    for _ in range(3000):
        payload = bytearray(BLOSC2)
        for _ in range(rng.choice((1, 2, 8))):
            payload[rng.randrange(32, len(payload))] = rng.randrange(256)
        try:
            codec("f32-blosc2").decode(bytes(payload), bounds_of(0, 1000))
        except RemoteProtocolError as error:
            assert error.code in (ErrorCode.BAD_PAYLOAD, ErrorCode.NOT_FINITE)
            refusals += 1
    assert refusals > 300


def by_hand(chunk: bytes) -> bytes:
    """The content of a Blosc2 chunk, decoded as PROTOCOL.md describes it."""
    flags, content, block = chunk[2], *struct.unpack_from("<2I", chunk, 4)
    if chunk[31]:
        return bytes(content)
    if flags in (0x07, 0x87, 0x97):
        return chunk[32:]
    values = b""
    for index in range(-(-content // block)):
        size = min(block, content - index * block)
        place = struct.unpack_from("<i", chunk, 32 + 4 * index)[0]
        shuffled = b""
        streams = 4 if flags == 0x85 and size == block else 1
        for _ in range(streams):
            stream, place = stream_by_hand(chunk, place, size // streams)
            shuffled += stream
        values += np.frombuffer(shuffled, np.uint8).reshape(4, size // 4).T.tobytes()
    return values


def stream_by_hand(chunk: bytes, place: int, size: int) -> tuple[bytes, int]:
    """The bytes of the stream at `place`, and where the next one begins."""
    coded, place = struct.unpack_from("<i", chunk, place)[0], place + 4
    if coded == 0:
        return bytes(size), place
    if coded < 0:
        assert chunk[place] == 1
        return bytes([-coded]) * size, place + 1
    content = chunk[place : place + coded]
    if coded < size:
        content = zstandard.ZstdDecompressor().decompress(content, max_output_size=size)
    return content, place + coded


@pytest.mark.parametrize("count", [1, 7, 32, 1000, 65536, 100_003, 1 << 18])
@pytest.mark.parametrize("kind", ["noise", "sparse", "few", "constant", "zeros"])
def test_blosc2_chunks_are_as_the_document_describes_them(kind: str, count: int) -> None:
    random = np.random.default_rng(count)
    noise = random.standard_normal(count).astype(np.float32)
    values = {
        "noise": noise,
        "sparse": noise * (random.random(count) < 0.01),
        "few": random.integers(0, 3, count).astype(np.float32),
        "constant": np.full(count, -1e-3, np.float32),
        "zeros": np.zeros(count, np.float32),
    }[kind]
    assert by_hand(blosc2_chunk.compress(values)) == values.tobytes()


def test_a_stored_blosc2_chunk_may_be_made_by_hand() -> None:
    values = np.array([0.5, -1.0, 0.25], np.float32)
    sizes = struct.pack("<3I", 12, 12, 44)
    head = b"\5\1\7\4" + sizes + b"\1\0\0\0\0\0\5" + bytes(9)
    chunk = memoryview(head + values.tobytes())
    assert np.array_equal(blosc2_chunk.decompress(chunk, 3), values)


def test_zeros_need_no_more_than_a_blosc2_header() -> None:
    zeros = blosc2_chunk.compress(np.zeros(1000, np.float32))
    assert len(zeros) == blosc2_chunk.HEADER_BYTES
    assert codec("f32-blosc2").decode(zeros, bounds_of(0, 1000)).floats().tolist() == [0.0] * 1000
