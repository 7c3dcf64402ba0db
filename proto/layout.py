"""The model as it travels: tensors, fragments, pieces, chunks and blocks, the same on every peer.

A layout names the tensors. It is cut into P fragments, from the layout and P alone: a tensor larger
than a fragment is cut on rows of its first dimension, no other tensor is cut, and the slices are
dealt out largest first, each to the fragment that is smallest so far. So no two fragments differ
by more than the largest slice, and a piece keeps the shape of a matrix.

A fragment travels in regular chunks: chunk i is elements [i * c, (i + 1) * c). Digests have two
levels over blocks of BLOCK elements, so that no rank of an island needs a whole fragment.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from narrows.proto.errors import ConfigError, ErrorCode, fault
from narrows.proto.messages import ELEMENTS_MAX, FRAGMENTS_MAX, Layout, LayoutEntry, MergeRule

BLOCK: Final = 65_536
"""Elements of a block: the unit of digests, and of what a rank of an island owns."""

_Slice: TypeAlias = tuple[int, int, int]
"""Whole rows of a tensor: index of the tensor, first element, elements."""


def element_count(entry: LayoutEntry) -> int:
    """Elements of a tensor; 1 for a scalar. A Python int, which cannot wrap."""
    return math.prod(entry.shape)


def check_layout(layout: Layout) -> None:
    """Raises RemoteProtocolError BAD_MESSAGE for a layout that no model has. Names must be unique
    and printable, and sizes within the bounds of messages.py."""
    names: set[str] = set()
    for entry in layout.entries:
        if not entry.name.isprintable():
            raise fault("layout: tensor name", expected="printable", got=repr(entry.name))
        if entry.name in names:
            raise fault("layout: tensor names", expected="unique ones", got=f"{entry.name!r} twice")
        names.add(entry.name)
    elements = sum(element_count(entry) for entry in layout.entries)
    if elements > ELEMENTS_MAX:
        raise fault("layout: elements", expected=f"at most {ELEMENTS_MAX}", got=elements)


def fingerprint(layout: Layout) -> str:
    """BLAKE2b with 16 bytes of digest over the layout's shortest MessagePack, in hex."""
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16).hexdigest()


def differences(ours: Sequence[LayoutEntry], theirs: Sequence[LayoutEntry]) -> list[str]:
    """The first five differences of two checked layouts, one readable line each."""
    our_entries = {entry.name: entry for entry in ours}
    their_entries = {entry.name: entry for entry in theirs}
    found: list[str] = []
    for name, entry in our_entries.items():
        if name not in their_entries:
            found.append(f"{name!r} is missing")
            continue
        their_entry = their_entries[name]
        found += [
            f"{name!r}: {field} {getattr(their_entry, field)}, expected {getattr(entry, field)}"
            for field in ("shape", "dtype", "rule")
            if getattr(their_entry, field) != getattr(entry, field)
        ]
    found += [f"{name!r} is not in the run" for name in their_entries if name not in our_entries]
    if our_entries.keys() == their_entries.keys():
        found += [
            f"tensor {tensor} is {other!r}, expected {name!r}"
            for tensor, (name, other) in enumerate(zip(our_entries, their_entries, strict=True))
            if name != other
        ]
    return found[:5]


@dataclass(frozen=True)
class Piece:
    """Whole rows of one tensor within a fragment. Each piece has its own scale and merge rule."""

    tensor: int
    """Index in the layout."""
    start: int
    """First element within the flattened tensor."""
    count: int
    offset: int
    """First element within the fragment."""
    rule: MergeRule


