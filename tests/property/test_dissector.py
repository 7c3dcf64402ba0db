"""The dissector and our own decoders agree, and what it promises of damaged bytes holds.

A *token* is a whole number, text or nil, or the head of an array or map. Where one byte of a body
is another one, and the digest is made to fit:

- Nothing is ever raised.
- A fault is named exactly if the decoder refuses, or if a field comes twice, which it lets pass.
- No byte before the damaged token is named, but for the map itself, where its `type` is gone.
- If the token keeps its length and is no head, the byte named lies in it, and not behind the
  damage, unless a text is no UTF-8 any more. Otherwise all that follows is read at other places:
  the byte named is the first that cannot go on from there.
- Where the body is cut, the byte named is not behind the cut.

Where the digest is left as it is, the byte named lies before the damage or on it.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Any, cast

import msgpack
import msgspec
import numpy as np
from any_messages import any_of, controls, mutated, seal
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from narrows.proto import messages as msg
from narrows.proto.codec.codecs import codec, codec_names, piece_scales
from narrows.proto.dissector import capture, envelope
from narrows.proto.dissector.body import family_of
from narrows.proto.dissector.chunks import Payload
from narrows.proto.dissector.envelope import ENVELOPE_BYTES
from narrows.proto.dissector.findings import Dissected, Field, Wrong
from narrows.proto.dissector.parts import Parts
from narrows.proto.dissector.text import as_json, block
from narrows.proto.dissector.zmtp import Stream, StreamPiece
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.frames import decode_control, decode_data, digest, encode_control, encode_header
from narrows.proto.limits import CHUNK_ELEMENTS_MAX, PROTOCOL

Unpacker = cast(Any, msgpack).Unpacker
UnpackException = cast(Any, msgpack).UnpackException
PAYLOAD = b"payload"


def of_this_version(message: msg.ControlMessage) -> msg.ControlMessage:
    """Which protocol a Hello or an Enrol names, the decoder leaves to the broker."""
    if isinstance(message, msg.Hello | msg.Enrol):
        return msgspec.structs.replace(message, protocol=PROTOCOL)
    return message


messages = controls.map(of_this_version)
frames = messages.map(encode_control)
bodies = frames.map(lambda frame: frame[ENVELOPE_BYTES:])
headers: st.SearchStrategy[msg.Header] = any_of(msg.Header).map(
    lambda header: msgspec.structs.replace(
        header,
        protocol=PROTOCOL,
        count=header.count % CHUNK_ELEMENTS_MAX + 1,
        payload_digest=digest(PAYLOAD),
    )
)


def plain(value: object) -> object:
    """A message in the words of the dissector."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [plain(each) for each in cast(tuple[object, ...], value)]
    return value.value if isinstance(value, Enum) else value


def told(found: Dissected) -> dict[str, object]:
    """The fields that the dissector has read from a body."""
    return {each.name: each.plain for each in found.fields if each.at >= ENVELOPE_BYTES}


def printed(found: Dissected) -> Dissected:
    """The same; it can be printed in either way."""
    assert all(len(line) <= 100 or " " not in line[40:] for line in block(found, "here"))
    assert as_json(found, {}).isprintable()
    return found


def refusal(frame: bytes) -> str:
    """The code with which our own decoder refuses a control frame, "" if it does not."""
    try:
        message = decode_control(frame)
    except RemoteProtocolError as error:
        return error.code
    is_other = isinstance(message, msg.Hello | msg.Enrol) and message.protocol != PROTOCOL
    return ErrorCode.PROTOCOL_VERSION if is_other else ""


def comes_twice(found: Dissected) -> bool:
    """A sender never repeats a key. Our decoder takes the last one."""
    return any(fault.expected in ("each field once", "each key once") for fault in found.faults)


def check_agreement(frame: bytes) -> Dissected:
    found = printed(envelope.control(frame))
    code = found.faults[0].code if found.faults else ""
    assert comes_twice(found) or code == refusal(frame)
    return found


@given(messages)
def test_every_message_is_read_as_it_was_meant(message: msg.ControlMessage) -> None:
    found = printed(envelope.control(encode_control(message)))
    assert found.faults == [] and found.kind == type(message).__name__.lower()
    expected = cast(dict[str, object], plain(message))
    assert told(found) == {"type": found.kind} | expected


@given(messages)
def test_values_stand_where_they_are_said_to_stand(message: msg.ControlMessage) -> None:
    frame = encode_control(message)
    for each in leaves(envelope.control(frame).fields):
        if each.at >= ENVELOPE_BYTES:
            value: Any = msgpack.unpackb(frame[each.at : each.end])
            assert value == each.value


