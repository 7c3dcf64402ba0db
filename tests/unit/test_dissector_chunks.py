"""Payloads as the dissector sees them: stored ones, and the first wrong byte of damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from narrows.proto.dissector.chunks import Payload

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, Any] = json.loads((GOLDEN / "codecs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("case", "codec"), [(case, codec) for case in CASES for codec in CASES[case]["codecs"]]
)
def test_stored_payloads(case: str, codec: str) -> None:
    bounds, scales = CASES[case]["bounds"], bytes.fromhex(CASES[case]["scales"])
    data = bytes.fromhex(CASES[case]["codecs"][codec]["payload"])
    payload = Payload(codec, bounds[-1], data, 1000)
    assert payload.read() is None
    assert payload.fields[-1].end == 1000 + len(data)
    if codec.endswith("-zstd"):
        (found,) = [each for each in payload.fields if each.name == "scales"]
        wide = np.frombuffer(scales, "<u2").astype(np.uint32) << np.uint32(16)
        assert found.plain == wide.view(np.float32).tolist()


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


ONE = b"\x80\x3f"
"""The scale 1."""
FRAME = frame(bytes(300))
"""Its one block has nine bytes."""
BLOSC2 = struct.pack("<4B3I15sB", 5, 1, 0x97, 4, 40, 40, 72, b"\1\0\0\0\0\0\5" + bytes(8), 0)


def blosc2(at: int, data: bytes) -> bytes:
    """A chunk of ten values with other bytes at one place of its header."""
    chunk = BLOSC2 + bytes(40)
    return chunk[:at] + data + chunk[at + len(data) :]


@pytest.mark.parametrize(
    ("codec", "count", "data", "at", "code", "expected"),
    [
        ("nothing", 1, b"", 0, "unknown_codec", "one of raw32"),
        ("raw32", 0, b"", 0, "bad_range", "1 to 1048576 elements"),
        ("raw32", 1 << 40, b"", 0, "bad_range", "1 to 1048576 elements"),
        ("raw32", 2, bytes(7), 7, "bad_payload", "8 bytes"),
        ("raw32", 2, bytes(9), 8, "too_large", "at most 8 bytes"),
        ("raw32", 2, bytes(4) + b"\0\0\x80\x7f", 4, "not_finite", "a finite value"),
        ("bf16", 2, b"\0\0\xc0\x7f", 2, "not_finite", "a finite value"),
        ("f32-blosc2", 10, bytes(31), 31, "bad_payload", "32 bytes of header"),
        ("f32-blosc2", 10, bytes(73), 72, "too_large", "at most 72 bytes"),
        ("f32-blosc2", 10, blosc2(0, b"\4"), 0, "bad_payload", "format 5"),
        ("f32-blosc2", 10, blosc2(1, b"\2"), 1, "bad_payload", "codec_format 1"),
        ("f32-blosc2", 10, blosc2(2, b"\0"), 2, "bad_payload", "one of 07 85 87 95 97"),
        ("f32-blosc2", 10, blosc2(3, b"\x08"), 3, "bad_payload", "item_bytes 4"),
        ("f32-blosc2", 10, blosc2(4, b"\x29"), 4, "bad_payload", "content_bytes 40"),
        ("f32-blosc2", 10, blosc2(8, b"\0"), 8, "bad_payload", "1 to 40"),
        ("f32-blosc2", 10, blosc2(12, b"\x47"), 12, "bad_payload", "chunk_bytes 72"),
        ("f32-blosc2", 10, blosc2(22, b"\6"), 22, "bad_payload", "05 (shuffle"),
        ("f32-blosc2", 10, blosc2(31, b"\x20"), 31, "bad_payload", "00 or 10"),
        ("f32-blosc2", 10, blosc2(31, b"\x10"), 32, "bad_payload", "nothing behind zeros"),
        ("f32-blosc2", 10, blosc2(32, b"\0\0\x80\x7f"), 32, "not_finite", "finite values"),
        ("int8-zstd", 300, b"", 0, "bad_payload", "a scale or the magic"),
        ("int8-zstd", 300, FRAME, 0, "bad_payload", "at least one scale"),
        ("int8-zstd", 300, ONE, 2, "bad_payload", "a scale or the magic"),
        ("int8-zstd", 300, ONE + b"\x28\xb5\x2f", 5, "bad_payload", "a scale or the magic"),
        ("int8-zstd", 300, ONE + b"\x28\xb5\x2f\xfc", 2, "bad_payload", "a scale (0 or"),
        ("int8-zstd", 300, ONE + b"\x7f\x0d" + FRAME, 2, "bad_payload", "a scale (0 or"),
        ("int8-zstd", 300, ONE + b"\x00\x80" + FRAME, 2, "bad_payload", "a scale (0 or"),
        ("int8-zstd", 300, ONE + b"\x80\x7f" + FRAME, 2, "not_finite", "a finite scale"),
        ("int8-zstd", 2, ONE * 3 + FRAME, 4, "bad_payload", "a zstd frame behind"),
        ("int8-zstd", 301, ONE + FRAME, 7, "bad_payload", "301 bytes of content"),
        ("int8-zstd", 300, ONE + FRAME + b"\0", 2 + len(FRAME), "bad_payload", "the end of"),
        ("int8-zstd", 300, ONE + FRAME[:-1], 1 + len(FRAME), "bad_payload", "9 bytes of a block"),
        ("int8-zstd", 1, ONE + b"\0" * 80, 2, "bad_payload", "a zstd frame behind"),
        ("int8-zstd", 300, (ONE + FRAME).ljust(367, b"\0"), 366, "too_large", "at most 366"),
        ("int8-zstd", 3, ONE + frame(b"\1\x80\1"), 2, "bad_payload", "codes from"),
        ("int4-zstd", 4, ONE + frame(b"\1\x81"), 2, "bad_payload", "codes from"),
        ("int4-zstd", 3, ONE + frame(b"\1\x11"), 2, "bad_payload", "0 in the unused half"),
    ],
)
def test_the_first_wrong_byte(
    codec: str, count: int, data: bytes, at: int, code: str, expected: str
) -> None:
    wrong = Payload(codec, count, data, 1000).read()
    assert wrong is not None
    assert (wrong.at, wrong.code) == (1000 + at, code)
    assert wrong.expected.startswith(expected)


def by_hand(flags: int, rest: bytes) -> bytes:
    return ONE + b"\x28\xb5\x2f\xfd" + bytes([flags]) + rest


RAW = b"\x19\0\0" + b"\1\2\3"
"""The last block: three bytes as they are."""


def test_every_form_of_a_zstd_header() -> None:
    for flags, rest in [
        (0x20, b"\3"),
        (0x22, b"\0\0\3"),  # Dictionary 0 is none.
        (0x80, b"\0" + b"\3\0\0\0"),
        (0x80, b"\x68" + b"\3\0\0\0"),  # 8 MiB.
        (0xC0, b"\0" + b"\3" + bytes(7)),
        (0xE0, b"\3" + bytes(7)),
    ]:
        payload = Payload("int8-zstd", 3, by_hand(flags, rest + RAW))
        assert payload.read() is None, f"{flags:02x}"
    content = bytes(range(100)) * 3
    block = ((len(content) << 3) + 1).to_bytes(3, "little") + content
    two_bytes = (len(content) - 256).to_bytes(2, "little")
    assert Payload("int8-zstd", 300, by_hand(0x60, two_bytes + block)).read() is None
    checked = ONE + frame(b"\1\2\3", write_checksum=True)
    payload = Payload("int8-zstd", 3, checked)
    assert payload.read() is None and "checksum" in [each.name for each in payload.fields]


@pytest.mark.parametrize(
    ("flags", "rest", "at", "expected"),
    [
        (0x28, b"\3" + RAW, 6, "a descriptor whose reserved"),
        (0x00, b"\0" + RAW, 6, "a frame that tells its content size"),
        (0x80, b"\x70" + b"\3\0\0\0" + RAW, 7, "a window of at most 8388608"),
        (0x21, b"\1\3" + RAW, 7, "no dictionary"),
        (0x20, b"\4" + RAW, 7, "3 bytes of content"),
        (0x20, b"\3" + b"\x1f\0\0", 8, "a block of a known type"),
        (0x20, b"\3" + b"\0\0\0" * 5, 20, "at most 4 blocks"),
        (0x20, b"\3" + b"\x19\0", 10, "the head of a block"),
        (0x24, b"\3" + RAW, 14, "a checksum"),
        (0x24, b"\3" + RAW + bytes(4), 2, "a frame that decompresses"),
        (0xE0, b"\3", 8, "the content size"),
    ],
)
def test_the_first_wrong_byte_of_a_zstd_header(
    flags: int, rest: bytes, at: int, expected: str
) -> None:
    wrong = Payload("int8-zstd", 3, by_hand(flags, rest)).read()
    assert wrong is not None
    assert (wrong.at, wrong.code) == (at, "bad_payload")
    assert wrong.expected.startswith(expected)


def test_the_smallest_and_the_largest_scale() -> None:
    payload = Payload("int8-zstd", 3, b"\x80\x0d\x80\x71\0\0" + frame(b"\1\2\3"))
    assert payload.read() is None
    assert payload.fields[0].plain == [2.0**-100, 2.0**100, 0.0]


def test_how_many_codes_are_zero() -> None:
    payload = Payload("int4-zstd", 5, ONE + frame(b"\x10\x01\x00"))
    assert payload.read() is None
    assert payload.fields[-1].note == "60% are 0"
