"""Layouts, and the fragment table that every peer computes from one.

An input is 2 bytes for the number of fragments and a layout in MessagePack.
"""

from __future__ import annotations

from random import Random

import msgspec
from any_messages import any_of, mutated
from fuzz.target import Target
from fuzz.tree import altered_msgpack
from hypothesis import strategies as st

from narrows.proto.errors import ConfigError, RemoteProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.layout import check_layout, differences, element_count
from narrows.proto.messages import LayoutEntry

SHAPES = ((), (1,), (7,), (24, 16), (1, 1 << 40), (1 << 30, 3), (5, 1, 2, 1, 3, 1, 2, 1))
LAYOUTS = tuple(
    tuple(
        LayoutEntry(f"tensor {index}", shape, "float32", "rda" if index % 2 else "mean")
        for index, shape in enumerate(shapes)
    )
    for shapes in (SHAPES[:1], SHAPES[1:4], SHAPES, SHAPES[3:4] * 9, SHAPES[:4] * 20)
)
_decoder = msgspec.msgpack.Decoder(tuple[LayoutEntry, ...])


def run(data: bytes) -> None:
    try:
        layout = _decoder.decode(data[2:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # As frames.decode_control, whose part this is, turns into an error.
    try:
        check_layout(layout)
        table = build_table(layout, int.from_bytes(data[:2], "little"))
    except (RemoteProtocolError, ConfigError):
        return
    check_table(layout, table)
    assert differences(layout, layout) == []
    if len(layout) > 1:
        assert differences(layout, layout[:-1]) and differences(layout, layout[::-1])


def check_table(layout: tuple[LayoutEntry, ...], table: tuple[Fragment, ...]) -> None:
    """Every element of every tensor is in exactly one piece, and spans follow the pieces."""
    held = [0] * len(layout)
    for fragment in table:
        place = 0
        for piece in fragment.pieces:
            assert piece.offset == place and 0 < piece.count
            assert piece.start + piece.count <= element_count(layout[piece.tensor])
            assert piece.rule == layout[piece.tensor].rule
            held[piece.tensor] += piece.count
            place += piece.count
        assert place == fragment.elements
        last = min(fragment.elements, 1000)
        assert fragment.spans(fragment.elements - last, last)[-1] == last
    assert held == [element_count(entry) for entry in layout]


def seeds() -> list[bytes]:
    return [
        count.to_bytes(2, "little") + msgspec.msgpack.encode(layout)
        for layout in LAYOUTS
        for count in (1, 4, 4096)
    ]


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_msgpack(data[2:], random)
    return None if changed is None else data[:2] + changed


_layouts = st.lists(any_of(LayoutEntry), max_size=5).map(msgspec.msgpack.encode)
EXAMPLES = st.tuples(st.binary(min_size=2, max_size=2), _layouts | mutated(_layouts)).map(b"".join)

TARGET = Target("layout", run, seeds, EXAMPLES, mutate)
