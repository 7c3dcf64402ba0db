"""Which elements of one transfer have arrived: ranges, duplicates, conflicts, what is missing."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import CHUNKS_OF_A_REGULAR_CUT_MAX, RANGES_MAX
from narrows.proto.terms import Ranges


def touches(ranges: Ranges, offset: int, count: int) -> bool:
    """True if [offset, offset + count) shares an element with one of the ranges."""
    return any(start < offset + count and offset < start + length for start, length in ranges)


class Arrival(Enum):
    """What a chunk was to an assembly."""

    NEW = "new"
    DUPLICATE = "duplicate"


class Part(NamedTuple):
    """A chunk that has arrived; `handle` names its content, which the shell holds."""

    offset: int
    elements: int
    digest: int
    handle: int


class Assembly:
    """The chunks of one transfer of `elements` elements, complete when no element is missing.

    The same range with the same digest again is a duplicate; any other overlap is a conflict, so
    the first bytes that arrived are never silently replaced.
    """

    def __init__(self, elements: int, parts_max: int | None = None) -> None:
        assert elements > 0, elements
        self.elements = elements
        self.parts_max = elements if parts_max is None else parts_max
        self.parts: list[Part] = []
        self._received = 0

    @property
    def complete(self) -> bool:
        return self._received == self.elements

    @property
    def received(self) -> int:
        """Elements that have arrived."""
        return self._received

    @property
    def handles(self) -> tuple[int, ...]:
        """Handles of all parts, by offset."""
        return tuple(part.handle for part in self.parts)

    def add(self, offset: int, count: int, digest: int, handle: int) -> Arrival:
        """Takes a chunk in.

        Raises RemoteProtocolError BAD_RANGE outside the transfer or beyond `parts_max` chunks and
        CHUNK_CONFLICT on an overlap that differs; the assembly is unchanged then.
        """
        self.check_range(offset, count)
        if self.has(offset, count, digest):
            return Arrival.DUPLICATE
        index = bisect_left(self.parts, (offset,))
        before = self.parts[index - 1] if index else None
        after = self.parts[index] if index < len(self.parts) else None
        for other in (before, after):
            if other and offset < other.offset + other.elements and other.offset < offset + count:
                raise RemoteProtocolError(
                    ErrorCode.CHUNK_CONFLICT,
                    "chunk overlaps one that arrived before and differs",
                    expected=f"elements {other.offset}+{other.elements}, xxh3 {other.digest:016x}",
                    got=f"elements {offset}+{count}, xxh3 {digest:016x}",
                    remedy="one push id must always carry the same bytes",
                )
        self.check_room()
        self.parts.insert(index, Part(offset, count, digest, handle))
        self._received += count
        return Arrival.NEW

    def has(self, offset: int, count: int, digest: int) -> bool:
        """Whether this very chunk has arrived."""
        index = bisect_left(self.parts, (offset,))
        return index < len(self.parts) and self.parts[index][:3] == (offset, count, digest)

    def check_room(self, coming: int = 0) -> None:
        """Raises RemoteProtocolError BAD_RANGE if, with those that are coming, it is full."""
        if len(self.parts) + coming >= self.parts_max:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                "a transfer in too many chunks",
                expected=f"at most {self.parts_max} for {self.elements} elements",
                got="one more",
                remedy="cut at chunk_elements, as the Welcome says",
            )

    def check_range(self, offset: int, count: int) -> None:
        """Raises RemoteProtocolError BAD_RANGE unless the range lies within the transfer."""
        if offset < 0 or count < 1 or offset + count > self.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                "element range outside the fragment",
                expected=f"within 0..{self.elements}",
                got=f"{offset}+{count}",
            )

    def missing(self, limit: int = RANGES_MAX) -> Ranges:
        """The first `limit` gaps as (offset, count)."""
        gaps: list[tuple[int, int]] = []
        position = 0
        for part in self.parts:
            if part.offset > position:
                gaps.append((position, part.offset - position))
            position = part.offset + part.elements
        if position < self.elements:
            gaps.append((position, self.elements - position))
        return tuple(gaps[:limit])


def parts_max(elements: int, chunk_elements: int) -> int:
    """The most chunks that a transfer may come in."""
    return 16 + CHUNKS_OF_A_REGULAR_CUT_MAX * -(-elements // chunk_elements)
