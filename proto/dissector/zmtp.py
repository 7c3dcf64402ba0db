"""Parses ZMTP 3 from the bytes of a connection: greeting, commands and frames.

Source: ZeroMQ RFC 37 (ZMTP 3.1); 3.0 differs in how it subscribes. Frames can be
read with the mechanism NULL only; for any other one the parser says so, and counts the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from narrows.proto.dissector.findings import Dissected, Field, FrameFault, Wrong, near
from narrows.proto.dissector.tables import CONTROL_BYTES_MAX, PAYLOAD_BYTES_MAX

GREETING_BYTES: Final = 64
FRAME_BYTES_MAX: Final = 2 * max(CONTROL_BYTES_MAX, PAYLOAD_BYTES_MAX)
"""A longer frame is not kept: its bytes are passed over."""

MORE, LONG, COMMAND = 1, 2, 4
RESERVED: Final = 0xF8

Sort: TypeAlias = Literal["part", "command", "greeting", "skipped", "opaque"]


@dataclass(frozen=True)
class StreamPiece:
    """The next unit of a direction: a greeting, a command, a part of a message, a frame too long to
    keep, or the news that the rest cannot be read."""

    sort: Sort
    at: int
    """Where its content begins, counted in bytes of this direction."""
    body: bytes
    index: int = 0
    """Which part of its message."""
    has_more: bool = False
    why: str = ""
    """Reason for `opaque` and `skipped`."""


class Stream:
    """One direction of one connection."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._buffer = bytearray()
        self._start = 0
        """Place of the buffer's first byte."""
        self._greeted = self._is_opaque = False
        self._mechanism = ""
        self._index = 0
        self._skip_bytes = 0

    def feed(self, data: bytes) -> Iterator[StreamPiece]:
        """Takes the next bytes, and yields the units that they complete."""
        self.total_bytes += len(data)
        if self._is_opaque:
            return
        if self._skip_bytes:
            passed = min(self._skip_bytes, len(data))
            self._skip_bytes -= passed
            self._start += passed
            data = data[passed:]
        self._buffer += data
        try:
            while piece := self._next():
                yield piece
                if self._is_opaque:
                    return
        except Wrong as wrong:
            yield self._stop(f"byte {wrong.at}: expected {wrong.expected}, got {wrong.got}")

    def give_up(self, why: str) -> StreamPiece:
        """Reads nothing more."""
        return self._stop(why)

    def _stop(self, why: str) -> StreamPiece:
        self._is_opaque = True
        self._buffer.clear()
        return StreamPiece("opaque", self._start, b"", why=why)

    def _next(self) -> StreamPiece | None:
        return self._frame() if self._greeted else self._greeting()

    def _take(self, count: int) -> bytes:
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._start += count
        return found

    def _greeting(self) -> StreamPiece | None:
        buffer = self._buffer
        _check(buffer, 0, 0xFF, "ff, as ZMTP begins")
        _check(buffer, 9, 0x7F, "7f, the end of ZMTP's signature")
        if len(buffer) > 10 and buffer[10] < 3:
            raise Wrong(10, "ZMTP 3, which can be looked into", f"version {buffer[10]}")
        if len(buffer) < GREETING_BYTES:
            return None
        self._mechanism, self._greeted = mechanism_of(buffer), True
        return StreamPiece("greeting", 0, self._take(GREETING_BYTES))

    def _frame(self) -> StreamPiece | None:
        if self._mechanism != "NULL":
            what = f"the mechanism is {self._mechanism or 'without a name'}, not NULL"
            return self._stop(f"{what}: what follows cannot be read, its bytes are counted")
        head = self._buffer
        if not head:
            return None
        flags = head[0]
        if flags & RESERVED or (flags & COMMAND and flags & MORE):
            raise Wrong(self._start, "the flags of a frame", f"{flags:02x}")
        size_bytes = 8 if flags & LONG else 1
        if len(head) < 1 + size_bytes:
            return None
        size = int.from_bytes(head[1 : 1 + size_bytes], "big")
        if size > FRAME_BYTES_MAX:
            return self._skip(1 + size_bytes, size, flags)
        if len(head) < 1 + size_bytes + size:
            return None
        self._take(1 + size_bytes)
        return self._piece(flags, self._start, self._take(size))

    def _skip(self, head_bytes: int, size: int, flags: int) -> StreamPiece:
        self._take(head_bytes)
        at, present = self._start, min(size, len(self._buffer))
        self._take(present)
        self._skip_bytes = size - present
        why = f"a frame of {size} bytes; nothing above {FRAME_BYTES_MAX} is read"
        return self._counted(StreamPiece("skipped", at, b"", self._index, bool(flags & MORE), why))

    def _piece(self, flags: int, at: int, body: bytes) -> StreamPiece:
        if flags & COMMAND:
            return StreamPiece("command", at, body)
        return self._counted(StreamPiece("part", at, body, self._index, bool(flags & MORE)))

    def _counted(self, piece: StreamPiece) -> StreamPiece:
        self._index = self._index + 1 if piece.has_more else 0
        return piece


