"""Which elements of each parameter the ranks of an island hold, as plain data.

Whatever torch makes of a tensor (replicas, FSDP2, HSDP, TP by rows or columns, FSDP2 with TP), a
rank holds a box of it: in each dimension a run of indices. Ranks with the same box are replicas,
and the distinct boxes must be a partition of the tensor. A DTensor alone cannot tell that: under
FSDP2 with TP the norms are replicas on meshes that do not see each other. So the ranks gather all
boxes once, and one rank of each box provides it to a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple, TypeAlias

from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment, Piece

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(first index, indices) by dimension; a scalar has one dimension of one index."""


class Cut(NamedTuple):
    """How one dimension of a device mesh spreads a tensor."""

    ranks: int
    """Along this dimension of the mesh."""
    place: int
    """This rank's among them."""
    dim: int | None
    """The dimension of the tensor that they share out; None: each of them holds all."""
    comes_last: bool = False
    """The share-out follows those of the mesh's later dimensions, as that of FSDP2 follows TP."""


def box_of(shape: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """The box of a tensor of this shape that a rank holds; `cuts` are those of its mesh, in order.

    Each cut shares out what the cuts before it have left, as torch.chunk does: the first ranks get
    equal runs, the next one the rest, and the last ones may get nothing.
    """
    box = [(0, size) for size in shape or (1,)]
    sharing = [cut for cut in cuts if cut.dim is not None]
    first = [cut for cut in sharing if not cut.comes_last]
    last = [cut for cut in sharing if cut.comes_last]
    for cut in [*first, *reversed(last)]:
        assert cut.dim is not None
        start, count = box[cut.dim]
        share = -(-count // cut.ranks)
        begin = min(count, cut.place * share)
        end = min(count, begin + share)
        box[cut.dim] = (start + begin, end - begin)
    return tuple(box)


def elements_of(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(count for _, count in box)


@dataclass(frozen=True)
class Block:
    """The part of a piece that a rank holds: a box, too."""

    piece: Piece
    rows: slice
    """Rows of the rank's part of the tensor; in the other dimensions the block has all of it."""
    place: tuple[slice, ...]
    """Where the block lies in the piece, by dimension; the first one counts rows of the piece."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Their number."""
        return math.prod(self.shape)


def block_of(piece: Piece, shape: Sequence[int], box: Box) -> Block | None:
    """The block of a piece of a tensor of this shape; None if the rank holds nothing of it."""
    row_elements = math.prod(shape[1:])
    top = piece.start // row_elements
    bottom = (piece.start + piece.count) // row_elements
    start, count = box[0]
    first = max(top, start)
    end = min(bottom, start + count)
    if first >= end or not elements_of(box):
        return None
    rest = box[1:]
    return Block(
        piece,
        slice(first - start, end - start),
        (slice(first - top, end - top), *(slice(low, low + n) for low, n in rest)),
        (end - first, *(n for _, n in rest)),
    )


class Holdings:
    """Tells which rank of an island holds what of each tensor, and which provides it to a snapshot.

    `shapes` are those of the whole tensors, `boxes` by rank and tensor. Raises LocalProtocolError
    MISUSE unless the distinct boxes of each tensor are a partition of it; `names` tell which.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[Sequence[Box]],
    ) -> None:
        self.shapes = [shape or (1,) for shape in shapes]
        self._boxes = boxes
        self._providers: list[set[int]] = []
        self._blocks: dict[tuple[int, int, bool], list[Block]] = {}
        for tensor, (name, shape) in enumerate(zip(names, self.shapes, strict=True)):
            holders: dict[Box, list[int]] = {}
            for rank, held in enumerate(boxes):
                if elements_of(held[tensor]):
                    holders.setdefault(held[tensor], []).append(rank)
            if not _is_partition(frozenset(holders), shape):
                told = ", ".join(f"rank {ranks[0]} {box}" for box, ranks in holders.items())
                raise LocalProtocolError(
                    ErrorCode.MISUSE,
                    f"the ranks do not hold {name!r}, of shape {shape}, once or as replicas",
                    got=f"(first index, indices) by dimension: {told}"[:500],
                    remedy="Shard the model with fully_shard, tensor parallelism, or both.",
                )
            # The leader's own part need not travel; other replicas share the work.
            self._providers.append(
                {0 if 0 in ranks else ranks[tensor % len(ranks)] for ranks in holders.values()}
            )

    def blocks(self, fragment: Fragment, rank: int, *, provided: bool = False) -> list[Block]:
        """The blocks of a fragment that a rank holds; `provided`: that it gives to a snapshot."""
        key = (fragment.index, rank, provided)
        if key not in self._blocks:
            found = [
                block_of(piece, self.shapes[piece.tensor], self._boxes[rank][piece.tensor])
                for piece in fragment.pieces
                if not provided or rank in self._providers[piece.tensor]
            ]
            self._blocks[key] = [block for block in found if block is not None]
        return self._blocks[key]

    def is_replicated(self, fragment: Fragment) -> bool:
        """Whether every rank holds all of a fragment."""
        counts = [
            sum(block.elements for block in self.blocks(fragment, rank))
            for rank in range(len(self._boxes))
        ]
        return min(counts) == fragment.elements


@cache
def _is_partition(boxes: frozenset[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes hold every element of a tensor of this shape once. Many tensors have the same
    shape and are cut in the same way, so answers are remembered."""
    if sum(map(elements_of, boxes)) != math.prod(shape):
        return False
    return not any(
        all(
            max(start, begin) < min(start + count, begin + n)
            for (start, count), (begin, n) in zip(one, other, strict=True)
        )
        for one, other in combinations(boxes, 2)
    )
