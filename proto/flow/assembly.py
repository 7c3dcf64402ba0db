"""The elements of one transfer that have arrived: ranges, duplicates, conflicts, gaps.

Chunks may come in any order, twice, and cut differently when they are asked for again. The list is
kept in the order of offsets, so that neighbours alone decide about an overlap.
"""

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
    """The answer of an assembly to a chunk."""

    NEW = "new"
    DUPLICATE = "duplicate"


class ArrivedChunk(NamedTuple):
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

    def __init__(self, elements: int, chunks_max: int | None = None) -> None:
        assert elements > 0, elements
        self.elements = elements
        self.chunks_max = elements if chunks_max is None else chunks_max
        self.chunks: list[ArrivedChunk] = []
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
        """Handles of all chunks, by offset."""
        return tuple(chunk.handle for chunk in self.chunks)

    def add(self, offset: int, count: int, digest: int, handle: int) -> Arrival:
        """Takes a chunk in.

        Raises RemoteProtocolError BAD_RANGE outside the transfer or beyond `chunks_max` chunks and
        CHUNK_CONFLICT on an overlap that differs; the assembly is unchanged then.
        """
        self.check_range(offset, count)
        if self.has(offset, count, digest):
            return Arrival.DUPLICATE
        index = bisect_left(self.chunks, (offset,))
        before = self.chunks[index - 1] if index else None
        after = self.chunks[index] if index < len(self.chunks) else None
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
        self.chunks.insert(index, ArrivedChunk(offset, count, digest, handle))
        self._received += count
        assert self._received <= self.elements, "an element has arrived twice"
        return Arrival.NEW

    def has(self, offset: int, count: int, digest: int) -> bool:
        """Whether this very chunk has arrived."""
        index = bisect_left(self.chunks, (offset,))
        return index < len(self.chunks) and self.chunks[index][:3] == (offset, count, digest)

    def check_room(self, coming: int = 0) -> None:
        """Raises RemoteProtocolError BAD_RANGE if, with those that are coming, no room is left."""
        assert coming >= 0, coming
        if len(self.chunks) + coming >= self.chunks_max:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                "a transfer in too many chunks",
                expected=f"at most {self.chunks_max} for {self.elements} elements",
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
        assert limit > 0, limit
        gaps: list[tuple[int, int]] = []
        position = 0
        for chunk in self.chunks:
            if chunk.offset > position:
                gaps.append((position, chunk.offset - position))
            position = chunk.offset + chunk.elements
        if position < self.elements:
            gaps.append((position, self.elements - position))
        # Conservation: every element has arrived or lies in a gap.
        assert self._received + sum(count for _, count in gaps) == self.elements, gaps
        return tuple(gaps[:limit])


def chunks_max(elements: int, chunk_elements: int) -> int:
    """The largest number of chunks that a transfer may come in.

    A receiver keeps a record per chunk: single elements would let a peer fill its memory.
    """
    assert elements > 0 and chunk_elements > 0, (elements, chunk_elements)
    return 16 + CHUNKS_OF_A_REGULAR_CUT_MAX * -(-elements // chunk_elements)