def _check(buffer: bytearray, at: int, expected: int, what: str) -> None:
    if len(buffer) > at and buffer[at] != expected:
        raise Wrong(at, what, f"{buffer[at]:02x}")


def mechanism_of(greeting: bytes | bytearray) -> str:
    """The name of the security mechanism."""
    return bytes(greeting[12:32]).rstrip(b"\0").decode("ascii", "backslashreplace")


def greeting(body: bytes) -> Dissected:
    """A greeting, field by field."""
    if len(body) != GREETING_BYTES:
        fault = FrameFault(len(body), "bad_frame", f"{GREETING_BYTES} bytes", str(len(body)))
        return Dissected("greeting", len(body), faults=[fault])
    fields = [
        Field("signature", 0, 10, "", body[:10].hex()),
        Field("version", 10, 12, "", f"{body[10]}.{body[11]}"),
        Field("mechanism", 12, 32, "", mechanism_of(body)),
        Field("as_server", 32, 33, "", body[32]),
    ]
    return Dissected("greeting", len(body), fields)


def command(body: bytes) -> Dissected:
    """A command; its kind is the command's name in lower case."""
    found = Dissected("command", len(body))
    try:
        name, at = _sized(body, 0, 1, "the name of a command")
        found.fields.append(Field("command", 0, at, "", name))
        if not name.isalpha() or not name.isascii():
            raise Wrong(1, "the name of a command", name, "bad_frame")
        found.kind = name.lower()
        _read_content(name, body, at, found.fields)
    except Wrong as wrong:
        found.faults.append(wrong.fault())
        found.near = near(body, wrong.at)
    return found


def _read_content(name: str, body: bytes, at: int, fields: list[Field]) -> None:
    if name == "READY":
        while at < len(body):
            key, value_at = _sized(body, at, 1, "a property")
            value, end = _sized(body, value_at, 4, f"the value of {key}")
            fields.append(Field(key, at, end, "", value))
            at = end
    elif name == "ERROR":
        reason, end = _sized(body, at, 1, "a reason")
        fields.append(Field("reason", at, end, "", reason))
    elif name == "PING":
        if len(body) < at + 2:
            raise Wrong(len(body), "a time to live of 2 bytes", "the end", "bad_frame")
        tenths = int.from_bytes(body[at : at + 2], "big")
        fields.append(Field("time_to_live_s", at, at + 2, "", tenths / 10))
        fields.append(Field("context", at + 2, len(body), "", body[at + 2 :].hex()))
    elif name in ("SUBSCRIBE", "CANCEL"):
        fields.append(Field("topic", at, len(body), "", _text(body[at:])))
    else:
        fields.append(Field("context", at, len(body), "", body[at:].hex()))


def _sized(body: bytes, at: int, size_bytes: int, what: str) -> tuple[str, int]:
    """A text behind its length, and where it ends."""
    start = at + size_bytes
    size = int.from_bytes(body[at:start], "big")
    if len(body) < start + size:
        raise Wrong(len(body), f"all {size} bytes of {what}", "the end", "bad_frame")
    return _text(body[start : start + size]), start + size


def _text(data: bytes) -> str:
    return data.decode("ascii", "backslashreplace")