def leaves(fields: list[Field]) -> list[Field]:
    found: list[Field] = []
    for each in fields:
        found += [each] if each.parts is None else leaves(each.parts)
    return found


@given(headers, st.sampled_from([PAYLOAD, b"other"]))
def test_every_header_is_read_as_it_was_meant(header: msg.Header, payload: bytes) -> None:
    frame, parts = encode_header(header), Parts(None)
    parts.take(0, has_more=True, frame=b"u")
    assert told(printed(envelope.header(frame))) == plain(header)
    parts.take(1, has_more=True, frame=frame)
    found = printed(parts.take(2, has_more=False, frame=payload))
    wrong = [fault for fault in found.faults if fault.code == "bad_checksum"]
    assert bool(wrong) == (payload != PAYLOAD)


@given(mutated(headers.map(encode_header)) | st.binary(max_size=200))
def test_headers_are_refused_for_the_same_reason(frame: bytes) -> None:
    found = printed(envelope.header(frame))
    try:
        decode_data([b"u", frame, PAYLOAD])
        code = ""
    except RemoteProtocolError as error:
        # The payload is looked at last.
        code = "" if error.message.startswith("payload of") else error.code
    assert (found.faults[0].code if found.faults else "") == code


@given(st.binary(max_size=200) | mutated(frames))
@example(b"")
@example(b"NRW")
def test_any_bytes_are_refused_for_the_same_reason(frame: bytes) -> None:
    check_agreement(frame)


@given(st.binary(max_size=200) | mutated(bodies))
@example(b"\x81\xa4type\x91" * 500)
@example(b"\x91" * 5000)
@example(b"\x81\xa5depth" + b"\x91" * 5000)
@example(b"\xdf\xff\xff\xff\xff\xa4type")
def test_any_body_is_refused_for_the_same_reason(body: bytes) -> None:
    check_agreement(seal(body))


# One byte.


def tokens(body: bytes) -> list[tuple[int, int]]:
    """Begin and end of each token of a body, as msgpack alone sees them."""
    unpacker = Unpacker()
    unpacker.feed(body)
    found: list[tuple[int, int]] = []
    while (at := int(unpacker.tell())) < len(body):
        match family_of(body[at]):
            case "map":
                unpacker.read_map_header()
            case "array":
                unpacker.read_array_header()
            case _:
                unpacker.unpack()
        found.append((at, unpacker.tell()))
    return found


def is_head(byte: int) -> bool:
    return family_of(byte) in ("map", "array")


def length_at(body: bytes, at: int) -> int:
    """Bytes of the value there; 0: it is none."""
    unpacker = Unpacker(raw=True)
    unpacker.feed(body[at:])
    try:
        unpacker.skip()
    except (UnpackException, ValueError):
        return 0
    return int(unpacker.tell())


@settings(max_examples=400)
@given(bodies, st.data())
def test_a_changed_byte_is_named_as_near_as_can_be(body: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(body) - 1))
    damaged = bytearray(body)
    damaged[place] ^= data.draw(st.integers(1, 255))
    found = check_agreement(seal(bytes(damaged)))
    if not found.faults or comes_twice(found):
        return
    fault, at = found.faults[0], found.faults[0].at - ENVELOPE_BYTES
    start, end = next(each for each in tokens(body) if place < each[1])
    assert at >= start or (at == 0 and fault.expected == "the field type")
    keeps_its_length = length_at(bytes(damaged), start) == end - start
    if keeps_its_length and not is_head(body[start]) and not is_head(damaged[start]):
        assert at < end
        assert at <= place or fault.expected == "UTF-8"


@given(bodies, st.data())
def test_a_cut_is_not_looked_for_behind_it(body: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(body) - 1))
    found = check_agreement(seal(body[:place]))
    (fault,) = found.faults
    assert fault.at - ENVELOPE_BYTES <= place


@given(frames, st.data())
def test_a_changed_byte_of_a_frame_is_named_no_later(frame: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(frame) - 1))
    damaged = bytearray(frame)
    damaged[place] ^= data.draw(st.integers(1, 255))
    fault = check_agreement(bytes(damaged)).faults[0]
    assert fault.at == min(place, 4)
    expected = {3: "protocol_version"}.get(place, "bad_frame" if place < 3 else "bad_checksum")
    assert fault.code == expected


@given(frames, st.data())
def test_a_cut_frame(frame: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(frame) - 1))
    fault = check_agreement(frame[:place]).faults[0]
    assert fault.at == (place if place < ENVELOPE_BYTES else 4)


# Payloads.


