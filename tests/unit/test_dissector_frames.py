"""Frames as the dissector sees them: stored ones, and the first wrong byte of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from any_messages import seal

from narrows.proto import messages as msg
from narrows.proto.dissector.envelope import bare, control, digest, header
from narrows.proto.dissector.findings import Dissected
from narrows.proto.dissector.parts import Direction, Parts
from narrows.proto.dissector.tables import CONTROL_BYTES_MAX, PAYLOAD_BYTES_MAX
from narrows.proto.dissector.text import FrameCounts, as_json, block
from narrows.proto.frames import downlink_topic, encode_header

GOLDEN = Path(__file__).parents[1] / "golden"
STORED: dict[str, str] = json.loads((GOLDEN / "messages.json").read_text(encoding="utf-8"))
OLD: dict[str, str] = json.loads((GOLDEN / "messages-version-2.json").read_text(encoding="utf-8"))
PAYLOAD = bytes(28)  # Seven zeros as raw32.
INCARNATION = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("name", STORED)
def test_stored_frames(name: str) -> None:
    found = bare(bytes.fromhex(STORED[name]))
    assert (found.kind, found.faults) == (name.lower(), [])


@pytest.mark.parametrize("name", OLD)
def test_frames_of_another_version_are_named(name: str) -> None:
    found = bare(bytes.fromhex(OLD[name]))
    (fault,) = found.faults
    assert (fault.at, fault.code, fault.expected, fault.got) == (3, "protocol_version", "3", "2")
    assert found.near.startswith("from byte 0: 4e 52 57 [02]")


def body_of(name: str) -> bytes:
    return bytes.fromhex(STORED[name])[12:]


def first(found: Dissected) -> tuple[int, str, str, str, str]:
    fault = found.faults[0]
    return fault.at, fault.code, fault.expected, fault.got, fault.path


PROBE = b"\x82\xa4type\xa5probe\xa5nonce"
"""Its value follows at byte 30."""
BYE = b"\x82\xa4type\xa3bye\xa6reason"
"""At byte 29."""
PROGRESS = b"\x82\xa4type\xa8progress\xa8received"
"""At byte 36."""
COUNT = "Count, 0 to 4611686018427387904"
TEXT = "Text, up to 1024 characters"

BAD_BODIES: tuple[tuple[bytes, int, str, str, str], ...] = (
    (b"", 12, "a map", "the end of the frame", ""),
    (b"\x91\x05", 12, "a map", "array (91)", ""),
    (b"\x82\xa4tape\xa5probe\xa5nonce\x05", 12, "the field type", "a map without it", ""),
    (b"\x81\xa4type\xa5probe", 12, "Probe of 2 values", "1", ""),
    (b"\x83" + PROBE[1:] + b"\x05\xa5nonce\x05", 12, "Probe of 2 values", "3", ""),
    (b"\x82\xa4type\xa5prope\xa5nonce\x05", 18, "one of hello", "'prope'", ""),
    (b"\x82\xa4type\xc1\xa5nonce\x05", 18, "the field type", "no msgpack", ""),
    (b"\x82\xa4type\xa5probe\xa5nonse\x05", 24, "a field of Probe", "'nonse'", ""),
    (b"\x82\xa4type\xa5probe\xa4type\xa5probe", 24, "each field once", "type again", ""),
    (b"\x82\xa4type\xa5probe\x05\x05", 24, "a field of Probe", "integer (05)", ""),
    (PROBE + b"\xff", 30, COUNT, "-1", "nonce"),
    (PROBE + b"\xc3", 30, COUNT, "bool (c3)", "nonce"),
    (PROBE + b"\xcb" + bytes(8), 30, COUNT, "float (cb)", "nonce"),
    (PROBE + b"\x05\x00", 31, "the end of the frame", "1 more bytes", ""),
    (PROBE + b"\xcf\x00", 32, "the rest of Count", "the end of the frame", "nonce"),
    (BYE + b"\xa3a\xffb", 31, "UTF-8", "ff", "reason"),
    (BYE + b"\xda\x00\x03a\xffb", 33, "UTF-8", "ff", "reason"),
    (b"\x83\xa4type\xa6refuse\xa4code\xa1a\xa3got\xa1b", 12, "the field message", "3", ""),
    (BYE + b"\xc4\x01a", 29, TEXT, "bytes (c4)", "reason"),
    (BYE + b"\xd6\xff\0\0\0\0", 29, TEXT, "extension (d6)", "reason"),
    (BYE + b"\xda\x04\x01" + b"a" * 1025, 29, TEXT, "'aaaa", "reason"),
    (PROGRESS + b"\xdd\xff\xff\xff\xff", 36, "Positions, an array", "4294967295", "received"),
    (PROGRESS + b"\xdc\x00\x41" + bytes(65), 36, "Positions of 0 to 64", "65", "received"),
    (PROGRESS + b"\x92\x01\xa1a", 38, COUNT, "string (a1)", "received.1"),
)


@pytest.mark.parametrize(("body", "at", "expected", "got", "path"), BAD_BODIES)
def test_the_first_wrong_byte_of_a_body(
    body: bytes, at: int, expected: str, got: str, path: str
) -> None:
    (fault,) = control(seal(body)).faults
    assert (fault.at, fault.code, fault.path) == (at, "bad_message", path)
    assert fault.expected.startswith(expected) and fault.got.startswith(got)


def test_the_longest_text() -> None:
    assert control(seal(BYE + b"\xda\x04\x00" + b"a" * 1024)).faults == []


def test_a_map_has_two_values_per_field() -> None:
    body = body_of("Welcome")
    head = body.index(b"\xde\x00\x11")
    (fault,) = control(seal(body[: head + 3 + 20])).faults
    assert (fault.at, fault.got) == (12 + head, "17 values in 20 bytes")


def test_a_type_may_stand_anywhere() -> None:
    found = control(seal(b"\x82\xa5nonce\x05\xa4type\xa5probe"))
    assert (found.kind, found.faults, found.get("nonce")) == ("probe", [], 5)


def test_a_path_leads_into_structures() -> None:
    fields = msgspec.msgpack.decode(body_of("Welcome"))
    fields["settings"]["streams"] = 65
    at, _, expected, got, path = first(control(seal(msgspec.msgpack.encode(fields))))
    assert (expected, got, path) == ("Streams, 1 to 64", "65", "settings.streams")
    assert body_of("Welcome")[at - 12] == 4


def test_a_wrong_digest_comes_first_and_the_body_is_read_all_the_same() -> None:
    frame = bytearray(bytes.fromhex(STORED["Probe"]))
    frame[-1] = 0xC0
    found = control(bytes(frame))
    assert [(fault.at, fault.code) for fault in found.faults] == [
        (4, "bad_checksum"), (30, "bad_message"),
    ]  # fmt: skip
    assert f"{digest(bytes(frame[12:])):016x}" in found.faults[0].expected


@pytest.mark.parametrize(
    ("frame", "at", "code"),
    [
        (b"", 0, "bad_frame"),
        (b"NR", 2, "bad_frame"),
        (b"NRX\x02" + bytes(20), 2, "bad_frame"),
        (b"NRW\x02" + bytes(7), 11, "bad_frame"),
        (bytes(CONTROL_BYTES_MAX + 1), CONTROL_BYTES_MAX, "too_large"),
    ],
)
def test_envelopes(frame: bytes, at: int, code: str) -> None:
    assert first(control(frame))[:2] == (at, code)


def test_the_longest_frames() -> None:
    assert first(control(bytes(CONTROL_BYTES_MAX)))[:2] == (0, "bad_frame")
    assert first(header(bytes(1024)))[:2] == (0, "bad_frame")
    assert first(header(bytes(1025)))[:2] == (1024, "too_large")


def header_of(**changes: object) -> bytes:
    stored = msgspec.msgpack.Decoder(msg.Header).decode(body_of("Header"))
    fields = {"codec": "raw32", "count": 7, "payload_digest": digest(PAYLOAD), **changes}
    return encode_header(msgspec.structs.replace(stored, **fields))


def test_a_hello_of_another_protocol() -> None:
    fields = msgspec.msgpack.decode(body_of("Hello"))
    fields["protocol"] = 2
    at, code, _, got, path = first(control(seal(msgspec.msgpack.encode(fields))))
    assert (code, got, path) == ("protocol_version", "2", "protocol")
    assert body_of("Hello")[at - 12] == 3


@pytest.mark.parametrize("count", [0, 1048577])
def test_a_header_without_elements_or_with_too_many(count: int) -> None:
    _, code, expected, got, path = first(header(header_of(count=count)))
    told = ("bad_range", "1 to 1048576 elements", str(count), "count")
    assert (code, expected, got, path) == told


def said(direction: Direction, topic: bytes, frame: bytes, payload: bytes) -> list[Dissected]:
    parts = Parts(direction)
    return [
        parts.take(0, has_more=True, frame=topic),
        parts.take(1, has_more=True, frame=frame),
        parts.take(2, has_more=False, frame=payload),
    ]


def test_a_data_message() -> None:
    found = said("down", downlink_topic("site-a", INCARNATION, 3), header_of(), PAYLOAD)
    assert [each.kind for each in found] == ["topic", "header", "payload"]
    assert not any(each.faults for each in found)
    assert found[2].get("values") == "7 finite values"


FOUND = {"kind": msg.DataKind.FOUND, "codec": "f32-blosc2", "version": 0, "push_id": 0,
         "result_digest": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "changes", "code", "path"),
    [
        ("up", {}, "bad_message", "kind"),
        ("down", FOUND, "bad_message", "kind"),
        ("up", FOUND | {"version": 1}, "bad_message", "version"),
        ("up", FOUND | {"push_id": 1}, "bad_message", "push_id"),
        ("up", FOUND | {"result_digest": 1}, "bad_message", "result_digest"),
        ("up", FOUND | {"codec": "bf16"}, "unknown_codec", "codec"),
        ("down", {"kind": msg.DataKind.STATE, "codec": "bf16"}, "unknown_codec", "codec"),
        ("down", {"stream": 4}, "bad_message", "stream"),
        ("down", {"incarnation": "f" * 32}, "bad_message", "incarnation"),
        ("down", {"learner": "site-b"}, "bad_message", "learner"),
    ],
)
def test_headers_that_do_not_fit(
    direction: Direction, changes: dict[str, object], code: str, path: str
) -> None:
    topic = b"u" if direction == "up" else downlink_topic("site-a", INCARNATION, 3)
    _, found, _ = said(direction, topic, header_of(**changes), PAYLOAD)
    (fault,) = found.faults
    assert (fault.code, fault.path) == (code, path)
    assert fault.at == found.at(path)


def test_a_payload_that_is_not_the_headers() -> None:
    found = said("down", downlink_topic("site-a", INCARNATION, 3), header_of(), PAYLOAD + b"\0")[2]
    assert [(fault.at, fault.code) for fault in found.faults] == [
        (0, "bad_checksum"), (28, "too_large"),
    ]  # fmt: skip


def test_a_payload_that_is_too_large() -> None:
    payload = bytes(PAYLOAD_BYTES_MAX + 1)
    found = said("down", downlink_topic("site-a", INCARNATION, 3), header_of(), payload)[2]
    assert first(found)[:2] == (PAYLOAD_BYTES_MAX, "too_large")


def test_a_topic_of_the_downlink() -> None:
    parts = Parts("down")
    found = first(parts.take(0, has_more=True, frame=b"u"))
    assert found[:3] == (0, "bad_frame", "NAME/INCARNATION/ss")
    assert first(parts.take(0, has_more=True, frame=b"u" * 101))[:2] == (100, "too_large")


def test_parts_that_are_no_message() -> None:
    parts = Parts("up")
    parts.take(0, has_more=True, frame=b"")
    found = parts.take(1, has_more=False, frame=bytes.fromhex(STORED["Probe"]))
    assert found.faults[0].expected.startswith("Header, an array")
    assert found.faults[1].expected == "a payload to follow"
    assert first(parts.take(2, has_more=True, frame=b""))[1:4] == (
        "bad_frame", "a message of one part, or of three", "part 2 and more",
    )  # fmt: skip
    assert parts.take(3, has_more=False, frame=b"").faults[0].got == "part 3"


def test_a_message_for_the_other_side() -> None:
    frame = bytes.fromhex(STORED["Probe"])
    assert Parts("down").take(0, has_more=False, frame=frame).faults == []
    found = Parts("up").take(0, has_more=False, frame=frame)
    assert first(found)[:4] == (18, "bad_message", "a message that goes up", "probe")
    both = bytes.fromhex(STORED["Bye"])
    assert not any(Parts(way).take(0, has_more=False, frame=both).faults for way in ("up", "down"))


def test_subscriptions_of_zmtp_3_0() -> None:
    found = Parts("up").take(0, has_more=False, frame=b"\1topic")
    assert (found.kind, found.get("topic"), found.faults) == ("subscribe", "topic", [])
    assert Parts("up").take(0, has_more=False, frame=b"\0topic").kind == "cancel"


def test_a_frame_as_text() -> None:
    frame = bytearray(bytes.fromhex(STORED["Decline"]))
    frame[-1] = 0xFF
    assert list(block(control(bytes(frame)), "here")) == [
        "here  decline  77 bytes",
        "         0  magic                         NRW",
        "         3  wire_version                  3",
        "         4  body_digest                   5ce5355c758c4047",
        '        18  type                          "decline"',
        "        35  fragment                      1",
        "        49  base_version                  7",
        "        58  attempt                       2",
        f"  !! byte 4: bad_checksum: expected {digest(bytes(frame[12:])):016x}, "
        "the digest of the 65 bytes behind, got",
        "     5ce5355c758c4047",
        "     from byte 0: 4e 52 57 03 [47] 40 8c 75 5c 35 e5 5c 85 a4 74 79",
        "  !! also byte 76 (reason): bad_message: expected UTF-8, got ff",
    ]


def test_a_terminal_is_safe_from_texts() -> None:
    body = b"\x82\xa4type\xa3bye\xa6reason" + msgspec.msgpack.encode("\x1b[2J\u202e")
    assert '"\\x1b[2J\\u202e"' in "\n".join(block(control(seal(body)), ""))


def test_long_lists_are_cut_in_text_alone() -> None:
    beat = msg.Beat((1, 1, 1), msg.Phase.RUNNING, tuple(range(100)), (), 0, 0.0, (), 0.0)
    found = control(seal(msgspec.msgpack.encode(beat)))
    text = " ".join(" ".join(block(found, "")).split())
    assert "30, 31, and 68 more, see --json]" in text
    versions = next(f for f in json.loads(as_json(found, {}))["fields"] if f["field"] == "versions")
    assert versions["value"] == list(range(100))


def test_a_loss_that_is_no_number_is_still_json() -> None:
    report = msg.Report(1, 1, 0.5, float("nan"), (), msg.TokenLedger(), 0.0)
    text = as_json(control(seal(msgspec.msgpack.encode(report))), {"file": "x"})
    (loss,) = [f["value"] for f in json.loads(text)["fields"] if f["field"] == "loss"]
    assert loss == "nan" and "NaN" not in text


def test_counts() -> None:
    tally = FrameCounts()
    tally.add(bare(bytes.fromhex(STORED["Probe"])), "down")
    tally.add(bare(bytes.fromhex(STORED["Probe"])), "down")
    tally.add(bare(b"NRW"))
    assert [line.split() for line in tally.lines()] == [
        ["kind", "direction", "frames", "bytes"],
        ["control", "1", "3"],
        ["probe", "down", "2", "62"],
        "3 in all, 1 of them faulty".split(),
    ]
    assert json.loads(tally.as_json())["faulty"] == 1
