"""Captures: frames in a file, one after the other as they came.

    file        8 bytes `NARROWSC`, uint32 format (1)
    record      uint8 sort (0 a part of a message, 1 a command of ZMTP, 2 its greeting)
                uint8 flags (1: down, from the one that was dialled; 2: more parts follow)
                uint16 number of the part within its message
                uint32 number of the connection
                float64 seconds since 1970
                uint32 n, then n bytes: the frame

All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from narrows.proto.dissector.findings import Dissected, Wrong
from narrows.proto.dissector.parts import Direction, Parts
from narrows.proto.dissector.zmtp import FRAME_BYTES_MAX, Sort, command, greeting

MAGIC: Final = b"NARROWSC"
FORMAT: Final = 1
HEAD: Final = MAGIC + FORMAT.to_bytes(4, "little")
SORTS: Final[tuple[Sort, ...]] = ("part", "command", "greeting")
PART_MAX: Final = 0xFFFF

_RECORD: Final = struct.Struct("<BBHIdI")


@dataclass(frozen=True)
class Captured:
    """One frame, with the connection and time that it was captured at."""

    sort: Sort
    direction: Direction
    connection: int
    at_s: float
    """Seconds since 1970."""
    frame: bytes
    part: int = 0
    has_more: bool = False


def packed(captured: Captured) -> bytes:
    """The record of a frame."""
    flags = (captured.direction == "down") + 2 * captured.has_more
    head = _RECORD.pack(
        SORTS.index(captured.sort), flags, min(captured.part, PART_MAX), captured.connection,
        captured.at_s, len(captured.frame),
    )  # fmt: skip
    return head + captured.frame


def records(read: Callable[[int], bytes]) -> Iterator[Captured]:
    """The records that follow the head of a file; `read(n)` gives the next n bytes, fewer at the
    end. Raises Wrong, with the place in the file."""
    at = len(HEAD)
    while head := read(_RECORD.size):
        if len(head) < _RECORD.size:
            raise _cut(at, len(head))
        sort, flags, part, connection, at_s, size = _RECORD.unpack(head)
        if sort >= len(SORTS):
            raise Wrong(at, f"a sort from 0 to {len(SORTS) - 1}", str(sort))
        if flags > 3:
            raise Wrong(at + 1, "flags from 0 to 3", str(flags))
        if size > FRAME_BYTES_MAX:
            raise Wrong(at + _RECORD.size - 4, f"up to {FRAME_BYTES_MAX} bytes", str(size))
        frame = read(size)
        if len(frame) < size:
            raise _cut(at, _RECORD.size + len(frame))
        direction: Direction = "down" if flags & 1 else "up"
        yield Captured(SORTS[int(sort)], direction, connection, at_s, frame, part, bool(flags & 2))
        at += _RECORD.size + size


def _cut(at: int, size: int) -> Wrong:
    return Wrong(at + size, f"the rest of the record begun at byte {at}", "the end of the file")


class CaptureReader:
    """Dissects captured frames of any number of connections, in the order of their arrival."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, Direction], Parts] = {}

    def take(self, captured: Captured) -> Dissected:
        """Dissects the next frame."""
        if captured.sort == "greeting":
            return greeting(captured.frame)
        if captured.sort == "command":
            return command(captured.frame)
        key = captured.connection, captured.direction
        parts = self._parts.setdefault(key, Parts(captured.direction))
        return parts.take(captured.part, has_more=captured.has_more, frame=captured.frame)

    def forget(self, connection: int) -> None:
        """The connection is over."""
        self._parts.pop((connection, "up"), None)
        self._parts.pop((connection, "down"), None)
