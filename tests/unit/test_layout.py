"""Layouts and their cut into fragments: complete, balanced, readable where they differ."""

from __future__ import annotations

import msgspec
import pytest
from codec_cases import fragment_of
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.errors import ConfigError, ErrorCode, RemoteProtocolError
from narrows.proto.layout import (
    Fragment,
    build_table,
    check_layout,
    differences,
    element_count,
    fingerprint,
)
from narrows.proto.messages import ELEMENTS_MAX, Layout, LayoutEntry

EMBEDDING = LayoutEntry("embedding.weight", (16, 8), "bfloat16", "mean")
WEIGHT = LayoutEntry("block.0.weight", (8, 8), "bfloat16", "rda")
BIAS = LayoutEntry("block.0.bias", (8,), "float32", "mean")
SCALAR = LayoutEntry("temperature", (), "float32", "mean")
ENTRIES = (EMBEDDING, WEIGHT, BIAS, SCALAR)


def entry(name: str = "w", shape: tuple[int, ...] = (2, 3)) -> LayoutEntry:
    return LayoutEntry(name, shape, "float32", "rda")


def entries_of(*shapes: tuple[int, ...]) -> tuple[LayoutEntry, ...]:
    return tuple(entry(f"t{index}", shape) for index, shape in enumerate(shapes))


# Layouts.


def test_layouts_that_no_model_has_are_refused() -> None:
    check_layout(Layout(0, (*ENTRIES, entry("módulo.weight"))))
    check_layout(Layout(0, (entry(shape=(ELEMENTS_MAX,)),)))
    for entries, text in (
        ((entry("a\nb"),), "tensor name"),
        ((entry("a\x1b[31m"),), "tensor name"),
        ((entry("a"), entry("b"), entry("a")), "'a' twice"),
        ((entry("a", (ELEMENTS_MAX,)), entry("b", (1,))), "elements"),
        # The product would wrap to 0 in 64 bits.
        ((entry(shape=(1 << 33, 1 << 33)),), "elements"),
    ):
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            check_layout(Layout(0, entries))
        assert caught.value.code is ErrorCode.BAD_MESSAGE


def test_a_fingerprint_depends_on_every_field() -> None:
    layout = Layout(7, ENTRIES)
    others = [
        Layout(8, ENTRIES),
        Layout(7, ENTRIES[:-1]),
        Layout(7, (WEIGHT, EMBEDDING, BIAS, SCALAR)),
        *(
            Layout(7, (msgspec.structs.replace(EMBEDDING, **change), WEIGHT, BIAS, SCALAR))
            for change in ({"name": "e"}, {"shape": (8, 16)}, {"dtype": "float32"}, {"rule": "rda"})
        ),
    ]
    # Both sides of a run compare it, so it must never change by itself.
    assert fingerprint(layout) == "9b7c3597dffbf08a711435185bcfc48a"
    assert len({fingerprint(each) for each in (layout, *others)}) == 1 + len(others)


def test_differences_name_tensor_field_and_both_values() -> None:
    assert differences(ENTRIES, list(ENTRIES)) == []
    theirs = (
        msgspec.structs.replace(EMBEDDING, shape=(17, 8), rule="rda"),
        msgspec.structs.replace(WEIGHT, dtype="float16"),
        SCALAR,
        entry("extra"),
    )
    expected = [
        "'embedding.weight': shape (17, 8), expected (16, 8)",
        "'embedding.weight': rule rda, expected mean",
        "'block.0.weight': dtype float16, expected bfloat16",
        "'block.0.bias' is missing",
        "'extra' is not in the run",
    ]
    assert differences(ENTRIES, theirs) == expected
    assert differences((*ENTRIES, entry("more")), theirs) == [*expected[:4], "'more' is missing"]


def test_another_order_is_a_difference() -> None:
    assert differences(ENTRIES, (WEIGHT, EMBEDDING, BIAS, SCALAR)) == [
        "tensor 0 is 'block.0.weight', expected 'embedding.weight'",
        "tensor 1 is 'embedding.weight', expected 'block.0.weight'",
    ]


# The cut.


def cut(table: tuple[Fragment, ...]) -> list[list[tuple[int, int, int]]]:
    """(tensor, start, count) of every piece, per fragment."""
    return [[(p.tensor, p.start, p.count) for p in each.pieces] for each in table]


