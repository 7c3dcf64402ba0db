"""ZMTP as it stands on a connection, and what is said where it cannot be read."""

from __future__ import annotations

import pytest

from narrows.proto.dissector.zmtp import FRAME_BYTES_MAX, Stream, StreamPiece, command, greeting


def greet(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 1]) + mechanism.ljust(52, b"\0")


def pieces(data: bytes) -> list[StreamPiece]:
    return list(Stream().feed(data))


def test_a_greeting() -> None:
    (piece,) = pieces(greet())
    found = greeting(piece.body)
    assert (piece.sort, piece.at) == ("greeting", 0)
    assert {each.name: each.plain for each in found.fields} == {
        "signature": "ff00000000000000007f", "version": "3.1", "mechanism": "NULL", "as_server": 0,
    }  # fmt: skip
    assert greeting(b"short").faults[0].at == 5


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1", "byte 0: expected ff, as ZMTP begins, got 47"),
        (b"\xff" + bytes(8) + b"\x7e", "byte 9: expected 7f"),
        (greet(major=2)[:11], "byte 10: expected ZMTP 3, which can be looked into, got version 2"),
    ],
)
def test_what_is_not_zmtp_3(data: bytes, why: str) -> None:
    stream = Stream()
    (piece,) = stream.feed(data)
    assert piece.sort == "opaque" and piece.why.startswith(why)
    assert list(stream.feed(greet())) == []
    assert stream.total_bytes == len(data) + 64


def test_another_mechanism_is_named_and_left_alone() -> None:
    first, second = pieces(greet(b"CURVE") + b"\4\x26\5READY")
    assert first.sort == "greeting"
    assert second.sort == "opaque" and second.why.startswith("the mechanism is CURVE, not NULL")


def test_flags_that_nobody_may_set() -> None:
    *_, piece = pieces(greet() + b"\x08\0")
    assert piece.why == "byte 64: expected the flags of a frame, got 08"
    assert pieces(greet() + b"\x05\0")[-1].sort == "opaque"


def test_a_frame_too_long_to_keep_is_passed_over() -> None:
    stream, size = Stream(), FRAME_BYTES_MAX + 1
    head = b"\x02" + size.to_bytes(8, "big")
    assert [each.sort for each in stream.feed(greet() + head + bytes(1000))] == [
        "greeting", "skipped",
    ]  # fmt: skip
    assert list(stream.feed(bytes(size - 1001))) == []
    (piece,) = stream.feed(b"\0" + b"\0\3abc")
    assert (piece.sort, piece.body, piece.at) == ("part", b"abc", 64 + 9 + size + 2)


def test_the_longest_frame_is_waited_for() -> None:
    head = b"\x02" + FRAME_BYTES_MAX.to_bytes(8, "big")
    assert [each.sort for each in pieces(greet() + head)] == ["greeting"]


def test_parts_are_counted_and_commands_are_not() -> None:
    data = greet() + b"\1\1a" + b"\4\5\4PING" + b"\1\1b" + b"\0\1c" + b"\0\1d"
    assert [(each.sort, each.index, each.has_more) for each in pieces(data)[1:]] == [
        ("part", 0, True), ("command", 0, False), ("part", 1, True), ("part", 2, False),
        ("part", 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "kind", "fields"),
    [
        (b"\5READY\x0bSocket-Type\0\0\0\4PUSH", "ready", {"Socket-Type": "PUSH"}),
        (b"\5ERROR\6secret", "error", {"reason": "secret"}),
        (b"\4PING\0\x64abc", "ping", {"time_to_live_s": 10.0, "context": "616263"}),
        (b"\4PONGabc", "pong", {"context": "616263"}),
        (b"\x09SUBSCRIBEu", "subscribe", {"topic": "u"}),
        (b"\6CANCEL", "cancel", {"topic": ""}),
    ],
)
def test_commands(body: bytes, kind: str, fields: dict[str, object]) -> None:
    found = command(body)
    assert (found.kind, found.faults) == (kind, [])
    assert {each.name: each.plain for each in found.fields[1:]} == fields


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (b"", 0),
        (b"\5REA", 4),
        (b"\2\xff\xff", 1),
        (b"\5READY\x0bSocket", 13),
        (b"\5READY\1a\0\0\0\4PU", 14),
        (b"\4PING\0", 6),
    ],
)
def test_the_first_wrong_byte_of_a_command(body: bytes, at: int) -> None:
    (fault,) = command(body).faults
    assert (fault.at, fault.code) == (at, "bad_frame")
