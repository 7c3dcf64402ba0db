"""Segments of a journal: the scan of all of them together, and the dissector's view of each.

The first byte of an input chooses. 0: the rest is one file. 2: it is one file of a sealed journal.
3: it describes up to three segments of a sealed journal, see `Forger`. Else it describes up to
three segments whose digests verify, so that the rules about numbers are reached: see `crafted`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import xxhash
from fuzz.memory_files import MemoryFiles
from fuzz.target import Target
from hypothesis import strategies as st

from narrows.broker.storage.chain import Chain
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.names import segment_name
from narrows.broker.storage.replay import read_records
from narrows.broker.storage.seal import NO_SEAL, SealKey
from narrows.broker.storage.segments import Segment, record_header, segment_header
from narrows.proto.dissector import journal as dissector
from narrows.proto.errors import NarrowsError

GOLDEN = Path(__file__).parents[2] / "golden"
RUN = "0123456789abcdef"
KEY = SealKey(bytes(range(32)))
SEALED_FILE, SEALED_CRAFTED = 2, 3
LARGE = 200
"""Bytes from here on stand for numbers near 2^64."""


def run(data: bytes) -> None:
    if data[:1] == bytes((SEALED_FILE,)):
        sealed({segment_name(1): data[1:]}, Chain(KEY), WRITTEN)
        return
    if data[:1] == bytes((SEALED_CRAFTED,)):
        forger = Forger(data[1:])
        sealed(forger.files, forger.chain(), forger.written)
        return
    files = crafted(data[1:]) if data[:1] and data[0] else {segment_name(1): data[1:]}
    for content in files.values():
        dissected(content)
    try:
        journal = Journal.open(MemoryFiles(files), run_id=RUN, segment_bytes=512)
    except NarrowsError:
        return
    assert journal.first >= 1 and journal.durable >= 0
    try:
        numbers = [number for number, _, _ in read_records(journal, journal.first)]
    except NarrowsError:
        return
    assert numbers == list(range(journal.first, journal.first + len(numbers)))


def sealed(files: dict[str, bytes], chain: Chain, written: set[tuple[int, bytes]]) -> None:
    """Opens and reads a sealed journal: only records that were `written` with the key come out."""
    for content in files.values():
        dissected(content)
    try:
        journal = Journal.open(MemoryFiles(files), run_id=RUN, segment_bytes=512, chain=chain)
        read = [(each.number, bytes(each.body)) for each in journal.records(journal.first)]
    except NarrowsError:
        return
    assert set(read) <= written, f"forged: {set(read) - written}"
    assert len(journal.seal_of(journal.newest)) == len(NO_SEAL)


def dissected(content: bytes) -> None:
    """The dissector never raises; it may stop at a fault."""

    def read(offset: int, count: int) -> bytes:
        return content[offset : offset + count]

    for found in dissector.segment(read, len(content)):
        assert all(0 <= fault.at <= len(content) for fault in found.faults)


def crafted(data: bytes) -> dict[str, bytes]:
    """Per segment: number of records, `first`, `copied`; per record: flags, number, `durable`,
    bytes of the body, body. Flag 1 breaks the body's digest, 2 the header's, 4 the size."""
    reader, files = Reader(data), dict[str, bytes]()
    for number in (1, 2, 3):
        if reader.is_empty:
            break
        count, first, copied = reader.byte() % 8, reader.number(), reader.number()
        content = struct.pack("<8sIQQQQ44s", b"NARROWSJ", 1, number, first, copied, 7, RUN.encode())
        content += digest(content)
        for _ in range(count):
            content += record(reader)
        files[segment_name(number)] = content + bytes(reader.byte())
    return files


class Reader:
    """Bytes of an input, zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        byte = self.byte()
        return byte if byte < LARGE else 2**64 - 256 + byte


