"""One frame with an envelope: a control message or a data header.

Checked in the order of PROTOCOL.md, section 3: size, magic and length, version, digest, body. The
first of these that fails is the first fault. A body whose digest is wrong is read all the same,
because its own first fault tells where to look.
"""

from __future__ import annotations

from typing import Final

import xxhash

from narrows.proto.dissector.body import Body, family_of
from narrows.proto.dissector.findings import Dissected, Field, FrameFault, near
from narrows.proto.dissector.tables import (
    CHUNK_ELEMENTS_MAX,
    CONTROL_BYTES_MAX,
    CONTROL_TAGS,
    HEADER,
    HEADER_BYTES_MAX,
    PROTOCOL,
)

MAGIC: Final = b"NRW"
ENVELOPE_BYTES: Final = 12


def control(frame: bytes) -> Dissected:
    """Dissects a control message. Its kind is its name, or `control` if the name is unknown."""
    found = Dissected("control", len(frame))
    if _open(frame, CONTROL_BYTES_MAX, found):
        body = Body(memoryview(frame)[ENVELOPE_BYTES:], ENVELOPE_BYTES)
        found.kind, fault = body.tagged(CONTROL_TAGS)
        found.kind = found.kind or "control"
        _take(body, fault, found)
        _check_protocol(found)
    return _finished(frame, found)


def header(frame: bytes) -> Dissected:
    """Dissects the header of a data message. Checks its protocol and number of elements too."""
    found = Dissected("header", len(frame))
    if _open(frame, HEADER_BYTES_MAX, found):
        body = Body(memoryview(frame)[ENVELOPE_BYTES:], ENVELOPE_BYTES)
        _take(body, body.untagged(HEADER), found)
        _check_protocol(found)
        count = found.get("count")
        if isinstance(count, int) and not 1 <= count <= CHUNK_ELEMENTS_MAX:
            expected = f"1 to {CHUNK_ELEMENTS_MAX} elements"
            found.faults.append(
                FrameFault(found.at("count"), "bad_range", expected, str(count), "count")
            )
    return _finished(frame, found)


def bare(frame: bytes) -> Dissected:
    """Dissects a control message or a header, whichever it is: only headers are arrays."""
    is_array = len(frame) > ENVELOPE_BYTES and family_of(frame[ENVELOPE_BYTES]) == "array"
    return header(frame) if is_array else control(frame)


def digest(data: bytes | memoryview) -> int:
    """xxh3_64 with seed 0."""
    return int(xxhash.xxh3_64_intdigest(data))


def _take(body: Body, fault: FrameFault | None, found: Dissected) -> None:
    found.fields += body.fields
    if fault:
        found.faults.append(fault)


def _open(frame: bytes, bytes_max: int, found: Dissected) -> bool:
    """Reads the envelope. Returns False if no body can be read behind it."""
    if len(frame) > bytes_max:
        got = f"{len(frame)} bytes"
        found.faults.append(FrameFault(bytes_max, "too_large", f"at most {bytes_max} bytes", got))
        return False
    for at, byte in enumerate(MAGIC):
        if at < len(frame) and frame[at] != byte:
            expected = f"{byte:02x} of the magic NRW"
            found.faults.append(FrameFault(at, "bad_frame", expected, f"{frame[at]:02x}"))
            return False
    if len(frame) < ENVELOPE_BYTES:
        expected = f"an envelope of {ENVELOPE_BYTES} bytes"
        found.faults.append(FrameFault(len(frame), "bad_frame", expected, "the end of the frame"))
        return False
    stored = int.from_bytes(frame[4:ENVELOPE_BYTES], "little")
    computed = digest(memoryview(frame)[ENVELOPE_BYTES:])
    found.fields += [
        Field("magic", 0, 3, "", "NRW"),
        Field("wire_version", 3, 4, "", frame[3]),
        Field("body_digest", 4, ENVELOPE_BYTES, "", f"{stored:016x}"),
    ]
    if frame[3] != PROTOCOL:
        found.faults.append(FrameFault(3, "protocol_version", str(PROTOCOL), str(frame[3])))
        return False
    if stored != computed:
        expected = f"{computed:016x}, the digest of the {len(frame) - ENVELOPE_BYTES} bytes behind"
        found.faults.append(FrameFault(4, "bad_checksum", expected, f"{stored:016x}"))
    return True


def _check_protocol(found: Dissected) -> None:
    told = found.get("protocol")
    if told is not None and told != PROTOCOL:
        at = found.at("protocol")
        found.faults.append(
            FrameFault(at, "protocol_version", str(PROTOCOL), str(told), "protocol")
        )


def _finished(frame: bytes, found: Dissected) -> Dissected:
    if found.faults:
        found.near = near(frame, found.faults[0].at)
    return found
