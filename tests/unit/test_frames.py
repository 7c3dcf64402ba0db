"""Frames by name: the refusals with their codes, and the frames that are never sent."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import pytest

from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.frames import (
    ENVELOPE_BYTES,
    MAGIC,
    decode_control,
    decode_data,
    digest,
    downlink_topic,
    encode_control,
    encode_header,
    topic_name,
)
from narrows.proto.limits import (
    CHUNK_ELEMENTS_MAX,
    CODEC_CHARACTERS_MAX,
    CODECS_MAX,
    CONTROL_BYTES_MAX,
    CONTROL_UP_BYTES_MAX,
    ELEMENTS_MAX,
    FRAGMENTS_MAX,
    HEADER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    PROTOCOL,
    RANGES_MAX,
    STREAMS_MAX,
    TEXT_CHARACTERS_MAX,
    TOKENS_MAX,
    TOPIC_BYTES_MAX,
    VERSION_MAX,
)

Plain: TypeAlias = dict[str, Any]

PAYLOAD = b"payload"


def seal(body: bytes, version: int = PROTOCOL) -> bytes:
    """An envelope around a body, as PROTOCOL.md describes it."""
    return MAGIC + bytes([version]) + digest(body).to_bytes(8, "little") + body


REPORT: Plain = {
    "type": "report",
    "step": 1,
    "tokens": 2,
    "step_s": 0.5,
    "loss": None,
    "up_bits_per_s": 0.0,
    "received": [3],
    "ledger": [0] * 7,
}
MISSING: Plain = {
    "type": "missing",
    "kind": 1,
    "fragment": 0,
    "version": 0,
    "push_id": 1,
    "ranges": [],
}
pack = msgspec.msgpack.encode
DEEP = b"\x91" * 100_000 + b"\xc0"

REFUSED_BODIES: dict[str, bytes] = {
    "empty": b"",
    "nil": b"\xc0",
    "an array": pack([1, 2]),
    "two values": pack(REPORT) + b"\xc0",
    "cut off": pack(REPORT)[:-1],
    "no type": pack({"nonce": 1}),
    "unknown type": pack({"type": "hullo"}),
    "type in upper case": pack({"type": "Probe", "nonce": 1}),
    "type as a number": pack({"type": 1, "nonce": 1}),
    "two types": b"\x83\xa4type\xa5alive\xa4type\xa5probe\xa5nonce\x01",
    "a missing field": pack({"type": "probe"}),
    "an unknown field": pack({**REPORT, "color": "red"}),
    "a key in bytes": b"\x82\xa4type\xa5probe\xc4\x05nonce\x01",
    "a key that is no text": b"\x82\xa4type\xa5probe\x07\x01",
    "a key that is no UTF-8": b"\x82\xa4type\xa5probe\xa5\xff\xff\xff\xff\xff\x01",
    "a text that is no UTF-8": b"\x82\xa4type\xa3bye\xa6reason\xa2\xc3\x28",
    "nesting in an unknown field": b"\x83\xa4type\xa5probe\xa1x" + DEEP + b"\xa5nonce\x01",
    "nesting before the type": b"\x82\xa1x" + DEEP + b"\xa4type\xa5probe",
    "nesting in a number": b"\x82\xa4type\xa5probe\xa5nonce" + DEEP,
    "an ext type": pack({**REPORT, "loss": msgspec.msgpack.Ext(5, b"x")}),
    "a damaged timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "a timestamp": pack({**REPORT, "step": msgspec.msgpack.Ext(-1, b"\0\0\0\0")}),
    "true for an integer": pack({**REPORT, "step": True}),
    "a float for an integer": pack({**REPORT, "step": 1.0}),
    "a text for an integer": pack({**REPORT, "step": "1"}),
    "nil for an integer": pack({**REPORT, "step": None}),
    "true for a float": pack({**REPORT, "step_s": True}),
    "2**64 - 1": pack({**REPORT, "step": 2**64 - 1}),
    "one token too many": pack({**REPORT, "tokens": TOKENS_MAX + 1}),
    "a negative count": pack({**REPORT, "step": -1}),
    "NaN seconds": pack({**REPORT, "step_s": float("nan")}),
    "infinite seconds": pack({**REPORT, "step_s": float("inf")}),
    "negative seconds": pack({**REPORT, "step_s": -0.5}),
    "too many streams": pack({**REPORT, "received": [0] * (STREAMS_MAX + 1)}),
    "a structure that is too long": pack({**REPORT, "ledger": [0] * 8}),
    "a structure as a map": pack({**REPORT, "ledger": {"logged": 1}}),
    "too many ranges": pack({**MISSING, "ranges": [[0, 1]] * (RANGES_MAX + 1)}),
    "a range of three": pack({**MISSING, "ranges": [[0, 1, 2]]}),
    "a negative range": pack({**MISSING, "ranges": [[-1, 2]]}),
    "an unknown kind": pack({**MISSING, "kind": 5}),
    "a kind by name": pack({**MISSING, "kind": "PUSH"}),
    "a text that is too long": pack({"type": "bye", "reason": "x" * 1025}),
    "a huge array that is not there": b"\xdd\xff\xff\xff\xff",
    "a huge map that is not there": b"\xdf\xff\xff\xff\xff",
    "a huge text that is not there": b"\x82\xa4type\xa3bye\xa6reason\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("body", REFUSED_BODIES.values(), ids=list(REFUSED_BODIES))
def test_refused_as_a_bad_message(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_control(seal(body))
    assert caught.value.code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    "changes",
    [{"loss": float("nan")}, {"loss": 1}, {"step_s": 1}, {"received": []}, {"tokens": TOKENS_MAX}],
)
def test_accepted(changes: Plain) -> None:
    plain = dict(reversed({**REPORT, **changes}.items()))  # Keys come in any order.
    assert isinstance(decode_control(seal(pack(plain))), msg.Report)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", ErrorCode.BAD_FRAME),
        (seal(b"")[:-1], ErrorCode.BAD_FRAME),
        (b"NRX" + seal(pack(REPORT))[3:], ErrorCode.BAD_FRAME),
        (pack(REPORT), ErrorCode.BAD_FRAME),
        (seal(pack(REPORT), PROTOCOL + 1), ErrorCode.PROTOCOL_VERSION),
        (seal(b"of a later version", 255), ErrorCode.PROTOCOL_VERSION),
        (seal(pack(REPORT)) + b"\0", ErrorCode.BAD_CHECKSUM),
        (seal(pack(REPORT))[:-1], ErrorCode.BAD_CHECKSUM),
        (bytes(CONTROL_BYTES_MAX + 1), ErrorCode.TOO_LARGE),
        (bytes(CONTROL_BYTES_MAX), ErrorCode.BAD_FRAME),
    ],
)
def test_refused_control_frames(frame: bytes, code: ErrorCode) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_control(frame)
    assert caught.value.code is code


def test_a_message_that_is_too_large_is_not_sent() -> None:
    tensor = msg.LayoutEntry("x" * 500, (1,), "float32", "mean")
    with pytest.raises(RemoteProtocolError) as caught:
        encode_control(msg.LayoutPart(0, 1, 0, (tensor,) * 200))
    assert caught.value.code is ErrorCode.TOO_LARGE


LONGEST = "\U0001f40b" * TEXT_CHARACTERS_MAX
"""The text with the most bytes."""


@pytest.mark.parametrize(
    "message",
    [
        msg.Hello(
            PROTOCOL, LONGEST, LONGEST, LONGEST, (TOKENS_MAX,) * 3, "f" * 32,
            ("\U0001f40b" * CODEC_CHARACTERS_MAX,) * CODECS_MAX, TOKENS_MAX, TOKENS_MAX,
            (VERSION_MAX,) * FRAGMENTS_MAX, "f" * 64,
        ),
        msg.Report(
            TOKENS_MAX, TOKENS_MAX, 0.1, 0.1, (TOKENS_MAX,) * STREAMS_MAX,
            msg.TokenLedger(*(TOKENS_MAX,) * 7), 0.1,
        ),
        msg.Missing(
            msg.DataKind.STATE, TOKENS_MAX, VERSION_MAX, TOKENS_MAX,
            ((ELEMENTS_MAX, ELEMENTS_MAX),) * RANGES_MAX,
        ),
        msg.Decline(TOKENS_MAX, VERSION_MAX, TOKENS_MAX, LONGEST),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_the_largest_message_of_a_learner_reaches_the_broker(message: msg.ControlMessage) -> None:
    frame = encode_control(message)
    assert len(frame) <= CONTROL_UP_BYTES_MAX
    assert decode_control(frame, CONTROL_UP_BYTES_MAX) == message


def test_the_broker_takes_less_than_a_learner() -> None:
    versions = (VERSION_MAX,) * FRAGMENTS_MAX
    beat = msg.Beat((0, 0, 0), msg.Phase.RUNNING, versions, (), 0, 0.0, (), 0.0)
    rounds = tuple(msg.OpenRound(n, VERSION_MAX, 1, -1) for n in range(FRAGMENTS_MAX))
    frame = encode_control(msgspec.structs.replace(beat, rounds=rounds))
    assert decode_control(frame)
    with pytest.raises(RemoteProtocolError) as caught:
        decode_control(frame, CONTROL_UP_BYTES_MAX)
    assert caught.value.code is ErrorCode.TOO_LARGE


def header_of(**changes: object) -> msg.Header:
    header = msg.Header(
        protocol=PROTOCOL,
        run_id="run",
        epoch=(0, 1, 2),
        kind=msg.DataKind.PUSH,
        learner="a",
        incarnation="0" * 32,
        fragment=0,
        version=0,
        push_id=1,
        offset=0,
        count=8,
        codec="raw32",
        payload_digest=digest(PAYLOAD),
        result_digest=0,
        stream=0,
        position=7,
    )
    return msgspec.structs.replace(header, **changes)


def refused_data(frames: list[bytes]) -> ErrorCode:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_data(frames)
    return caught.value.code


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_wrong_number_of_frames(count: int) -> None:
    frames = [b"u", encode_header(header_of()), PAYLOAD, b"", b""]
    assert refused_data(frames[:count]) is ErrorCode.BAD_FRAME


@pytest.mark.parametrize(
    ("changes", "payload", "code"),
    [
        ({}, b"Payload", ErrorCode.BAD_CHECKSUM),
        ({}, b"", ErrorCode.BAD_CHECKSUM),
        ({}, bytes(PAYLOAD_BYTES_MAX + 1), ErrorCode.TOO_LARGE),
        ({"count": 0}, PAYLOAD, ErrorCode.BAD_RANGE),
        ({"count": CHUNK_ELEMENTS_MAX + 1}, PAYLOAD, ErrorCode.BAD_RANGE),
        ({"offset": -1}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"stream": -9}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"stream": 64}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"offset": 2**48 + 1}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"kind": 0}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"position": -1}, PAYLOAD, ErrorCode.BAD_MESSAGE),
        ({"version": 2**53 + 1}, PAYLOAD, ErrorCode.BAD_MESSAGE),
    ],
)
def test_refused_data(changes: Plain, payload: bytes, code: ErrorCode) -> None:
    assert refused_data([b"u", encode_header(header_of(**changes)), payload]) is code


def test_refused_header_frames() -> None:
    body = encode_header(header_of())[ENVELOPE_BYTES:]
    fields: list[object] = list(msgspec.to_builtins(header_of()))
    for frame, code in (
        (seal(body, PROTOCOL + 1), ErrorCode.PROTOCOL_VERSION),
        (seal(body)[:-1], ErrorCode.BAD_CHECKSUM),
        (bytes(HEADER_BYTES_MAX + 1), ErrorCode.TOO_LARGE),
        (seal(pack(fields[:-1])), ErrorCode.BAD_MESSAGE),
        (seal(pack([*fields, 0])), ErrorCode.BAD_MESSAGE),
        (seal(pack(REPORT)), ErrorCode.BAD_MESSAGE),
    ):
        assert refused_data([b"u", frame, PAYLOAD]) is code


def test_a_header_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        encode_header(header_of(run_id="x" * 1000))
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("name", ["a", "site-a.9_B", "n" * 64])
def test_a_topic_names_its_learner(name: str) -> None:
    for stream in (0, 7, 63):
        topic = downlink_topic(name, "0123456789abcdef" * 2, stream)
        assert len(topic) <= TOPIC_BYTES_MAX and topic_name(topic) == name


@pytest.mark.parametrize(
    "topic",
    [
        b"",
        b"a",
        b"a/",
        b"/" + b"0" * 32 + b"/00",
        b"0" * 32 + b"/00",
        b"-a/" + b"0" * 32 + b"/00",
        b"a/" + b"0" * 31 + b"/00",
        b"a/" + b"F" * 32 + b"/00",
        b"a/" + b"0" * 32 + b"/64",
        b"a/" + b"0" * 32 + b"/0",
        b"a/" + b"0" * 32 + b"/00\n",
        b"a/b/" + b"0" * 32 + b"/00",
        b"\xff/" + b"0" * 32 + b"/00",
        b"n" * 65 + b"/" + b"0" * 32 + b"/00",
    ],
)
def test_what_is_no_topic_names_nobody(topic: bytes) -> None:
    assert topic_name(topic) is None
