"""A model of numpy arrays, as an island reads and writes it."""

from __future__ import annotations

import numpy as np

from narrows.proto.codec import F32
from narrows.proto.layout import Fragment, Piece, element_count
from narrows.proto.messages import DtypeName, Layout, LayoutEntry

LAYOUT = Layout(
    0,
    (
        LayoutEntry("w", (30, 70), "float32", "rda"),
        LayoutEntry("b", (33,), "float32", "mean"),
        LayoutEntry("v", (9, 111), "float32", "rda"),
    ),
)


class Arrays:
    """A ParameterSource of flat float32 arrays."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.tensors = [np.zeros(element_count(entry), np.float32) for entry in layout.entries]

    def read(self, fragment: Fragment, out: F32) -> None:
        for piece in fragment.pieces:
            out[piece.offset : piece.offset + piece.count] = self.view(piece)

    def write(self, fragment: Fragment, values: F32) -> None:
        for piece in fragment.pieces:
            self.view(piece)[:] = values[piece.offset : piece.offset + piece.count]

    def view(self, piece: Piece) -> F32:
        return self.tensors[piece.tensor][piece.start : piece.start + piece.count]

    def dtype(self, piece: Piece) -> DtypeName:
        return "float32"