@st.composite
def payloads(draw: st.DrawFn) -> tuple[str, int, int, bytes]:
    """Codec, elements, spans and a payload that our own encoder makes."""
    name, count = draw(st.sampled_from(codec_names())), draw(st.integers(1, 600))
    spans = draw(st.integers(1, min(3, count)))
    bounds = np.linspace(0, count, spans + 1).astype(np.int64)
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    values = random.standard_normal(count).astype(np.float32) * draw(st.sampled_from([0, 1]))
    scales = piece_scales(values, bounds, 0.5)
    payload = codec(name).encode(values, bounds, scales, np.empty_like(values))
    return name, count, spans, payload


@given(payloads())
def test_every_payload_is_read(made: tuple[str, int, int, bytes]) -> None:
    name, count, spans, data = made
    payload = Payload(name, count, data)
    assert payload.read() is None
    if name.endswith("-zstd"):
        assert scales_of(payload) == spans


def scales_of(payload: Payload) -> int:
    (found,) = [each for each in payload.fields if each.name == "scales"]
    return len(found.parts or [])


@settings(max_examples=400)
@given(payloads(), st.data())
def test_payloads_are_refused_for_the_same_reason(
    made: tuple[str, int, int, bytes], data: st.DataObject
) -> None:
    name, count, spans, payload = made
    damaged = data.draw(mutated(st.just(payload)))
    bounds = np.linspace(0, count, spans + 1).astype(np.int64)
    reader = Payload(name, count, damaged)
    wrong = reader.read()
    if name.endswith("-zstd"):
        # How many there are only the layout tells.
        assume(scales_of(reader) == spans)
    try:
        codec(name).decode(damaged, bounds)
        code = ""
    except RemoteProtocolError as error:
        code = error.code
    assert (wrong.code if wrong else "") == code
    assert wrong is None or 0 <= wrong.at <= max(len(damaged), len(payload))


# Connections and captures.

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")


def pieces_of(data: bytes, cuts: list[int]) -> list[StreamPiece]:
    stream = Stream()
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    found: list[StreamPiece] = []
    for start, stop in pairwise(places):
        found += stream.feed(data[start:stop])
    return found


def framed(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = more + 4 * command
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags + 2]) + len(body).to_bytes(8, "big") + body


parts = st.lists(st.binary(max_size=300), min_size=1, max_size=3)


@given(st.lists(parts, max_size=4), st.lists(st.integers(0, 2000), max_size=6))
def test_a_connection_is_read_in_any_pieces(said: list[list[bytes]], cuts: list[int]) -> None:
    data = GREETING + framed(b"\5READY", command=True)
    for message in said:
        last = len(message) - 1
        data += b"".join(framed(part, more=i < last) for i, part in enumerate(message))
    found = pieces_of(data, cuts)
    assert found == pieces_of(data, [])
    assert [each.sort for each in found[:2]] == ["greeting", "command"]
    expected = [(i, part) for message in said for i, part in enumerate(message)]
    assert [(each.index, each.body) for each in found[2:]] == expected
    assert all(data[each.at :].startswith(each.body) for each in found)


@given(mutated(st.just(GREETING + framed(b"\5READY", command=True) + framed(b"x" * 300))))
def test_any_connection(data: bytes) -> None:
    reader = capture.CaptureReader()
    for each in pieces_of(data, []):
        if each.sort in capture.SORTS:
            frame = capture.Captured(each.sort, "up", 1, 0.0, each.body, each.index, each.has_more)
            printed(reader.take(frame))


captures = st.lists(
    st.builds(
        capture.Captured,
        st.sampled_from(capture.SORTS),
        st.sampled_from(["up", "down"]),
        st.integers(0, 2**32 - 1),
        st.floats(allow_nan=False),
        st.binary(max_size=50) | frames,
        st.integers(0, capture.PART_MAX),
        st.booleans(),
    ),
    max_size=4,
)


def read_back(data: bytes) -> list[capture.Captured]:
    rest = memoryview(data)

    def read(count: int) -> bytes:
        nonlocal rest
        found, rest = bytes(rest[:count]), rest[count:]
        return found

    return list(capture.records(read))


@given(captures)
def test_a_capture_is_read_as_it_was_written(made: list[capture.Captured]) -> None:
    assert read_back(b"".join(map(capture.packed, made))) == made
    reader = capture.CaptureReader()
    for each in made:
        printed(reader.take(each))


@given(mutated(captures.map(lambda made: b"".join(map(capture.packed, made)))))
def test_a_damaged_capture(data: bytes) -> None:
    try:
        read_back(data)
    except Wrong as wrong:
        assert wrong.at <= len(capture.HEAD) + len(data)