@pytest.mark.parametrize(
    ("shapes", "count", "expected"),
    [
        # One fragment: everything in layout order.
        ([(3, 2), (5,), ()], 1, [[(0, 0, 6), (1, 0, 5), (2, 0, 1)]]),
        # Largest first to the smallest fragment.
        ([(2,), (9,), (5,), (4,)], 2, [[(0, 0, 2), (1, 0, 9)], [(2, 0, 5), (3, 0, 4)]]),
        # Equal tensors go out in layout order, to the first fragment.
        ([(4,), (4,), (4,), (4,)], 2, [[(0, 0, 4), (2, 0, 4)], [(1, 0, 4), (3, 0, 4)]]),
        # A tensor of exactly a fragment is not cut, a larger one is cut on rows.
        ([(8,), (8,)], 2, [[(0, 0, 8)], [(1, 0, 8)]]),
        ([(5, 4), (4,)], 2, [[(0, 8, 12)], [(0, 0, 8), (1, 0, 4)]]),
    ],
)
def test_the_cut_by_example(
    shapes: list[tuple[int, ...]], count: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    assert cut(build_table(entries_of(*shapes), count)) == expected


@pytest.mark.parametrize(
    ("shapes", "count", "possible"),
    [([(1, 100)], 2, 1), ([(3, 7)], 4, 3), ([(2, 100), (1,)], 4, 3), ([(), (), ()], 1000, 3)],
)
def test_the_largest_possible_count_is_named(
    shapes: list[tuple[int, ...]], count: int, possible: int
) -> None:
    with pytest.raises(ConfigError, match=f"fragments.count = {possible}:"):
        build_table(entries_of(*shapes), count)
    assert len(build_table(entries_of(*shapes), possible)) == possible


shapes_of_few = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(st.lists(shapes_of_few, min_size=1, max_size=12), st.data())
def test_fragments_cover_every_element_once_in_whole_rows(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    entries = entries_of(*shapes)
    rows = [shape[0] if shape else 1 for shape in shapes]
    count = data.draw(st.integers(1, sum(rows)))
    try:
        table = build_table(entries, count)
    except ConfigError as error:
        table = build_table(entries, int(error.expected.removeprefix("at most ")))
    seen = [bytearray(element_count(each)) for each in entries]
    row_elements = [element_count(each) // r for each, r in zip(entries, rows, strict=True)]
    for index, fragment in enumerate(table):
        assert fragment.index == index
        end = 0
        for piece in fragment.pieces:
            assert piece.offset == end and piece.count > 0
            assert piece.start % row_elements[piece.tensor] == 0
            assert piece.count % row_elements[piece.tensor] == 0
            for element in range(piece.start, piece.start + piece.count):
                seen[piece.tensor][element] += 1
            end += piece.count
        assert fragment.elements == end
        order = [(piece.tensor, piece.start) for piece in fragment.pieces]
        assert order == sorted(order)
    assert all(set(counts) == {1} for counts in seen)
    sizes = [fragment.elements for fragment in table]
    assert max(sizes) - min(sizes) <= max(p.count for each in table for p in each.pieces)


# Chunks.


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([1, 7, 256, 1024]))
def test_chunks_are_regular_and_their_spans_are_the_pieces_within(
    lengths: list[int], chunk_elements: int
) -> None:
    fragment = fragment_of(*lengths)
    piece_at = [index for index, length in enumerate(lengths) for _ in range(length)]
    covered: list[int] = []
    for index in range(fragment.chunk_count(chunk_elements)):
        offset, count = fragment.chunk(index, chunk_elements)
        assert offset == index * chunk_elements == len(covered)
        assert count == min(chunk_elements, fragment.elements - offset)
        spans, pieces = fragment.spans(offset, count).tolist(), fragment.pieces_of(offset, count)
        assert (spans[0], spans[-1], len(spans)) == (0, count, len(pieces) + 1)
        for piece, start, end in zip(pieces, spans, spans[1:], strict=False):
            covered += [piece] * (end - start)
    assert covered == piece_at


def test_a_chunk_number_out_of_range_is_refused() -> None:
    for index in (-1, 3, 1 << 48):
        with pytest.raises(RemoteProtocolError, match="expected 0 to 2, got") as caught:
            fragment_of(4, 1, 5).chunk(index, 4)
        assert caught.value.code is ErrorCode.BAD_CHUNK
