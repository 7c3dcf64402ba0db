"""The files of the journal: their bytes, and the scan of one of them.

A segment `journal-00000012.log` is a header and records without gaps between them; the rest, if
any, is zeros. Integers are little-endian, digests are xxh3_64.

    segment header
      0   8  magic `NARROWSJ`
      8   4  format: 1
     12   8  number of the segment, as in its name
     20   8  `first`: the number of its first record; every one before that was durable elsewhere
     28   8  `copied`: see below
     36   8  salt, random: the seed of the digests in the records' headers
     44  44  run id, UTF-8, filled with zeros
     88   8  digest of bytes 0 to 87

    record
      0   4  marker 9d 52 45 43
      4   8  n: bytes of the body
     12   8  number of the record, one more than that of the record before
     20   8  `durable`: the newest record that was durable when this one was written
     28   8  digest of the body
     36   8  digest of bytes 0 to 35, seeded with the segment's salt
     44   n  body

The header of a segment and its name are durable before a record is written, so zeros follow a
header that does not verify; otherwise it was damaged. Thanks to the salt no body can look like a
record, and thanks to the header's own digest a search for headers takes linear time.

**Which records count.** In a segment, those up to the first one that does not verify. A segment
takes the place of the records of older segments from its `first` on: a writer that cannot trust
a file any more (a failed fsync) and one that has opened the journal anew (nobody knows whether
the last records were synced) write the records after the newest durable one again, into a new
segment. It counts once it holds record `copied`, the newest that its writer had read; until then
the older copies do, which may have been durable.

**Which records are lost.** Records up to the highest `durable` of any header that verifies,
wherever it stands, and below the `first` of any segment were durable: one of them that is missing
was lost by the disk. A record beyond that may be missing: its write was interrupted, and nobody was
told."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged, StateError
from narrows.proto.errors import ErrorCode

FORMAT: Final = 1
SEGMENT_HEADER_BYTES: Final = 96
RECORD_HEADER_BYTES: Final = 44
RUN_ID_BYTES_MAX: Final = 44
BLOCK_BYTES: Final = 1 << 20
"""Bytes that a scan reads at once."""

_MAGIC: Final = b"NARROWSJ"
_MARKER: Final = b"\x9dREC"
_NAME: Final = re.compile(r"journal-([0-9]{8,18})\.log")
_SEGMENT: Final = struct.Struct("<8sIQQQQ44s")
_RECORD: Final = struct.Struct("<4sQQQQ")
_DIGEST: Final = struct.Struct("<Q")
_ZEROS: Final = bytes(BLOCK_BYTES)


class Record(NamedTuple):
    """One record, verified."""

    number: int
    body: memoryview


@dataclass
class Segment:
    """One segment. `damage` says where a record should be that does not verify; "": nowhere."""

    name: str
    first: int
    """0: the header is damaged."""
    copied: int
    salt: int
    last: int
    """The newest record in it that counts; `first` - 1 if there is none."""
    newest: int = 0
    """The newest record of which the file has a trace."""
    proven: int = 0
    """The newest record that was durable according to this segment."""
    damage: str = ""


class _SegmentHead(NamedTuple):
    body_bytes: int
    number: int
    durable: int
    body_digest: int


def segment_name(number: int) -> str:
    """Name of a segment's file."""
    return f"journal-{number:08d}.log"


def segment_number(name: str) -> int:
    """The inverse of `segment_name`; 0: not a segment's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and segment_name(int(match[1])) == name else 0


def segment_header(segment: Segment, run_id: str) -> bytes:
    """The first bytes of a segment's file."""
    assert segment.first >= 1 and len(run_id.encode()) <= RUN_ID_BYTES_MAX, (segment, run_id)
    number, name = segment_number(segment.name), run_id.encode()
    fields = (FORMAT, number, segment.first, segment.copied, segment.salt)
    content = _SEGMENT.pack(_MAGIC, *fields, name)
    return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content))


def record_header(salt: int, number: int, durable: int, body: Sequence[memoryview]) -> bytes:
    """The bytes in front of the parts of a body."""
    assert number >= 1 and 0 <= durable < number, f"record {number} after {durable}"
    hasher = xxhash.xxh3_64()
    for part in body:
        hasher.update(part)
    body_bytes = sum(map(len, body))
    content = _RECORD.pack(_MARKER, body_bytes, number, durable, hasher.intdigest())
    return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content, salt))


class _Window:
    """A file through a buffer. It ends where the file ended when the window was made.

    A journal can be larger than memory, so no file is read whole.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.name = name
        self.size_bytes = files.size_bytes(name)
        self._files = files
        self._buffer = bytearray(min(BLOCK_BYTES, self.size_bytes))
        self._start = self._stop = 0

    def at(self, offset: int, count: int) -> memoryview:
        """Up to BLOCK_BYTES from `offset`, valid until the next call."""
        self._fill(offset, count)
        start = offset - self._start
        return memoryview(self._buffer)[start : min(start + count, self._stop - self._start)]

    def find(self, text: bytes, offset: int) -> int:
        """Where `text` begins, at `offset` or later; -1: nowhere."""
        while offset + len(text) <= self.size_bytes:
            self._fill(offset, len(text))
            stop = self._stop - self._start
            place = self._buffer.find(text, offset - self._start, stop)
            if place >= 0:
                return self._start + place
            offset = self._stop - len(text) + 1
        return -1

    def _fill(self, offset: int, count: int) -> None:
        if self._start <= offset and min(offset + count, self.size_bytes) <= self._stop:
            return
        self._start, self._stop = offset, min(offset + BLOCK_BYTES, self.size_bytes)
        target = memoryview(self._buffer)[: self._stop - offset]
        self._files.read(self.name, offset, target)

    def pieces(self, offset: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `offset` to `stop`, in blocks."""
        for start in range(offset, min(stop, self.size_bytes), BLOCK_BYTES):
            yield self.at(start, min(BLOCK_BYTES, stop - start))

    def ends_with_zeros(self, offset: int) -> bool:
        """True if the file has only zeros from `offset` on."""
        pieces = self.pieces(offset, self.size_bytes)
        return all(bytes(piece) == _ZEROS[: len(piece)] for piece in pieces)