class Forger:
    """Segments of a sealed journal, each record sealed with the key unless a flag says otherwise.

    Per segment: flags, number of records, `first`, `copied`; per record: flags, number, `durable`,
    bytes of the body, body. Flags of a segment: 1 it follows no record, 2 its seal is broken, 4 it
    is of format 1, 8 it was adopted, 16 a checkpoint has the seal of its last record, 32 another
    one. Flags of a record: 1 its seal is broken, 2 its mark, 4 it follows no record.
    """

    def __init__(self, data: bytes) -> None:
        self.files: dict[str, bytes] = {}
        self.written: set[tuple[int, bytes]] = set()
        self._adopted: dict[str, str] = {}
        self._anchors: dict[int, bytes] = {}
        self._reader, self._seal, self._number = Reader(data), NO_SEAL, 0
        for number in (1, 2, 3):
            if self._reader.is_empty:
                break
            self._segment(segment_name(number))

    def chain(self) -> Chain:
        """The chain that such a directory would have."""
        return Chain(KEY, self._adopted, self._anchors, min(self._anchors, default=None))

    def _segment(self, name: str) -> None:
        reader = self._reader
        flags, count = reader.byte(), reader.byte() % 8
        first, copied = max(1, reader.number()), reader.number()
        segment = Segment(name, first, copied, 7, first - 1)
        segment.before = NO_SEAL if flags & 1 else self._seal
        key = None if flags & 4 else KEY
        content = bytearray(segment_header(segment, RUN, key))
        if flags & 2 and key:
            content[120] ^= 1
            content[-8:] = digest(bytes(content[:-8]))
        self._seal = segment.before
        for _ in range(count):
            content += self._record(segment, is_adopted=bool(flags & 8))
        self.files[name] = bytes(content)
        if flags & 8:
            self._adopted[name] = KEY.seal("file", [content]).hex()
        if flags & 48:
            self._anchors[self._number] = self._seal if flags & 16 else bytes(31) + b"\1"

    def _record(self, segment: Segment, *, is_adopted: bool) -> bytes:
        reader = self._reader
        flags, number = reader.byte(), max(1, reader.number())
        durable, body = min(reader.number(), number - 1), reader.take(reader.byte())
        before = NO_SEAL if flags & 4 else self._seal
        seal = bytearray(KEY.record(before, number, [body]))
        seal[0] ^= flags & 1
        key = (SealKey(bytes(32)) if flags & 2 else KEY) if segment.is_sealed else None
        header = record_header(segment, number, durable, [memoryview(body)], key, bytes(seal))
        if is_adopted or (segment.is_sealed and not flags & 3):
            self.written.add((number, body))
        self._seal, self._number = bytes(seal), number
        return header + body


def record(reader: Reader) -> bytes:
    flags, number, durable = reader.byte(), reader.number(), reader.number()
    body = reader.take(reader.byte())
    size = len(body) if not flags & 4 else len(body) + reader.number()
    body_digest = xxhash.xxh3_64_intdigest(body) ^ flags & 1
    header = struct.pack("<4sQQQQ", b"\x9dREC", size % 2**64, number, durable, body_digest)
    return header + digest(header, 7 ^ flags >> 1 & 1) + body


def digest(content: bytes, seed: int = 0) -> bytes:
    return xxhash.xxh3_64_intdigest(content, seed).to_bytes(8, "little")


def seeds() -> list[bytes]:
    stored = json.loads((GOLDEN / "journal.json").read_text(encoding="utf-8"))
    files = [bytes.fromhex("".join(file["hex"])) for file in stored["files"].values()]
    state = GOLDEN / "state-format-1/journal"
    files += [path.read_bytes().rstrip(b"\0") for path in sorted(state.iterdir())]
    return [
        *(b"\0" + content for content in files),
        *(b"\1" + text for text in CRAFTED),
        *(bytes((SEALED_FILE,)) + content for content in Forger(SEALED[0]).files.values()),
        *(bytes((SEALED_CRAFTED,)) + text for text in SEALED),
    ]


def segment(first: int, copied: int, *bodies: bytes) -> bytes:
    """The description of a whole segment."""
    records = [
        bytes((0, first + index, max(0, first + index - 1), len(body))) + body
        for index, body in enumerate(bodies)
    ]
    return bytes((len(bodies), first, copied)) + b"".join(records) + b"\x05"


CRAFTED = (
    segment(1, 0, b"a", b"bc"),
    segment(1, 0, b"a", b"b", b"c") + segment(3, 3, b"c", b"d"),
    segment(1, 0, b"a") + segment(2, 4, b"x") + segment(9, 0, b"y"),
    b"\x02\xff\xff\0\xff\xfe\x02ab",
)


def flagged(flags: int, *segment_of: Any) -> bytes:
    """The same for a `Forger`."""
    return bytes((flags,)) + segment(*segment_of)[:-1]


SEALED = (
    flagged(16, 1, 0, b"a", b"bc", b"def"),
    flagged(0, 1, 0, b"a", b"b") + flagged(16, 3, 2, b"c"),
    flagged(12, 1, 0, b"a") + flagged(1, 2, 1, b"b"),
    flagged(0, 1, 0, b"a") + flagged(32, 2, 1, b"b"),
)
WRITTEN = Forger(SEALED[0]).written
EXAMPLES = st.binary(max_size=120).map(lambda data: b"\1" + data) | st.lists(
    st.builds(segment, st.integers(0, 9), st.integers(0, 12), *[st.binary(max_size=9)] * 2),
    max_size=3,
).map(lambda parts: b"\1" + b"".join(parts))

SEALED_EXAMPLES = st.lists(
    st.builds(
        flagged, st.integers(0, 63), st.integers(0, 9), st.integers(0, 12),
        *[st.binary(max_size=9)] * 2,
    ),
    max_size=3,
).map(lambda parts: bytes((SEALED_CRAFTED,)) + b"".join(parts))  # fmt: skip

TARGET = Target("segments", run, seeds, EXAMPLES | SEALED_EXAMPLES)
