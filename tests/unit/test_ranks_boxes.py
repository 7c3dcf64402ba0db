"""The elements of a spread model that each rank holds: every sharding of torch as plain data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.learner.ranks.boxes import Block, Box, Cut, Holdings, box_of
from narrows.learner.ranks.meeting import backend_of
from narrows.proto.codec import F32
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import LayoutEntry

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks in two dimensions, dp and tp; either may be 1."""

    dp: int
    tp: int = 1
    replicas: int = 1
    """So many ranks of `dp` hold the same."""
    fully_shards: bool = False

    def cuts(self, rank: int, shape: Shape, tp_dim: int | None) -> list[Cut]:
        """How torch spreads a tensor of this shape; `tp_dim`: the dimension that TP shares out, or
        None for one that TP leaves alone."""
        place, tp_place = divmod(rank, self.tp)
        shards = self.dp // self.replicas
        replica, shard = divmod(place, shards)
        cuts: list[Cut] = []
        if self.replicas > 1:
            cuts.append(Cut(self.replicas, replica, None))
        if self.fully_shards and shape:
            cuts.append(Cut(shards, shard, 0, comes_last=tp_dim == 0))
        # What TP leaves alone lies on the mesh of dp only, which knows nothing of its twins.
        if tp_dim is not None:
            cuts.append(Cut(self.tp, tp_place, tp_dim))
        return cuts


MESHES = {
    "ddp": [Mesh(2), Mesh(4), Mesh(8)],
    "fsdp": [Mesh(each, fully_shards=True) for each in (2, 4, 8)],
    "hsdp": [Mesh(4, 1, 2, True), Mesh(8, 1, 2, True), Mesh(8, 1, 4, True)],
    "tp": [Mesh(1, 2), Mesh(1, 4), Mesh(2, 4)],
    "fsdp and tp": [Mesh(2, 2, 1, True), Mesh(4, 2, 1, True), Mesh(2, 4, 1, True)],
    "hsdp and tp": [Mesh(4, 2, 2, True)],
}

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


class Spread:
    """A model of these shapes, each of whose elements is its own number, on the ranks of a mesh."""

    def __init__(self, mesh: Mesh, shapes: Sequence[Shape], tp_dims: Sequence[int | None]) -> None:
        ranks = range(mesh.dp * mesh.tp)
        self.boxes: list[list[Box]] = [
            [
                box_of(shape, mesh.cuts(rank, shape, dim))
                for shape, dim in zip(shapes, tp_dims, strict=True)
            ]
            for rank in ranks
        ]
        names = [f"w{tensor}" for tensor in range(len(shapes))]
        self.holdings = Holdings(names, shapes, self.boxes)
        self.shapes = [shape or (1,) for shape in shapes]
        first = 0
        self.whole: list[F32] = []
        for shape in self.shapes:
            count = math.prod(shape)
            self.whole.append(np.arange(first, first + count, dtype=np.float32).reshape(shape))
            first += count
        self.held = [
            [
                whole[tuple(slice(start, start + n) for start, n in box)].copy()
                for whole, box in zip(self.whole, own, strict=True)
            ]
            for own in self.boxes
        ]
        """By rank, its part of each tensor."""
        entries = [
            LayoutEntry(name, shape, "float32", "rda")
            for name, shape in zip(names, self.shapes, strict=True)
        ]
        rows = sum(shape[0] for shape in self.shapes)
        self.fragments = build_table(entries, min(2, rows, len(entries)))

    def place(self, block: Block, values: F32) -> F32:
        """Where a block lies in a fragment's values."""
        piece = block.piece
        rows = values[piece.offset : piece.offset + piece.count]
        return rows.reshape(-1, *self.shapes[piece.tensor][1:])[block.place]

    def expected(self, fragment: Fragment) -> F32:
        """A fragment of the whole model."""
        parts = [
            self.whole[piece.tensor].reshape(-1)[piece.start : piece.start + piece.count]
            for piece in fragment.pieces
        ]
        return np.concatenate(parts)

    def gathered(self, fragment: Fragment) -> F32:
        """The fragment as its providers give it, each element once."""
        values = np.full(fragment.elements, -1.0, np.float32)
        for rank, held in enumerate(self.held):
            for block in self.holdings.blocks(fragment, rank, provided=True):
                into = self.place(block, values)
                assert (into == -1.0).all(), "an element comes twice"
                part = held[block.piece.tensor][block.rows]
                assert part.shape == block.shape and part.size == block.elements
                into[...] = part
        return values


