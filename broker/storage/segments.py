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

**Sealed.** In format 2 each of them says who wrote it, too. Seals are made with a key, as `seal`
has them. Whoever lacks the key reads the records all the same.

    segment header                                        record
     88  32  `before`: the seal of record `first` - 1       36  32  seal, covers the one before
    120  32  seal of bytes 0 to 119                         68  16  mark of bytes 0 to 67
    152   8  digest of bytes 0 to 151                       84   8  digest of bytes 0 to 83, salted
                                                            92   n  body

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

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from narrows.broker.storage.disk import Files
from narrows.broker.storage.durable_files import Damaged, StateError
from narrows.broker.storage.names import segment_name, segment_number
from narrows.broker.storage.seal import MARK_BYTES, NO_SEAL, SEAL_BYTES, SealKey, altered
from narrows.broker.storage.window import FileWindow
from narrows.proto.errors import ErrorCode

FORMAT: Final = 1
SEALED_FORMAT: Final = 2
SEGMENT_HEADER_BYTES: Final = 96
RECORD_HEADER_BYTES: Final = 44
"""Bytes of the headers in format 1."""
SEALED_SEGMENT_HEADER_BYTES: Final = SEGMENT_HEADER_BYTES + 2 * SEAL_BYTES
SEALED_RECORD_HEADER_BYTES: Final = RECORD_HEADER_BYTES + SEAL_BYTES + MARK_BYTES
RUN_ID_BYTES_MAX: Final = 44

_MAGIC: Final = b"NARROWSJ"
_MARKER: Final = b"\x9dREC"
_SEGMENT: Final = struct.Struct("<8sIQQQQ44s")
_RECORD: Final = struct.Struct("<4sQQQQ")
_DIGEST: Final = struct.Struct("<Q")


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
    format: int = FORMAT
    before: bytes = NO_SEAL
    """The seal of record `first` - 1, if the segment is sealed."""
    seal: bytes = NO_SEAL
    """The seal of the header, likewise."""
    is_adopted: bool = False
    """The file was written before the journal was sealed: its own seals say nothing."""

    @property
    def is_sealed(self) -> bool:
        return self.format == SEALED_FORMAT

    @property
    def header_bytes(self) -> int:
        return SEALED_SEGMENT_HEADER_BYTES if self.is_sealed else SEGMENT_HEADER_BYTES

    @property
    def record_header_bytes(self) -> int:
        return SEALED_RECORD_HEADER_BYTES if self.is_sealed else RECORD_HEADER_BYTES


class _RecordHeader(NamedTuple):
    body_bytes: int
    number: int
    durable: int
    body_digest: int
    seal: bytes
    content: bytes
    """The bytes before the digest."""

    def is_marked(self, segment: Segment, key: SealKey) -> bool:
        """True if the header was written with the key, for this segment."""
        return key.mark(segment.seal, self.content[:-MARK_BYTES]) == self.content[-MARK_BYTES:]


def segment_header(segment: Segment, run_id: str, key: SealKey | None = None) -> bytes:
    """The first bytes of a segment's file. With a key they are sealed, and so is `segment`."""
    assert segment.first >= 1 and len(run_id.encode()) <= RUN_ID_BYTES_MAX, (segment, run_id)
    number, name = segment_number(segment.name), run_id.encode()
    segment.format = SEALED_FORMAT if key else FORMAT
    fields = (segment.format, number, segment.first, segment.copied, segment.salt)
    content = _SEGMENT.pack(_MAGIC, *fields, name)
    if key:
        content += segment.before
        segment.seal = key.seal("segment", [content])
        content += segment.seal
    return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content))


def record_header(
    segment: Segment, number: int, durable: int, body: Sequence[memoryview],
    key: SealKey | None = None, seal: bytes = NO_SEAL,
) -> bytes:  # fmt: skip
    """The bytes in front of the parts of a body. With a key `seal` is that of the record."""
    assert number >= 1 and 0 <= durable < number, f"record {number} after {durable}"
    assert segment.is_sealed == (key is not None), segment
    hasher = xxhash.xxh3_64()
    for part in body:
        hasher.update(part)
    body_bytes = sum(map(len, body))
    content = _RECORD.pack(_MARKER, body_bytes, number, durable, hasher.intdigest())
    if key:
        content += seal
        content += key.mark(segment.seal, content)
    return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content, segment.salt))