def scan_segment(files: Files, name: str, run_id: str) -> Segment | None:
    """The content of a segment; None if its creation was cut short and it never had a record.

    Raises StateError if it belongs to another run or format; OSError, Damaged.
    """
    window = _Window(files, name)
    content = bytes(window.at(0, SEGMENT_HEADER_BYTES))
    _refuse_other_format(name, content)
    if not _header_verifies(content):
        if window.ends_with_zeros(SEGMENT_HEADER_BYTES):
            return None
        return Segment(name, 0, 0, 0, -1, damage=f"{name}: byte 0: its header does not verify")
    _, _, number, first, copied, salt, run = _SEGMENT.unpack_from(content)
    owner = run.rstrip(b"\0").decode(errors="replace")
    if (owner, segment_name(number)) != (run_id, name):
        got = f"{segment_name(number)} of run {owner}"
        raise _refusal(f"{name} is another file", f"{name} of run {run_id}", got)
    segment = Segment(name, first, copied, salt, first - 1, first - 1, first - 1)
    _scan_records(window, segment)
    return segment


def _refuse_other_format(name: str, content: bytes) -> None:
    if len(content) < 12 or not content.startswith(_MAGIC):
        return
    number = int.from_bytes(content[8:12], "little")
    if number not in (0, FORMAT):  # Zero is an unfinished header.
        raise _refusal(f"{name} cannot be read", f"format {FORMAT}", f"format {number}")


def _header_verifies(content: bytes) -> bool:
    if len(content) < SEGMENT_HEADER_BYTES:
        return False
    digest = xxhash.xxh3_64_intdigest(content[: _SEGMENT.size])
    return content.startswith(_MAGIC) and content[_SEGMENT.size :] == _DIGEST.pack(digest)


def _refusal(message: str, expected: str, got: str) -> StateError:
    remedy = "use the state directory and the version of Narrows that wrote it"
    return StateError(
        ErrorCode.STATE_DAMAGED, message, expected=expected, got=got, remedy=remedy
    )  # fmt: skip


def _scan_records(window: _Window, segment: Segment) -> None:
    """Finds the records that count, and behind them every trace of later ones."""
    offset = SEGMENT_HEADER_BYTES
    for start, head in _heads(window, segment):
        if not _body_verifies(window, start, head):
            break
        segment.last = head.number
        _take_notice(segment, head)
        offset = start + RECORD_HEADER_BYTES + head.body_bytes
    if window.ends_with_zeros(offset):
        return
    what = f"record {segment.last + 1} does not verify"
    segment.damage = f"{window.name}: byte {offset}: {what}"
    # Later headers that verify tell which records were durable, so they are searched for.
    while (offset := window.find(_MARKER, offset)) >= 0:
        trace = _head_at(window, offset, segment.salt)
        if trace:
            _take_notice(segment, trace)
        offset += 1


def _take_notice(segment: Segment, head: _SegmentHead) -> None:
    segment.newest = max(segment.newest, head.number)
    segment.proven = max(segment.proven, head.durable)


def _heads(window: _Window, segment: Segment) -> Iterator[tuple[int, _SegmentHead]]:
    """Offset and header of each record as long as headers verify; bodies are not looked at."""
    offset, number = SEGMENT_HEADER_BYTES, segment.first
    while (head := _head_at(window, offset, segment.salt)) and head.number == number:
        stop = offset + RECORD_HEADER_BYTES + head.body_bytes
        if stop > window.size_bytes:
            return
        yield offset, head
        offset, number = stop, number + 1


def _head_at(window: _Window, offset: int, salt: int) -> _SegmentHead | None:
    """The header at `offset`, None if none verifies there."""
    content = window.at(offset, RECORD_HEADER_BYTES)
    if len(content) < RECORD_HEADER_BYTES or bytes(content[: len(_MARKER)]) != _MARKER:
        return None
    (digest,) = _DIGEST.unpack_from(content, _RECORD.size)
    if xxhash.xxh3_64_intdigest(content[: _RECORD.size], salt) != digest:
        return None
    _, *fields = _RECORD.unpack_from(content)
    return _SegmentHead(*fields)


def _body_verifies(window: _Window, offset: int, head: _SegmentHead) -> bool:
    start = offset + RECORD_HEADER_BYTES
    hasher = xxhash.xxh3_64()
    for piece in window.pieces(start, start + head.body_bytes):
        hasher.update(piece)
    return bool(hasher.intdigest() == head.body_digest)


def read_records(files: Files, segment: Segment, first: int) -> Iterator[Record]:
    """The records of a segment that count, from `first` on.

    Raises OSError, and Damaged if they are not there any more.
    """
    window = _Window(files, segment.name)
    number = segment.first
    for offset, head in _heads(window, segment):
        if number > segment.last:
            return
        if number >= first:
            body, start = bytearray(), offset + RECORD_HEADER_BYTES
            for piece in window.pieces(start, start + head.body_bytes):
                body += piece
            if xxhash.xxh3_64_intdigest(body) != head.body_digest:
                break
            yield Record(number, memoryview(body))
        number += 1
    if number <= segment.last:
        raise Damaged(f"{segment.name}: record {number} does not verify any more")
