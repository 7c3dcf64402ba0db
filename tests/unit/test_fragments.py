"""The fragment table by example: how tensors are cut, dealt out and refused."""

from __future__ import annotations

import dataclasses

import pytest

from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment, Piece, build_table
from narrows.proto.limits import FRAGMENTS_MAX
from narrows.proto.messages import LayoutEntry


def layout_of(*shapes: tuple[int, ...]) -> tuple[LayoutEntry, ...]:
    return tuple(
        LayoutEntry(f"t{index}", shape, "float32", "rda" if len(shape) > 1 else "mean")
        for index, shape in enumerate(shapes)
    )


def cut(table: tuple[Fragment, ...]) -> list[list[tuple[int, int, int]]]:
    """(tensor, start, count) of every piece, per fragment."""
    return [[(p.tensor, p.start, p.count) for p in each.pieces] for each in table]


THREE_PIECES = Fragment(
    0,
    (Piece(0, 0, 4, 0, "rda"), Piece(1, 0, 1, 4, "mean"), Piece(2, 8, 5, 5, "rda")),
    10,
)


def test_one_fragment_holds_everything_in_layout_order() -> None:
    (only,) = build_table(layout_of((3, 2), (5,), ()), 1)
    assert cut((only,)) == [[(0, 0, 6), (1, 0, 5), (2, 0, 1)]]
    assert [piece.offset for piece in only.pieces] == [0, 6, 11]
    assert [piece.rule for piece in only.pieces] == ["rda", "mean", "mean"]
    assert only.elements == 12


def test_largest_first_to_the_smallest_fragment() -> None:
    table = build_table(layout_of((2,), (9,), (5,), (4,)), 2)
    assert cut(table) == [[(0, 0, 2), (1, 0, 9)], [(2, 0, 5), (3, 0, 4)]]
    assert [each.index for each in table] == [0, 1]


def test_equal_tensors_go_out_in_layout_order_to_the_first_fragment() -> None:
    table = build_table(layout_of((4,), (4,), (4,), (4,)), 2)
    assert cut(table) == [[(0, 0, 4), (2, 0, 4)], [(1, 0, 4), (3, 0, 4)]]


def test_a_tensor_of_exactly_a_fragment_is_not_cut() -> None:
    assert cut(build_table(layout_of((8,), (8,)), 2)) == [[(0, 0, 8)], [(1, 0, 8)]]


def test_a_larger_tensor_is_cut_on_rows() -> None:
    table = build_table(layout_of((5, 4), (4,)), 2)
    assert cut(table) == [[(0, 8, 12)], [(0, 0, 8), (1, 0, 4)]]


def test_a_row_is_never_cut() -> None:
    table = build_table(layout_of((2, 100), (10,), (10,), (10,)), 4)
    assert cut(table) == [[(0, 0, 100)], [(0, 100, 100)], [(1, 0, 10), (3, 0, 10)], [(2, 0, 10)]]


@pytest.mark.parametrize(
    ("shapes", "count", "possible"),
    [
        ([(1, 100)], 2, 1),
        ([(3, 7)], 4, 3),
        ([(2, 100), (1,)], 4, 3),
        ([(), (), ()], 1000, 3),
    ],
)
def test_the_largest_possible_count_is_named(
    shapes: list[tuple[int, ...]], count: int, possible: int
) -> None:
    with pytest.raises(ConfigError, match=f"fragments.count = {possible}:") as caught:
        build_table(layout_of(*shapes), count)
    assert caught.value.expected == f"at most {possible}"
    assert len(build_table(layout_of(*shapes), possible)) == possible


@pytest.mark.parametrize("count", [-1, 0, FRAGMENTS_MAX + 1])
def test_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 1 to {FRAGMENTS_MAX}"):
        build_table(layout_of((FRAGMENTS_MAX + 1,)), count)


def test_bounds_are_offsets_and_the_end() -> None:
    assert THREE_PIECES.bounds.tolist() == [0, 4, 5, 10]
    assert THREE_PIECES.bounds is THREE_PIECES.bounds
    assert not THREE_PIECES.bounds.flags.writeable


@pytest.mark.parametrize(
    ("offset", "count", "pieces", "spans"),
    [
        (0, 10, range(3), [0, 4, 5, 10]),
        (0, 4, range(1), [0, 4]),
        (4, 1, range(1, 2), [0, 1]),
        (3, 3, range(3), [0, 1, 2, 3]),
        (5, 5, range(2, 3), [0, 5]),
        (6, 1, range(2, 3), [0, 1]),
        (9, 1, range(2, 3), [0, 1]),
    ],
)
def test_spans_and_pieces_of_a_chunk(
    offset: int, count: int, pieces: range, spans: list[int]
) -> None:
    assert THREE_PIECES.pieces_of(offset, count) == pieces
    assert THREE_PIECES.spans(offset, count).tolist() == spans
    assert THREE_PIECES.spans(offset, count).dtype == "int64"


@pytest.mark.parametrize(("offset", "count"), [(-1, 2), (0, 0), (0, -1), (0, 11), (10, 1), (9, 2)])
def test_chunks_outside_the_fragment_are_refused(offset: int, count: int) -> None:
    for method in (THREE_PIECES.spans, THREE_PIECES.pieces_of):
        with pytest.raises(LocalProtocolError) as caught:
            method(offset, count)
        assert caught.value.code is ErrorCode.BAD_RANGE


def test_regular_chunks() -> None:
    assert THREE_PIECES.chunks(4) == [(0, 4), (4, 4), (8, 2)]
    assert THREE_PIECES.chunks(5) == [(0, 5), (5, 5)]
    assert THREE_PIECES.chunks(1000) == [(0, 10)]


def test_fragments_are_values() -> None:
    assert dataclasses.replace(THREE_PIECES) == THREE_PIECES
    assert hash(dataclasses.replace(THREE_PIECES)) == hash(THREE_PIECES)
    assert dataclasses.replace(THREE_PIECES, index=1) != THREE_PIECES