def scan_segment(
    files: Files, name: str, run_id: str, key: SealKey | None = None
) -> Segment | None:
    """The content of a segment; None if its creation was cut short and it never had a record.

    With a key all seals in it are compared. Raises StateError if one differs, or if the segment
    belongs to another run or format; OSError, Damaged.
    """
    window = FileWindow(files, name)
    content = bytes(window.at(0, SEALED_SEGMENT_HEADER_BYTES))
    _refuse_other_format(name, content)
    segment = _header_of(name, content)
    if segment is None:
        if _is_unfinished(window, content):
            return None
        return Segment(name, 0, 0, 0, -1, damage=f"{name}: byte 0: its header does not verify")
    _, _, number, *_, run = _SEGMENT.unpack_from(content)
    owner = run.rstrip(b"\0").decode(errors="replace")
    if (owner, segment_name(number)) != (run_id, name):
        got = f"{segment_name(number)} of run {owner}"
        raise _refusal(f"{name} is another file", f"{name} of run {run_id}", got)
    if key and not segment.is_sealed:
        raise altered(name, "it is not sealed")
    if key and key.seal("segment", [content[: _SEGMENT.size + SEAL_BYTES]]) != segment.seal:
        raise altered(name, "its header does not match its seal")
    _scan_records(window, segment, key)
    return segment


def _is_unfinished(window: FileWindow, content: bytes) -> bool:
    """True if there is a part of a header at most, and no record ever was."""
    if window.ends_with_zeros(SEGMENT_HEADER_BYTES):
        return True
    # A record of format 1 may lie where a sealed header has its end.
    is_sealed = int.from_bytes(content[8:12], "little") in (0, SEALED_FORMAT)
    has_record = content[SEGMENT_HEADER_BYTES:].startswith(_MARKER)
    return is_sealed and not has_record and window.ends_with_zeros(SEALED_SEGMENT_HEADER_BYTES)


def _refuse_other_format(name: str, content: bytes) -> None:
    if len(content) < 12 or not content.startswith(_MAGIC):
        return
    number = int.from_bytes(content[8:12], "little")
    if number not in (0, FORMAT, SEALED_FORMAT):  # Zero is an unfinished header.
        expected = f"format {FORMAT} or {SEALED_FORMAT}"
        raise _refusal(f"{name} cannot be read", expected, f"format {number}")


def _header_of(name: str, content: bytes) -> Segment | None:
    """A segment as its header has it; None if the header does not verify."""
    if len(content) < SEGMENT_HEADER_BYTES:
        return None
    magic, number, _, first, copied, salt, _ = _SEGMENT.unpack_from(content)
    segment = Segment(name, first, copied, salt, first - 1, first - 1, first - 1, format=number)
    end = segment.header_bytes - _DIGEST.size
    digest = _DIGEST.pack(xxhash.xxh3_64_intdigest(content[:end]))
    if magic != _MAGIC or content[end : segment.header_bytes] != digest:
        return None
    if segment.is_sealed:
        seals = content[_SEGMENT.size : end]
        segment.before, segment.seal = seals[:SEAL_BYTES], seals[SEAL_BYTES:]
    return segment


def _refusal(message: str, expected: str, got: str) -> StateError:
    remedy = "use the state directory and the version of Narrows that wrote it"
    return StateError(
        ErrorCode.STATE_DAMAGED, message, expected=expected, got=got, remedy=remedy
    )  # fmt: skip


