"""Layouts and their cut into fragments: complete, balanced, readable where they differ."""

from __future__ import annotations

from itertools import accumulate

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
    changes = {"name": "e", "shape": (8, 16), "dtype": "float32", "rule": "rda"}
    others = [Layout(8, ENTRIES), Layout(7, ENTRIES[:-1]), Layout(7, (WEIGHT, EMBEDDING))]
    for field, value in changes.items():
        changed = msgspec.structs.replace(EMBEDDING, **{field: value})
        others.append(Layout(7, (changed, *ENTRIES[1:])))
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
    for index, fragment in enumerate(table):
        *offsets, end = accumulate((piece.count for piece in fragment.pieces), initial=0)
        assert (fragment.index, fragment.elements) == (index, end)
        assert [piece.offset for piece in fragment.pieces] == offsets
        order = [(piece.tensor, piece.start) for piece in fragment.pieces]
        assert order == sorted(order)
    pieces = [piece for fragment in table for piece in fragment.pieces]
    for piece in pieces:
        row_elements = element_count(entries[piece.tensor]) // rows[piece.tensor]
        assert piece.start % row_elements == piece.count % row_elements == 0
    seen = sorted((each.tensor, each.start + i) for each in pieces for i in range(each.count))
    assert seen == [(t, i) for t, each in enumerate(entries) for i in range(element_count(each))]
    sizes = [fragment.elements for fragment in table]
    assert max(sizes) - min(sizes) <= max(piece.count for piece in pieces)


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
