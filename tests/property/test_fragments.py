"""The fragment table for any layout: complete, balanced, the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.layout import check_layout, element_count
from narrows.proto.messages import LayoutEntry

shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LayoutEntry, ...]:
    return tuple(
        LayoutEntry(f"t{index}", shape, "float32", draw(st.sampled_from(["mean", "rda"])))
        for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=12)))
    )


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]]:
    layout = draw(layouts())
    count = draw(st.integers(1, sum(each.shape[0] if each.shape else 1 for each in layout)))
    try:
        return layout, build_table(layout, count)
    except ConfigError as error:
        return layout, build_table(layout, int(error.expected.removeprefix("at most ")))


@given(tables())
def test_every_element_is_in_exactly_one_piece(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    layout, table = case
    check_layout(layout)
    seen = [bytearray(element_count(entry)) for entry in layout]
    for fragment in table:
        for piece in fragment.pieces:
            assert piece.count > 0
            for element in range(piece.start, piece.start + piece.count):
                seen[piece.tensor][element] += 1
    assert all(set(counts) == {1} for counts in seen)


@given(tables())
def test_pieces_lie_one_after_another_and_are_whole_rows(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    layout, table = case
    for index, fragment in enumerate(table):
        assert fragment.index == index
        end = 0
        for piece in fragment.pieces:
            entry = layout[piece.tensor]
            row = element_count(entry) // (entry.shape[0] if entry.shape else 1)
            assert piece.offset == end
            assert piece.start % row == piece.count % row == 0
            assert piece.rule == entry.rule
            end += piece.count
        assert fragment.elements == end > 0
        order = [(piece.tensor, piece.start) for piece in fragment.pieces]
        assert order == sorted(order)


@given(tables())
def test_fragments_are_balanced(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    layout, table = case
    sizes = [fragment.elements for fragment in table]
    largest = max(piece.count for fragment in table for piece in fragment.pieces)
    rows = [element_count(entry) // (entry.shape or (1,))[0] for entry in layout]
    mean = sum(sizes) / len(table)
    assert max(sizes) - min(sizes) <= largest
    assert largest < mean + max(rows) or largest == max(rows)


@given(tables())
def test_only_tensors_larger_than_a_fragment_are_cut(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    layout, table = case
    total = sum(map(element_count, layout))
    for fragment in table:
        for piece in fragment.pieces:
            whole = element_count(layout[piece.tensor])
            assert piece.count == whole or whole * len(table) > total


@given(tables())
def test_pieces_are_dealt_out_largest_first(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    _, table = case
    pieces = [(piece, fragment.index) for fragment in table for piece in fragment.pieces]
    pieces.sort(key=lambda each: (-each[0].count, each[0].tensor, each[0].start))
    sizes = [0] * len(table)
    for piece, index in pieces:
        assert index == sizes.index(min(sizes))
        sizes[index] += piece.count


@given(tables())
def test_names_and_dtypes_do_not_change_the_table(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]],
) -> None:
    layout, table = case
    renamed = [
        LayoutEntry(f"other{-index}", entry.shape, "float16", entry.rule)
        for index, entry in enumerate(layout)
    ]
    assert build_table(renamed, len(table)) == table


@given(layouts(), st.integers(1, 200))
def test_a_refusal_names_the_largest_count_that_works(
    layout: tuple[LayoutEntry, ...], count: int
) -> None:
    def works(candidate: int) -> bool:
        try:
            return len(build_table(layout, candidate)) == candidate
        except ConfigError:
            return False

    if not works(count):
        with pytest.raises(ConfigError) as caught:
            build_table(layout, count)
        best = max(candidate for candidate in range(1, count) if works(candidate))
        assert caught.value.expected == f"at most {best}"


@given(tables(), st.integers(1, 50))
def test_chunks_cover_a_fragment_and_their_spans_its_bounds(
    case: tuple[tuple[LayoutEntry, ...], tuple[Fragment, ...]], chunk_elements: int
) -> None:
    _, table = case
    for fragment in table:
        end, bounds, pieces = 0, {0}, set[int]()
        for offset, count in fragment.chunks(chunk_elements):
            assert offset == end and 1 <= count <= chunk_elements
            end += count
            spans, touched = fragment.spans(offset, count), fragment.pieces_of(offset, count)
            assert spans[0] == 0 and spans[-1] == count and (spans[1:] > spans[:-1]).all()
            assert len(touched) == spans.size - 1
            bounds |= set((spans + offset).tolist())
            pieces |= set(touched)
        assert end == fragment.elements
        assert set(fragment.bounds.tolist()) <= bounds
        assert pieces == set(range(len(fragment.pieces)))