@dataclass(frozen=True)
class Fragment:
    """A fixed part of the parameters: its pieces one after another, `elements` in all."""

    index: int
    pieces: tuple[Piece, ...]
    elements: int

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """(k + 1,) offsets of the pieces and the end. Read-only."""
        bounds = np.array([piece.offset for piece in self.pieces] + [self.elements], np.int64)
        bounds.setflags(write=False)
        assert bounds[0] == 0 and bool(np.all(bounds[1:] > bounds[:-1])), self.pieces
        return bounds

    def spans(self, offset: int, count: int) -> NDArray[np.int64]:
        """(s + 1,) bounds, relative to `offset`, of the pieces cut to `count` elements from
        there."""
        touched = self.pieces_of(offset, count)
        cut = self.bounds[touched.start : touched.stop + 1].clip(offset, offset + count)
        spans = cut - offset
        assert spans[0] == 0 and spans[-1] == count, f"{spans} do not cover {count} elements"
        return spans

    def pieces_of(self, offset: int, count: int) -> range:
        """Indices of the pieces that `count` elements from `offset` touch."""
        assert offset >= 0 and count >= 1 and offset + count <= self.elements, (offset, count)
        first = int(self.bounds.searchsorted(offset, side="right")) - 1
        touched = range(first, int(self.bounds.searchsorted(offset + count, side="left")))
        assert touched and touched.stop <= len(self.pieces), touched
        return touched

    def chunk_count(self, chunk_elements: int) -> int:
        """Number of regular chunks."""
        return -(-self.elements // chunk_elements)

    def chunk(self, index: int, chunk_elements: int) -> tuple[int, int]:
        """(offset, count) of regular chunk `index`; only the last one may be shorter.

        Raises RemoteProtocolError BAD_CHUNK: a number that is out of range comes from a peer.
        """
        offset = index * chunk_elements
        if not 0 <= offset < self.elements:
            raise fault(
                f"chunk of fragment {self.index}",
                expected=f"0 to {self.chunk_count(chunk_elements) - 1}",
                got=index,
                code=ErrorCode.BAD_CHUNK,
            )
        return offset, min(chunk_elements, self.elements - offset)


def build_table(layout: Sequence[LayoutEntry], fragment_count: int) -> tuple[Fragment, ...]:
    """The fragments of a checked layout; every element is in exactly one of them.

    Raises ConfigError if the tensors have not rows enough for that many fragments.
    """
    assert 1 <= fragment_count <= FRAGMENTS_MAX, fragment_count
    elements = sum(element_count(entry) for entry in layout)
    possible = fragment_count
    # The number of slices never falls when the count rises. So no count between the number of
    # slices and the count that gave it is possible, and stepping down to it misses nothing.
    while (total := sum(_slice_count(each, elements, possible) for each in layout)) < possible:
        possible = total
    if possible < fragment_count:
        raise ConfigError(
            f"fragments.count: this model cannot be cut into {fragment_count} fragments",
            expected=f"at most {possible}",
            got=str(fragment_count),
            remedy=f"set fragments.count = {possible}: only whole rows of a tensor are cut off",
        )
    # Largest slice first (equal ones in layout order) to the smallest fragment (the first).
    shares: list[list[_Slice]] = [[] for _ in range(fragment_count)]
    heap = [(0, index) for index in range(fragment_count)]
    slices = _slices(layout, elements, fragment_count)
    for tensor, start, count in sorted(slices, key=lambda each: (-each[2], each)):
        filled, index = heap[0]
        shares[index].append((tensor, start, count))
        heapreplace(heap, (filled + count, index))
    table: list[Fragment] = []
    for index, share in enumerate(shares):
        assert share, f"fragment {index} is empty"
        pieces: list[Piece] = []
        offset = 0
        # Layout order within a fragment, so that a copy walks through memory forwards.
        for tensor, start, count in sorted(share):
            pieces.append(Piece(tensor, start, count, offset, layout[tensor].rule))
            offset += count
        table.append(Fragment(index, tuple(pieces), offset))
    # Conservation: no element is lost, none is in two fragments.
    assert sum(fragment.elements for fragment in table) == elements, "elements are lost"
    return tuple(table)


def _slice_count(entry: LayoutEntry, elements: int, fragment_count: int) -> int:
    """Slices of a tensor in a model of `elements`: each at most a fragment, or else one row."""
    rows = math.prod(entry.shape[:1])  # 1 for a scalar.
    return min(rows, -(-element_count(entry) * fragment_count // elements))


def _slices(layout: Sequence[LayoutEntry], elements: int, fragment_count: int) -> list[_Slice]:
    """All slices in layout order."""
    slices: list[_Slice] = []
    for tensor, entry in enumerate(layout):
        rows = math.prod(entry.shape[:1])
        row_elements = math.prod(entry.shape[1:])
        cuts = _slice_count(entry, elements, fragment_count)
        # Rows are shared out evenly, so the slices of a tensor differ by at most one row.
        starts = [rows * cut // cuts * row_elements for cut in range(cuts + 1)]
        slices += [(tensor, start, end - start) for start, end in pairwise(starts)]
    return slices