@st.composite
def spread_models(draw: st.DrawFn, meshes: list[Mesh]) -> Spread:
    mesh = draw(st.sampled_from(meshes))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    dims: list[int | None] = []
    for shape in shapes:
        choices: list[int | None] = [None]
        if mesh.tp > 1:
            choices += range(len(shape))
        dims.append(draw(st.sampled_from(choices)))
    return Spread(mesh, shapes, dims)


@pytest.mark.parametrize("kind", MESHES)
@given(data=st.data())
def test_a_fragment_is_gathered_whole_and_scattered_to_where_it_came_from(
    kind: str, data: st.DataObject
) -> None:
    """Holds `Holdings`, `box_of`, `block_of`."""
    spread = data.draw(spread_models(MESHES[kind]))
    for fragment in spread.fragments:
        values = spread.gathered(fragment)
        np.testing.assert_array_equal(values, spread.expected(fragment))
        for rank, held in enumerate(spread.held):
            for block in spread.holdings.blocks(fragment, rank):
                part = held[block.piece.tensor][block.rows]
                np.testing.assert_array_equal(spread.place(block, values), part)
                part[...] = -2.0
    for held in spread.held:  # Every element of every rank was scattered to.
        assert all((part == -2.0).all() for part in held)


@pytest.mark.parametrize(
    ("rows", "first_rows"), [(8, [0, 4, 2, 6]), (5, [0, 3, 2, 4]), (2, [0, 1, None, None])]
)
def test_fsdp_shares_out_what_tp_has_left(rows: int, first_rows: list[int | None]) -> None:
    """As the docstring of torch's _StridedShard has it for 8 rows. Holds `box_of`."""
    mesh = Mesh(2, 2, 1, True)
    boxes = [box_of((rows, 8), mesh.cuts(rank, (rows, 8), 0)) for rank in range(4)]
    assert [start if count else None for (start, count), _ in boxes] == first_rows


def test_the_leader_provides_what_it_holds_and_its_twins_share_the_rest() -> None:
    """Holds `Holdings`."""
    ddp = Spread(Mesh(4), [(4, 3), (5,)], [None, None])
    (fragment, *_) = ddp.fragments
    assert ddp.holdings.is_replicated(fragment)
    assert not any(ddp.holdings.blocks(fragment, rank, provided=True) for rank in (1, 2, 3))
    hsdp = Spread(Mesh(4, 1, 2, True), [(4, 3), (4, 3)], [None, None])
    providers = [
        {
            rank
            for rank in range(4)
            for block in hsdp.holdings.blocks(fragment, rank, provided=True)
            if block.piece.tensor == tensor
        }
        for fragment in hsdp.fragments
        for tensor in (0, 1)
    ]
    assert not hsdp.holdings.is_replicated(hsdp.fragments[0])
    assert {0, 1} in providers and {0, 3} in providers


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2), (0, 3)), ((1, 3), (0, 3))],
        [((0, 2), (0, 3)), ((3, 1), (0, 3))],
        # As many elements as the tensor has, and still none of a partition.
        [((0, 2), (0, 3)), ((1, 2), (0, 3))],
    ],
    ids=["overlap", "gap", "both"],
)
def test_ranks_that_do_not_hold_a_tensor_between_them_are_refused(boxes: list[Box]) -> None:
    """Holds `Holdings`."""
    with pytest.raises(LocalProtocolError, match=r"'w'.*\(4, 3\).*rank 0.*rank 1.*fully_shard"):
        Holdings(["w"], [(4, 3)], [[box] for box in boxes])


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [([7, 8, 9], "nccl"), ([7, 8, 7], "gloo"), ([7, 0], "gloo"), ([0, 0], "gloo")],
    ids=["a card each", "two on one card", "one in host memory", "all in host memory"],
)
def test_only_ranks_that_have_a_card_each_use_nccl(gpus: list[int], backend: str) -> None:
    """Holds `backend_of`."""
    assert backend_of(gpus) == backend
