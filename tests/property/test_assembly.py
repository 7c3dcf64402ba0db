"""Assembly against a dumb twin that keeps one entry per element."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow.assembly import Arrival, Assembly
from narrows.proto.limits import RANGES_MAX

Chunk: TypeAlias = tuple[int, int, int]
"""Offset, count, digest."""


class Twin:
    """Element by element, the chunk that brought it and its handle."""

    def __init__(self, elements: int) -> None:
        self.brought: list[tuple[Chunk, int] | None] = [None] * elements

    def add(self, chunk: Chunk, handle: int) -> Arrival | ErrorCode:
        offset, count, _ = chunk
        wanted = range(offset, offset + count)
        if not wanted or not all(0 <= element < len(self.brought) for element in wanted):
            return ErrorCode.BAD_RANGE
        before = {self.brought[element] for element in wanted}
        if before == {None}:
            for element in wanted:
                self.brought[element] = chunk, handle
            return Arrival.NEW
        same = {entry[0] if entry else None for entry in before} == {chunk}
        return Arrival.DUPLICATE if same else ErrorCode.CHUNK_CONFLICT

    @property
    def received(self) -> int:
        return sum(entry is not None for entry in self.brought)

    @property
    def handles(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(entry[1] for entry in self.brought if entry))

    def missing(self) -> set[int]:
        return {element for element, entry in enumerate(self.brought) if entry is None}


def add(parts: Assembly, chunk: Chunk, handle: int) -> Arrival | ErrorCode:
    try:
        return parts.add(*chunk, handle)
    except RemoteProtocolError as error:
        return error.code


def check_same(parts: Assembly, twin: Twin) -> None:
    assert parts.received == twin.received
    assert parts.complete == (twin.missing() == set())
    assert parts.handles == twin.handles
    gaps = parts.missing()
    elements = [offset + i for offset, count in gaps for i in range(count)]
    assert elements == sorted(twin.missing())
    # Gaps are as long as they can be: none is empty and no two of them touch.
    assert all(count > 0 for _, count in gaps)
    ends = [offset + count for offset, count in gaps]
    assert all(end < offset for end, (offset, _) in zip(ends, gaps[1:], strict=False))


@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.integers(-2, 26), st.integers(-1, 26), st.integers(0, 1)), max_size=40),
)
def test_any_chunks_in_any_order(elements: int, chunks: list[Chunk]) -> None:
    parts, twin = Assembly(elements), Twin(elements)
    for handle, chunk in enumerate(chunks):
        assert add(parts, chunk, handle) == twin.add(chunk, handle)
        check_same(parts, twin)


@st.composite
def cut_and_shuffled(draw: st.DrawFn) -> tuple[int, list[Chunk]]:
    """All chunks of a transfer, cut anywhere, some of them twice or more, in any order."""
    elements = draw(st.integers(1, 1000))
    cuts = draw(st.sets(st.integers(0, elements), max_size=20)) | {0, elements}
    bounds = sorted(cuts)
    digests = st.integers(0, 2**64 - 1)
    chunks = [(a, b - a, draw(digests)) for a, b in pairwise(bounds)]
    again = draw(st.lists(st.sampled_from(chunks), max_size=5))
    return elements, draw(st.permutations(chunks + again))


@given(cut_and_shuffled())
def test_a_transfer_is_complete_with_its_last_chunk(case: tuple[int, list[Chunk]]) -> None:
    elements, chunks = case
    parts = Assembly(elements)
    seen: dict[Chunk, int] = {}
    for handle, chunk in enumerate(chunks):
        expected = Arrival.DUPLICATE if chunk in seen else Arrival.NEW
        assert add(parts, chunk, handle) is expected
        seen.setdefault(chunk, handle)
        assert parts.complete == (len(seen) == len(set(chunks)))
    assert parts.missing() == ()
    # The handles of the first arrivals, by offset: what came again is never used.
    assert parts.handles == tuple(seen[chunk] for chunk in sorted(seen))


@given(cut_and_shuffled(), st.data())
def test_asking_for_what_is_missing_completes_it(
    case: tuple[int, list[Chunk]], data: st.DataObject
) -> None:
    elements, chunks = case
    parts = Assembly(elements)
    for handle, chunk in enumerate(data.draw(st.lists(st.sampled_from(chunks), max_size=10))):
        add(parts, chunk, handle)
    limit = data.draw(st.integers(1, 3))
    rounds = 0
    while not parts.complete:
        ranges = parts.missing(limit)
        assert 0 < len(ranges) <= limit
        for handle, (offset, count, digest) in enumerate(chunks):
            if any(a < offset + count and offset < a + n for a, n in ranges):
                add(parts, (offset, count, digest), 100 + handle)
        rounds += 1
        assert rounds <= len(chunks)


def test_no_more_gaps_than_a_message_holds() -> None:
    parts = Assembly(4 * RANGES_MAX)
    for handle, offset in enumerate(range(0, 4 * RANGES_MAX, 2)):
        parts.add(offset, 1, 0, handle)
    gaps = parts.missing()
    assert gaps == tuple((2 * i + 1, 1) for i in range(RANGES_MAX))
