"""Chunks of a transfer: order, duplicates, conflicts, gaps."""

from __future__ import annotations

import pytest

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow.assembly import Arrival, Assembly, chunks_max


def test_complete_in_any_order() -> None:
    parts = Assembly(30)
    for offset, handle in ((20, 3), (0, 1), (10, 2)):
        assert not parts.complete
        assert parts.add(offset, 10, 7, handle) is Arrival.NEW
    assert parts.complete
    assert parts.handles == (1, 2, 3)


def test_the_same_chunk_again_is_a_duplicate() -> None:
    parts = Assembly(30)
    parts.add(10, 10, 7, 1)
    assert parts.add(10, 10, 7, 2) is Arrival.DUPLICATE
    assert (parts.handles, parts.received) == ((1,), 10)


@pytest.mark.parametrize(
    ("offset", "count", "digest"),
    [(10, 10, 8), (10, 9, 7), (5, 6, 7), (19, 2, 7), (12, 3, 7), (0, 30, 7)],
)
def test_any_other_overlap_is_a_conflict_and_changes_nothing(
    offset: int, count: int, digest: int
) -> None:
    parts = Assembly(30)
    parts.add(10, 10, 7, 1)
    with pytest.raises(RemoteProtocolError) as error:
        parts.add(offset, count, digest, 2)
    assert error.value.code is ErrorCode.CHUNK_CONFLICT
    assert (parts.handles, parts.missing()) == ((1,), ((0, 10), (20, 10)))


@pytest.mark.parametrize(("offset", "count"), [(-1, 5), (0, 0), (0, 31), (30, 1), (25, 6)])
def test_ranges_outside_are_refused(offset: int, count: int) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        Assembly(30).add(offset, count, 7, 1)
    assert error.value.code is ErrorCode.BAD_RANGE


def test_missing_names_the_first_gaps() -> None:
    parts = Assembly(50)
    for offset in (10, 30):
        parts.add(offset, 10, 7, offset)
    assert parts.missing() == ((0, 10), (20, 10), (40, 10))
    assert parts.missing(limit=2) == ((0, 10), (20, 10))
    assert Assembly(5).missing() == ((0, 5),)


def test_a_transfer_in_too_many_chunks_is_refused() -> None:
    most = chunks_max(1000, 250)
    assert most == 32
    parts = Assembly(1000, most)
    for index in range(most):
        parts.add(index, 1, index, index)
    with pytest.raises(RemoteProtocolError, match="in too many chunks") as caught:
        parts.add(500, 1, 7, 7)
    assert caught.value.code is ErrorCode.BAD_RANGE
    assert parts.add(3, 1, 3, 99) is Arrival.DUPLICATE
    assert parts.received == most
