"""Payloads that no encoder writes: refused by code, before they can do harm; never anything else.

The payload's digest catches damage. This is about malice.
"""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import zstandard
from codec_cases import CODECS, CODED, LIMIT, f32, fragment_of, push, refused
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.codec import DecodedChunk, decode_chunk, encode_values, values_of
from narrows.proto.codec.payload import payload_bytes_max
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.layout import Fragment
from narrows.proto.messages import CodecName

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


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 2.0**-101, 1e-45, 2.0**101, 3e38]
)
def test_scales_out_of_bounds_are_refused(codec: CodecName, scale: float) -> None:
    payload = (b"\1\0" if scale == 1e-45 else half(scale)) + raw_frame(b"\1")
    code = ErrorCode.BAD_PAYLOAD if np.isfinite(scale) else ErrorCode.NOT_FINITE
    assert refused(fragment_of(1), codec, payload) is code


@pytest.mark.parametrize(
    ("codec", "count", "codes"),
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
    codec: CodecName, count: int, codes: bytes
) -> None:
    payload = half(1) + raw_frame(codes)
    assert refused(fragment_of(count), codec, payload) is ErrorCode.BAD_PAYLOAD


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
    fragment, payload = fragment_of(3), half(2) + BAD_FRAMES[what]
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


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_beyond_the_bound_is_too_large(codec: CodecName) -> None:
    fragment = fragment_of(1, 3)
    largest = payload_bytes_max(codec, 4, 2)
    assert refused(fragment, codec, bytes(largest + 1)) is ErrorCode.TOO_LARGE


def test_a_chunk_that_the_fragment_does_not_have_is_refused() -> None:
    for index in (-1, 2, 1 << 48):
        with pytest.raises(RemoteProtocolError, match="expected 0 to 1, got") as caught:
            decode_chunk(fragment_of(300), "int4-zstd", 256, index, b"")
        assert caught.value.code is ErrorCode.BAD_CHUNK


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_does_not_refer_to_the_payload(codec: CodecName) -> None:
    fragment = fragment_of(300, 7)
    payload = bytearray(b"x" + good_payload(fragment, codec))
    # In the middle of a message a payload stands at any address.
    chunk = decode_chunk(fragment, codec, 512, 0, memoryview(payload)[1:])
    before = values_of(fragment, [chunk])
    payload[:] = bytes(len(payload))
    assert values_of(fragment, [chunk]).tolist() == before.tolist()
    assert not (chunk.codes.flags.writeable or chunk.scales.flags.writeable)


fragments = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(lambda n: fragment_of(*n))


@pytest.mark.parametrize("codec", CODECS)
@given(fragment=fragments, data=st.data())
def test_arbitrary_and_damaged_payloads_do_no_harm(
    codec: CodecName, fragment: Fragment, data: st.DataObject
) -> None:
    decode(fragment, codec, data.draw(st.binary(max_size=200)))
    count = fragment.elements if codec == "int8-zstd" else (fragment.elements + 1) // 2
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
