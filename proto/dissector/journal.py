"""Segments of a broker's journal: header, records and the payloads in them.

`broker/segments.py` and `broker/records.py` describe the bytes. A segment may be in use: it is read
in pieces through a function, and nothing is assumed of what lies behind its last whole record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import xxhash

from narrows.proto.dissector.body import Body
from narrows.proto.dissector.findings import Dissected, Field, FrameFault, Plain, near
from narrows.proto.dissector.parts import read_payload
from narrows.proto.dissector.tables import RECORD_TAGS

MAGIC: Final = b"NARROWSJ"
MARKER: Final = b"\x9dREC"
FORMATS: Final = (1, 2)
"""The second one is sealed; without the key nobody can tell whether a seal is right."""
HEADER_BYTES: Final = (96, 160)
RECORD_HEADER_BYTES: Final = (44, 92)
"""Bytes of the headers in each format."""
BLOCK_BYTES: Final = 1 << 20
HEAD_BYTES_MAX: Final = 64 << 20
"""Longest head of a record that is read."""

_SEGMENT: Final = (
    ("magic", 0, 8), ("format", 8, 4), ("number", 12, 8), ("first", 20, 8), ("copied", 28, 8),
    ("salt", 36, 8), ("run_id", 44, 44), ("digest", 88, 8),
)  # fmt: skip
_RECORD: Final = struct.Struct("<4sQQQQ")

Read = Callable[[int, int], bytes]
"""`read(offset, count)`: up to so many bytes of the file from there."""


def segment(read: Read, size_bytes: int) -> Iterator[Dissected]:
    """Yields the segment's header, then each record followed by its payloads, and at last the
    unused rest of the file, if there is one."""
    head = read(0, HEADER_BYTES[1])
    found = _header(head)
    yield found
    if found.faults:
        return
    salt, number = int.from_bytes(head[36:44], "little"), int.from_bytes(head[20:28], "little")
    at, header_bytes = found.size_bytes, RECORD_HEADER_BYTES[_is_sealed(head)]
    while at < size_bytes:
        content = read(at, header_bytes)
        if any(content):
            record = _record(content, at, number, salt, size_bytes, header_bytes)
        else:
            record = _rest(read, at, size_bytes)
        if read(at, header_bytes) != content:
            continue  # It is being written: what was found may be half of it.
        if record.faults or record.kind == "unused":
            yield record
            return
        stop = at + header_bytes + int(cast(int, record.get("body_bytes")))
        yield from _body(read, record, at + header_bytes, stop)
        if record.faults and record.faults[0].code == "bad_checksum":
            return
        at, number = stop, number + 1


def _is_sealed(head: bytes) -> bool:
    return int.from_bytes(head[8:12], "little") == FORMATS[1]


def _header(head: bytes) -> Dissected:
    size_bytes = HEADER_BYTES[_is_sealed(head)]
    head = head[:size_bytes]
    found = Dissected("segment", len(head))
    if len(head) < size_bytes:
        got = "the end of the file"
        return _faulty(found, head, 0, len(head), f"{size_bytes} bytes of header", got)
    fields = list(_SEGMENT)
    if _is_sealed(head):
        fields[-1:] = [("before", 88, 32), ("seal", 120, 32), ("digest", 152, 8)]
    values: dict[str, Plain] = {}
    for name, at, size in fields:
        content = head[at : at + size]
        number = int.from_bytes(content, "little")
        values[name] = f"{number:016x}" if name in ("salt", "digest") else number
        if name in ("magic", "run_id"):
            values[name] = content.rstrip(b"\0").decode("utf-8", "backslashreplace")
        if name in ("before", "seal"):
            values[name] = content.hex()
        found.fields.append(Field(name, at, at + size, "", values[name]))
    for at, byte in enumerate(MAGIC):
        if head[at] != byte:
            expected = f"{byte:02x} of the magic {MAGIC.decode()}"
            return _faulty(found, head, 0, at, expected, f"{head[at]:02x}")
    if values["format"] not in FORMATS:
        expected = " or ".join(map(str, FORMATS))
        return _faulty(found, head, 0, 8, f"format {expected}", str(values["format"]))
    end = size_bytes - 8
    computed = f"{xxhash.xxh3_64_intdigest(head[:end]):016x}"
    if values["digest"] != computed:
        expected = f"{computed}, the digest of bytes 0 to {end - 1}"
        return _faulty(found, head, 0, end, expected, str(values["digest"]), "bad_checksum")
    return found


def _record(
    content: bytes, at: int, number: int, salt: int, size_bytes: int, header_bytes: int
) -> Dissected:
    found = Dissected("record", len(content))
    for index, byte in enumerate(MARKER):
        if content[index : index + 1] != bytes([byte]):
            expected = f"{byte:02x} of a record's marker, or zeros to the end"
            got = content[index : index + 1].hex() or "the end of the file"
            return _faulty(found, content, at, at + index, expected, got)
    if len(content) < header_bytes:
        expected, end = f"{header_bytes} bytes of header", at + len(content)
        return _faulty(found, content, at, end, expected, "the end of the file")
    _, size, told, durable, body_digest = _RECORD.unpack_from(content)
    end = header_bytes - 8
    own = int.from_bytes(content[end:], "little")
    fields: list[tuple[str, int, int, Plain]] = [
        ("body_bytes", 4, 8, size), ("number", 12, 8, told), ("durable", 20, 8, durable),
        ("body_digest", 28, 8, f"{body_digest:016x}"),
    ]  # fmt: skip
    if header_bytes == RECORD_HEADER_BYTES[1]:
        fields += [("seal", 36, 32, content[36:68].hex()), ("mark", 68, 16, content[68:84].hex())]
    for name, offset, width, value in [*fields, ("digest", end, 8, f"{own:016x}")]:
        found.fields.append(Field(name, at + offset, at + offset + width, "", value))
    computed = int(xxhash.xxh3_64_intdigest(content[:end], salt))
    if own != computed:
        expected = f"{computed:016x}, the salted digest of the {end} bytes before"
        return _faulty(found, content, at, at + end, expected, f"{own:016x}", "bad_checksum")
    if told != number:
        return _faulty(found, content, at, at + 12, f"record {number}", str(told))
    found.size_bytes = header_bytes + size
    if at + found.size_bytes > size_bytes:
        got = f"{size_bytes - at - header_bytes} up to the end of the file"
        return _faulty(found, content, at, at + 4, f"the {size} bytes of a body", got)
    return found


def _body(read: Read, record: Dissected, start: int, stop: int) -> Iterator[Dissected]:
    """Yields the record with its head, then the payloads in its body."""
    told, computed = str(record.get("body_digest")), _digest_of(read, start, stop)
    # While it changes it is being written.
    while told != computed and (again := _digest_of(read, start, stop)) != computed:
        computed = again
    if told != computed:
        expected, place = f"{computed}, the digest of the body", record.at("body_digest")
        record.faults.append(FrameFault(place, "bad_checksum", expected, told))
    length = int.from_bytes(read(start, min(4, stop - start)), "little")
    record.fields.append(Field("head_bytes", start, start + 4, "", length))
    end = start + 4 + length
    if not 0 < length <= min(HEAD_BYTES_MAX, stop - start - 4):
        expected, got = f"1 to {max(1, stop - start - 4)} bytes of head", str(length)
        record.faults.append(FrameFault(start, "bad_record", expected, got))
        record.near = record.near or near(read(start, 16), start, start)
        yield record
        return
    data = read(start + 4, length)
    body = Body(data, start + 4)
    tag, fault = body.tagged(RECORD_TAGS)
    record.kind = tag or record.kind
    record.fields += body.fields
    if fault:
        record.faults.append(fault)
        record.near = record.near or near(data, fault.at, start + 4)
    yield record
    if not fault and tag == "committed":
        yield from _payloads(read, record, end, stop)
    elif not fault and end != stop:
        found = Dissected("blob", stop - end)
        yield _faulty(found, read(end, 16), end, end, "the end of the record", "more bytes")


def _digest_of(read: Read, start: int, stop: int) -> str:
    hasher = xxhash.xxh3_64()
    for at in range(start, stop, BLOCK_BYTES):
        hasher.update(read(at, min(BLOCK_BYTES, stop - at)))
    return hasher.hexdigest()


def _payloads(read: Read, record: Dissected, start: int, stop: int) -> Iterator[Dissected]:
    publication = cast("Mapping[str, Any]", record.get("publication"))
    contributors = cast("list[Mapping[str, Any]]", record.get("contributors"))
    vectors = cast("list[Mapping[str, Any]]", record.get("contributions"))
    at = start
    named = [("publication", "", publication)]
    for index, vector in enumerate(vectors):
        who = str(contributors[index]["learner"]) if index < len(contributors) else "nobody"
        named.append(("contribution", who, vector))
    for kind, who, vector in named:
        for chunk in vector["chunks"]:
            size = int(chunk["payload_bytes"])
            if not 0 <= size <= stop - at:
                found = Dissected(kind, 0)
                expected = f"the {size} bytes of a payload"
                yield _faulty(found, read(at, 16), at, at, expected, f"{stop - at} are left")
                return
            yield _payload(read, kind, who, vector["codec"], chunk, at)
            at += size
    if not vectors and at < stop:
        chunk = {"offset": 0, "elements": (stop - at) // 2, "payload_bytes": stop - at}
        yield _merged(read, chunk, at, stop)
    elif at != stop:
        found = Dissected("blob", stop - at)
        yield _faulty(found, read(at, 16), at, at, "the end of the record", "more bytes")


def _payload(
    read: Read, kind: str, who: str, codec: str, chunk: Mapping[str, int], at: int
) -> Dissected:
    found = Dissected(kind, chunk["payload_bytes"])
    data = read(at, chunk["payload_bytes"])
    told: list[tuple[str, Plain]] = [("codec", codec), ("offset", chunk["offset"])]
    told += [("elements", chunk["elements"])]
    for name, value in [("learner", who), *told] if who else told:
        found.fields.append(Field(name, at, at, "", value, note="from the head"))
    if chunk["elements"] or data:
        read_payload(found, data, {"codec": codec, "count": chunk["elements"]}, at)
    return found


def _merged(read: Read, chunk: Mapping[str, int], at: int, stop: int) -> Dissected:
    """Dissects the merged outer gradient in blocks, because it is one large payload."""
    found = Dissected("merged", stop - at)
    for start in range(at, stop, BLOCK_BYTES):
        data = read(start, min(BLOCK_BYTES, stop - start))
        part = Dissected("merged", len(data))
        read_payload(part, data, {"codec": "bf16", "count": len(data) // 2}, start)
        if part.faults:
            found.faults, found.near = part.faults, part.near
            return found
    found.fields.append(Field("values", at, stop, "", f"{chunk['elements']} finite values"))
    return found


def _rest(read: Read, at: int, size_bytes: int) -> Dissected:
    """Checks that zeros follow to the end of the file: room for records to come."""
    for start in range(at, size_bytes, BLOCK_BYTES):
        block = read(start, min(BLOCK_BYTES, size_bytes - start))
        if any(block):
            bad = start + len(block) - len(block.lstrip(b"\0"))
            found, base = Dissected("record", size_bytes - at), max(at, bad - 8)
            expected, got = "zeros to the end of the file", f"{block[bad - start]:02x}"
            return _faulty(found, read(base, 16), base, bad, expected, got)
    zeros = Field("zeros", at, size_bytes, "", size_bytes - at)
    return Dissected("unused", size_bytes - at, [zeros])


def _faulty(
    found: Dissected, data: bytes, base: int, at: int, expected: str, got: str,
    code: str = "bad_record",
) -> Dissected:  # fmt: skip
    found.faults.append(FrameFault(at, code, expected, got))
    found.near = near(data, at, base)
    return found
