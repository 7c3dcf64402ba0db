"""Which elements of one transfer have arrived: ranges, duplicates, conflicts, what is missing."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import RANGES_MAX


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

    def __init__(self, elements: int) -> None:
        assert elements > 0, elements
        self.elements = elements
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

        Raises RemoteProtocolError BAD_RANGE outside the transfer and CHUNK_CONFLICT on an overlap
        that differs; the assembly is unchanged then.
        """
        self.check_range(offset, count)
        index = bisect_left(self.parts, (offset,))
        if index < len(self.parts) and self.parts[index][:3] == (offset, count, digest):
            return Arrival.DUPLICATE
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
        self.parts.insert(index, Part(offset, count, digest, handle))
        self._received += count
        return Arrival.NEW

    def check_range(self, offset: int, count: int) -> None:
        """Raises RemoteProtocolError BAD_RANGE unless the range lies within the transfer."""
        if offset < 0 or count < 1 or offset + count > self.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                "element range outside the fragment",
                expected=f"within 0..{self.elements}",
                got=f"{offset}+{count}",
            )

    def missing(self, limit: int = RANGES_MAX) -> tuple[tuple[int, int], ...]:
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
