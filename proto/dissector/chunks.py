"""Payloads of chunks: sizes, scales, frames and codes as PROTOCOL.md, section 7, has them.

The number of spans comes from the layout, which is not known here. It shows all the same: no scale
has the bytes with which a zstd frame begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import zstandard

from narrows.proto.dissector.findings import Field, Plain, Wrong
from narrows.proto.dissector.tables import CHUNK_ELEMENTS_MAX, PAYLOAD_BYTES_MAX

BLOSC2_HEADER_BYTES: Final = 32
BLOSC2_FLAGS: Final = (0x07, 0x85, 0x87, 0x95, 0x97)
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
WINDOW_BYTES_MAX: Final = 8 << 20
SCALE_BITS: Final = (0x0D80, 0x7180)
"""2^-100 and 2^100 as bfloat16."""

BLOCK_NAMES: Final = ("raw", "repeated", "compressed", "reserved")


def frame_bytes_max(size_bytes: int) -> int:
    """F(b) of PROTOCOL.md: the largest zstd frame of so many bytes."""
    margin = (131072 - size_bytes) // 2048 if size_bytes < 131072 else 0
    return size_bytes + size_bytes // 256 + margin


class Payload:
    """A payload of `count` elements at offset `base`. `fields` holds the parts read so far."""

    def __init__(self, codec: str, count: int, data: bytes | memoryview, base: int = 0) -> None:
        self.fields: list[Field] = []
        self._count, self._data, self._base = count, memoryview(data), base
        self._codec = codec

    def read(self) -> Wrong | None:
        """Reads the payload, and returns the first fault, or None."""
        try:
            if len(self._data) > PAYLOAD_BYTES_MAX:
                raise self._too_large(PAYLOAD_BYTES_MAX)
            if not 1 <= self._count <= CHUNK_ELEMENTS_MAX:
                expected = f"1 to {CHUNK_ELEMENTS_MAX} elements"
                raise self._wrong(0, expected, str(self._count), "bad_range")
            readers: dict[str, Callable[[], None]] = {
                "raw32": lambda: self._floats(4),
                "bf16": lambda: self._floats(2),
                "f32-blosc2": self._blosc2,
                "int8-zstd": lambda: self._quantised(self._count),
                "int4-zstd": lambda: self._quantised(-(-self._count // 2)),
            }
            if self._codec not in readers:
                known = f"one of {', '.join(readers)}"
                raise Wrong(self._base, known, repr(self._codec[:64]), "unknown_codec")
            readers[self._codec]()
        except Wrong as wrong:
            return wrong
        return None

    def _field(self, name: str, at: int, size: int, value: Plain, note: str = "") -> None:
        self.fields.append(
            Field(name, self._base + at, self._base + at + size, "", value, note=note)
        )

    def _wrong(self, at: int, expected: str, got: str, code: str = "bad_payload") -> Wrong:
        return Wrong(self._base + at, expected, got, code)

    def _too_large(self, bytes_max: int) -> Wrong:
        return self._wrong(
            bytes_max, f"at most {bytes_max} bytes", f"{len(self._data)} bytes", "too_large"
        )

    def _end(self) -> str:
        return f"the end after {len(self._data)} bytes"

    # Floats.

    def _floats(self, item_bytes: int) -> None:
        size = item_bytes * self._count
        if len(self._data) > size:
            raise self._too_large(size)
        if len(self._data) < size:
            raise self._wrong(len(self._data), f"{size} bytes", self._end())
        bits = np.frombuffer(self._data, "<u4" if item_bytes == 4 else "<u2")
        exponent = 0x7F800000 if item_bytes == 4 else 0x7F80
        self._finite(np.flatnonzero((bits & exponent) == exponent), item_bytes)
        self._field("values", 0, size, f"{self._count} finite values")

    def _finite(self, bad: Any, item_bytes: int) -> None:
        if bad.size:
            at = item_bytes * int(bad[0])
            raise self._wrong(at, "a finite value", f"value {bad[0]} is not", "not_finite")

    def _blosc2(self) -> None:
        data, content = self._data, 4 * self._count
        if len(data) > content + BLOSC2_HEADER_BYTES:
            raise self._too_large(content + BLOSC2_HEADER_BYTES)
        if len(data) < BLOSC2_HEADER_BYTES:
            raise self._wrong(len(data), f"{BLOSC2_HEADER_BYTES} bytes of header", self._end())
        self._exactly("format", 0, 1, 5)
        self._exactly("codec_format", 1, 1, 1)
        flags = data[2]
        self._field("flags", 2, 1, f"{flags:02x}")
        if flags not in BLOSC2_FLAGS:
            known = " ".join(f"{each:02x}" for each in BLOSC2_FLAGS)
            raise self._wrong(2, f"one of {known}", f"{flags:02x}")
        self._exactly("item_bytes", 3, 1, 4)
        self._exactly("content_bytes", 4, 4, content)
        block = int.from_bytes(data[8:12], "little")
        self._field("block_bytes", 8, 4, block)
        if not 1 <= block <= content:
            raise self._wrong(8, f"1 to {content}", str(block))
        self._exactly("chunk_bytes", 12, 4, len(data))
        for at, byte in enumerate(b"\1\0\0\0\0\0\5" + bytes(8), 16):
            if data[at] != byte:
                raise self._wrong(at, f"{byte:02x} (shuffle, then zstd)", f"{data[at]:02x}")
        self._field("filters", 16, 15, "shuffle, then zstd")
        self._blosc2_special(data[31], len(data) > BLOSC2_HEADER_BYTES)
        self._blosc2_content()

    def _blosc2_special(self, special: int, has_more: bool) -> None:
        self._field("special", 31, 1, f"{special:02x}", "all zeros" if special else "")
        if special not in (0, 0x10):
            raise self._wrong(31, "00 or 10", f"{special:02x}")
        if special and has_more:
            raise self._wrong(32, "nothing behind zeros", f"{len(self._data) - 32} bytes")
        if not special and not has_more:
            raise self._wrong(32, "coded bytes", self._end())

    def _blosc2_content(self) -> None:
        import blosc2

        decompress = cast(Callable[..., Any], blosc2.decompress2)
        values = np.empty(self._count, np.float32)
        try:
            # A copy: the library wants bytes that are aligned.
            decompress(bytes(self._data), dst=values, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise self._wrong(32, "content that decodes", str(error)) from error
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise self._wrong(32, "finite values", f"value {bad[0]} is not", "not_finite")
        self._field("values", 32, len(self._data) - 32, f"{self._count} finite values")

    def _exactly(self, name: str, at: int, size: int, expected: int) -> None:
        got = int.from_bytes(self._data[at : at + size], "little")
        self._field(name, at, size, got)
        if got != expected:
            raise self._wrong(at, f"{name} {expected}", str(got))

    # Scales and codes.

    def _quantised(self, content: int) -> None:
        spans = self._scales()
        at = 2 * spans
        largest = at + frame_bytes_max(content)
        if len(self._data) > largest:
            raise self._too_large(largest)
        end = self._zstd(at, content)
        if end != len(self._data):
            left = len(self._data) - end
            raise self._wrong(end, "the end of the payload", f"{left} more bytes")
        self._codes(at, content)

    def _scales(self) -> int:
        """Reads scales up to the zstd frame, and returns their number."""
        scales: list[Field] = []
        field = Field("scales", self._base, self._base, "", parts=scales)
        self.fields.append(field)
        at = 0
        while (bits := bytes(self._data[at : at + 4])) != ZSTD_MAGIC:
            if len(bits) < 2 or (len(bits) < 4 and bits == ZSTD_MAGIC[: len(bits)]):
                end = len(self._data)
                raise self._wrong(end, "a scale or the magic of a zstd frame", self._end())
            if len(scales) == self._count:
                raise self._wrong(at, f"a zstd frame behind {len(scales)} scales", bits[:2].hex())
            self._scale(at, int.from_bytes(bits[:2], "little"), scales)
            at += 2
        field.end = self._base + at
        if not scales:
            raise self._wrong(0, "at least one scale", "a zstd frame")
        return len(scales)

    def _scale(self, at: int, bits: int, scales: list[Field]) -> None:
        shown = f"{bits:04x}"
        if bits & 0x7F80 == 0x7F80:
            raise self._wrong(at, "a finite scale", shown, "not_finite")
        if bits and not SCALE_BITS[0] <= bits <= SCALE_BITS[1]:
            raise self._wrong(at, "a scale (0 or 0d80 to 7180) or a zstd frame", shown)
        value = float(np.array(bits << 16, np.uint32).view(np.float32))
        place = self._base + at
        scales.append(Field(str(len(scales)), place, place + 2, "", value))

    def _zstd(self, start: int, content: int) -> int:
        """Reads the structure of the frame at `start`, and returns its end."""
        at = self._zstd_header(start, content)
        flags, blocks, left = self._data[start + 4], list[Field](), 4 + content // 1024
        field = Field("blocks", self._base + at, self._base + at, "", parts=blocks)
        self.fields.append(field)
        is_last = False
        while not is_last:
            if len(blocks) == left:
                raise self._wrong(at, f"at most {left} blocks", "one more")
            head = int.from_bytes(self._bytes(at, 3, "the head of a block"), "little")
            is_last, kind, size = bool(head & 1), (head >> 1) & 3, head >> 3
            if kind == 3:
                raise self._wrong(at, "a block of a known type", "type 3")
            stored = 1 if kind == 1 else size
            self._bytes(at + 3, stored, f"{stored} bytes of a block")
            text, place = f"{BLOCK_NAMES[kind]} {size}", self._base + at
            blocks.append(Field(str(len(blocks)), place, place + 3 + stored, "", text))
            at += 3 + stored
        field.end = self._base + at
        if flags & 4:
            self._field("checksum", at, 4, self._bytes(at, 4, "a checksum").hex())
            at += 4
        return at

    def _zstd_header(self, start: int, content: int) -> int:
        self._field("zstd_magic", start, 4, ZSTD_MAGIC.hex())
        at = start + 4
        flags = self._bytes(at, 1, "the frame's descriptor")[0]
        is_single, dictionary = bool(flags & 0x20), (0, 1, 2, 4)[flags & 3]
        self._field("descriptor", at, 1, f"{flags:02x}")
        if flags & 8:
            raise self._wrong(at, "a descriptor whose reserved bit is 0", f"{flags:02x}")
        at += 1
        size = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
        if not size:
            raise self._wrong(start + 4, "a frame that tells its content size", f"{flags:02x}")
        if not is_single:
            byte = self._bytes(at, 1, "a window")[0]
            window = ((8 + (byte & 7)) << (10 + (byte >> 3))) // 8
            self._window(at, 1, window)
            at += 1
        if dictionary:
            told = int.from_bytes(self._bytes(at, dictionary, "a dictionary"), "little")
            if told:
                raise self._wrong(at, "no dictionary", str(told))
            at += dictionary
        told = int.from_bytes(self._bytes(at, size, "the content size"), "little")
        told += 256 if size == 2 else 0
        self._field("content_bytes", at, size, told)
        if told != content:
            raise self._wrong(at, f"{content} bytes of content", str(told))
        return at + size

    def _window(self, at: int, size: int, window: int) -> None:
        self._field("window_bytes", at, size, window)
        if window > WINDOW_BYTES_MAX:
            raise self._wrong(at, f"a window of at most {WINDOW_BYTES_MAX}", str(window))

    def _bytes(self, at: int, size: int, what: str) -> bytes:
        found = bytes(self._data[at : at + size])
        if len(found) < size:
            raise self._wrong(len(self._data), what, self._end())
        return found

    def _codes(self, start: int, content: int) -> None:
        """Decompresses and checks the codes. The frame's header must ask for `content` bytes: it
        decides how much memory is taken."""
        frame = bytes(self._data[start:])
        try:
            codes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        except zstandard.ZstdError as error:
            raise self._wrong(start, "a frame that decompresses", str(error)) from error
        if codes.size != content:
            raise self._wrong(start, f"{content} bytes of content", str(codes.size))
        if self._codec == "int4-zstd":
            halves = codes & 15, codes >> 4
            bad = np.flatnonzero((halves[0] == 8) | (halves[1] == 8))
            if self._count % 2 and not bad.size and codes[-1] >> 4:
                last = f"{codes[-1]:02x}"
                raise self._wrong(start, "0 in the unused half of the last byte", last)
            zeros = int((halves[0] == 0).sum() + (halves[1] == 0).sum()) - self._count % 2
        else:
            bad, zeros = np.flatnonzero(codes == 0x80), int((codes == 0).sum())
        if bad.size:
            byte = f"{codes[bad[0]]:02x} in byte {bad[0]} of the content"
            raise self._wrong(start, "codes from the least but one", byte)
        share = zeros / self._count if self._count else 0.0
        self._field("codes", start, len(frame), f"{self._count} codes", f"{share:.0%} are 0")