def _scan_records(window: FileWindow, segment: Segment, key: SealKey | None) -> None:
    """Finds the records that count, and behind them every trace of later ones."""
    offset, before = segment.header_bytes, segment.before
    for start, head in _heads(window, segment):
        if not _body_verifies(window, start + segment.record_header_bytes, head):
            break
        if key:
            _compare_seals(window, start, segment, head, key, before)
        before, segment.last = head.seal, head.number
        _take_notice(segment, head)
        offset = start + segment.record_header_bytes + head.body_bytes
    if window.ends_with_zeros(offset):
        return
    segment.damage = f"{window.name}: byte {offset}: record {segment.last + 1} does not verify"
    # Later headers that verify tell which records were durable, so they are searched for.
    while (offset := window.find(_MARKER, offset)) >= 0:
        trace = _head_at(window, offset, segment)
        if trace and (not key or trace.is_marked(segment, key)):
            _take_notice(segment, trace)
        offset += 1


def _compare_seals(
    window: FileWindow,
    start: int,
    segment: Segment,
    head: _RecordHeader,
    key: SealKey,
    before: bytes,
) -> None:
    """Raises StateError unless the record was written with the key, behind `before`."""
    start += segment.record_header_bytes
    body = window.pieces(start, start + head.body_bytes)
    if not head.is_marked(segment, key) or key.record(before, head.number, body) != head.seal:
        raise altered(segment.name, f"record {head.number} does not match its seal")


def _take_notice(segment: Segment, head: _RecordHeader) -> None:
    segment.newest = max(segment.newest, head.number)
    segment.proven = max(segment.proven, head.durable)


def _heads(window: FileWindow, segment: Segment) -> Iterator[tuple[int, _RecordHeader]]:
    """Offset and header of each record as long as headers verify; bodies are not looked at."""
    offset, number = segment.header_bytes, segment.first
    while (head := _head_at(window, offset, segment)) and head.number == number:
        stop = offset + segment.record_header_bytes + head.body_bytes
        if stop > window.size_bytes:
            return
        yield offset, head
        offset, number = stop, number + 1


def _head_at(window: FileWindow, offset: int, segment: Segment) -> _RecordHeader | None:
    """The header at `offset`, None if none verifies there."""
    size_bytes = segment.record_header_bytes
    content = bytes(window.at(offset, size_bytes))
    if len(content) < size_bytes or content[: len(_MARKER)] != _MARKER:
        return None
    content, digest = content[: -_DIGEST.size], content[-_DIGEST.size :]
    if _DIGEST.pack(xxhash.xxh3_64_intdigest(content, segment.salt)) != digest:
        return None
    _, size_bytes, number, durable, body_digest = _RECORD.unpack_from(content)
    seal = content[_RECORD.size :][:SEAL_BYTES]
    return _RecordHeader(size_bytes, number, durable, body_digest, seal, content)


def _body_verifies(window: FileWindow, start: int, head: _RecordHeader) -> bool:
    hasher = xxhash.xxh3_64()
    for piece in window.pieces(start, start + head.body_bytes):
        hasher.update(piece)
    return bool(hasher.intdigest() == head.body_digest)


def seal_of(files: Files, segment: Segment, number: int) -> bytes:
    """The seal of one of the records of a segment that count, or of the record before them.

    `NO_SEAL` where none was made. Raises OSError, Damaged.
    """
    assert segment.first - 1 <= number <= segment.last, (segment, number)
    seal = segment.before
    for _, head in _heads(FileWindow(files, segment.name), segment):
        if head.number > number:
            break
        seal = head.seal
    return seal or NO_SEAL


def read_records(files: Files, segment: Segment, first: int) -> Iterator[Record]:
    """The records of a segment that count, from `first` on.

    Raises OSError, and Damaged if they are not there any more.
    """
    window = FileWindow(files, segment.name)
    number = segment.first
    for offset, head in _heads(window, segment):
        if number > segment.last:
            return
        if number >= first:
            body, start = bytearray(), offset + segment.record_header_bytes
            for piece in window.pieces(start, start + head.body_bytes):
                body += piece
            if xxhash.xxh3_64_intdigest(body) != head.body_digest:
                break
            yield Record(number, memoryview(body))
        number += 1
    if number <= segment.last:
        raise Damaged(f"{segment.name}: record {number} does not verify any more")
