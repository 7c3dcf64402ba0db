"""The ranks of an island as a group of processes: where they meet, and what moves between them.

The group is ours alone, so that nothing mixes with training's own collectives, and it waits for
days: a run may begin as late as it likes. A rank that dies closes its connections, which the others
notice at once; one that hangs is noticed by training's own collectives.

Vectors that ranks agree on go over gloo. So do fragments of parameters in host memory; those on
GPUs go over NCCL, if each rank has one of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from narrows.learner.handover import AdamMoments, Part
from narrows.learner.parameters import (
    Parameters,
    check_same_model,
    is_sharded,
    local_part,
    misuse,
)
from narrows.learner.ranks.boxes import Block, Box, Cut, Holdings, box_of
from narrows.proto.codec import F32, empty_f32
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment, build_table, fingerprint

TIMEOUT: Final = timedelta(days=30)
LOOK: Final = timedelta(seconds=0.2)
"""A rank that waits for others looks for signals so often."""
LEADER: Final = 0

NOTHING: Final = np.empty(0, np.float32)

Sum: TypeAlias = Callable[[timedelta], NDArray[np.float64]]
"""Waits until all ranks have begun a sum, at most so long, and returns it. Raises
LocalProtocolError RANK_LOST for a rank that is gone or does not come in time."""

MODEL_PARALLEL: Final = frozenset({"tp", "cp", "sp", "tensor", "context", "sequence"})
"""Words in the names of mesh dimensions whose ranks learn from the same tokens."""


def is_one_of_several() -> bool:
    """Whether this process is a rank of several. Raises LocalProtocolError MISUSE if it is to be
    one, and they have not met yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        raise misuse(
            "this process is one of several, and they have not met yet",
            expected="torch.distributed.init_process_group() before the Learner is made",
            got=f"WORLD_SIZE={ranks}",
            remedy="Initialise it first. For a learner of one process unset WORLD_SIZE.",
        )
    return False


def gpu_number(tensors: Sequence[Tensor]) -> int:
    """A number that the GPU of these tensors alone has; 0: they are not all on GPUs."""
    if not all(tensor.is_cuda for tensor in tensors):
        return 0
    uuid = torch.cuda.get_device_properties(tensors[0].device).uuid
    return xxhash.xxh3_64_intdigest(str(uuid).encode()) >> 1  # It must fit into int64.


def backend_of(gpus: Sequence[int]) -> str:
    """The backend that moves fragments between ranks with these GPUs (`gpu_number`). NCCL refuses
    two ranks on one card."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def counts_tokens(parameters: Parameters, data_parallel: Any) -> bool:
    """Whether this rank's tokens count: one rank of each batch's does. `data_parallel` is the part
    of the device mesh along which ranks learn from other batches; None: all ranks do. Raises
    LocalProtocolError MISUSE if that cannot be."""
    if data_parallel is None:
        _refuse_model_parallel(parameters)
        return True
    mesh = getattr(data_parallel, "mesh", None)
    if not isinstance(mesh, Tensor):
        raise misuse(
            "data_parallel is of the wrong kind",
            expected='a part of the device mesh, such as mesh["dp"]',
            got=type(data_parallel).__name__,
        )
    # The leader's own row of the mesh has every batch once.
    return LEADER in mesh.flatten().tolist()


def _refuse_model_parallel(parameters: Parameters) -> None:
    from torch.distributed.fsdp import FSDPModule

    has_fsdp = any(isinstance(each, FSDPModule) for each in parameters.module.modules())
    for tensor, (name, *_) in zip(parameters.tensors, parameters.names, strict=True):
        if not is_sharded(tensor):
            continue
        held: Any = tensor
        told = _model_parallel(held.device_mesh)
        # A DTensor in a model without FSDP2 is tensor parallel, whatever its mesh is called.
        if told or not has_fsdp:
            raise misuse(
                f"parameter {name!r} is spread over ranks that learn from the same tokens: they"
                " would count several times",
                expected="data_parallel",
                got=f"a mesh with {', '.join(told)}" if told else "a DTensor without FSDP2",
                remedy='Learner(..., data_parallel=mesh["dp"]), with the dimension of the mesh'
                " along which batches differ.",
            )


def _model_parallel(mesh: Any) -> list[str]:
    """The dimensions of a mesh, or of the one that it is a part of, whose names say that their
    ranks share their tokens."""
    found: list[str] = []
    for each in (mesh, mesh._get_root_mesh()):
        for name, ranks in zip(each.mesh_dim_names or (), each.shape, strict=False):
            if ranks > 1 and MODEL_PARALLEL.intersection(name.lower().split("_")):
                found.append(name)
    return sorted(set(found))


def box_here(tensor: Tensor) -> Box:
    """The box of a parameter that this rank holds."""
    if not is_sharded(tensor):
        return box_of(tensor.shape, ())
    held: Any = tensor
    mesh = held.device_mesh
    cuts = [
        Cut(ranks, place, getattr(placement, "dim", None), hasattr(placement, "split_factor"))
        for ranks, place, placement in zip(
            mesh.shape, mesh.get_coordinate(), held.placements, strict=True
        )
    ]
    return box_of(tensor.shape, cuts)


class Ranks:
    """The ranks of an island, and the parameters that they hold.

    Every method is for all ranks, in the same order, unless it says otherwise. Raises
    LocalProtocolError MISUSE for ranks with other parameters, and for parameters that they do not
    hold between them.
    """

    def __init__(
        self, parameters: Parameters, *, counts: bool, moments: AdamMoments | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.counts = counts
        """This rank's tokens count."""
        self.parameters = parameters
        self.moments = moments
        self.apart = False
        """An exception has come out of the middle of an exchange: nobody knows how far it came."""
        self._words = dist.new_group(backend="gloo", timeout=TIMEOUT)
        """Carries vectors of one size, and nothing else once the constructor is left."""
        self._works: dict[int, Any] = {}
        """The sums under way over `_words`, by number; None: it may have begun. Nobody else may
        refer to one: it would keep the connections of its group open."""
        self._number = 0
        self._left = False
        self._table: tuple[Fragment, ...] = ()
        layout = parameters.layout
        own = int(fingerprint(layout)[:15], 16)  # It must fit into int64.
        told = self._told_by_all([own, gpu_number(parameters.tensors)])
        check_same_model([f"{each[0]:x}" for each in told])
        backend = backend_of([each[1] for each in told])
        self._device = torch.device("cpu")
        """Where fragments travel from and to."""
        if backend == "nccl":
            self._device = parameters.tensors[0].device
        self._carrier = dist.new_group(backend=backend, timeout=TIMEOUT)
        boxes = [box_here(tensor) for tensor in parameters.tensors]
        flat = [number for box in boxes for run in box for number in run]
        self.holdings = Holdings(
            [entry.name for entry in layout.entries],
            [entry.shape for entry in layout.entries],
            [_boxes(numbers, [len(box) for box in boxes]) for numbers in self._told_by_all(flat)],
        )

    def fragment(self, index: int, fragments: int) -> Fragment:
        """A fragment of a run that has so many. For one rank alone."""
        if len(self._table) != fragments:
            self._table = build_table(self.parameters.layout.entries, fragments)
        return self._table[index]

    # Words.

    def start_sum(self, values: NDArray[np.float64]) -> Sum:
        """Begins to sum a vector over all ranks. Raises LocalProtocolError MISUSE once fragments
        were left on their way, RANK_LOST for a rank that is gone."""
        if self.apart:
            raise misuse(
                f"rank {self.rank} has broken off an exchange with the other ranks",
                remedy="Start all ranks again: nobody knows how far that came.",
            )
        with self._named():
            number = self._begin(
                lambda: dist.all_reduce(torch.from_numpy(values), group=self._words, async_op=True)
            )

        def summed(timeout: timedelta) -> NDArray[np.float64]:
            with self._named():
                self._wait(number, timeout)
            return values

        return summed

    def carry_error(self, fields: Mapping[str, str], size: int) -> dict[str, str]:
        """An error of the leader, whose fields are so many bytes."""
        told = torch.zeros(size, dtype=torch.uint8)
        if self.rank == LEADER:
            told = torch.frombuffer(bytearray(encoded(fields)), dtype=torch.uint8)
        with self._named():
            carried = told.to(self._device)
            dist.broadcast(carried, LEADER, group=self._carrier)
        return msgspec.json.decode(carried.cpu().numpy().tobytes(), type=dict[str, str])

    def _told_by_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """By rank, as many integers as here."""
        own = torch.tensor(numbers, dtype=torch.int64)
        told = [torch.zeros_like(own) for _ in range(self.size)]
        with self._named():
            number = self._begin(
                lambda: dist.all_gather(told, own, group=self._words, async_op=True)
            )
            self._wait(number)
        return [each.tolist() for each in told]

    def _begin(self, work: Callable[[], Any]) -> int:
        """The number of a work over `_words`, which begins here."""
        self._number += 1
        # A signal may come when it is under way, and nobody has it in hand yet.
        self._works[self._number] = None
        self._works[self._number] = work()
        return self._number

    def _wait(self, number: int, timeout: timedelta = TIMEOUT) -> None:
        """Waits for the other ranks, and lets signals in meanwhile. Raises RuntimeError."""
        waited = timedelta()
        while number in self._works:
            if self._works[number].is_completed() or waited >= timeout:
                self._works[number].wait(LOOK)
                del self._works[number]
                return
            # It is not complete, or the line above raises what it met.
            with suppress(RuntimeError):
                self._works[number].wait(LOOK)
            waited += LOOK

    @contextmanager
    def _named(self) -> Generator[None]:
        """Names the ranks in what torch raises when one has gone."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise  # All ranks are here.
            others = ", ".join(str(rank) for rank in range(self.size) if rank != self.rank)
            raise LocalProtocolError(
                ErrorCode.RANK_LOST,
                f"rank {self.rank} has lost another rank, of {others[:60]}",
                got=str(error).partition("\n")[0][:200],
                remedy="The log of the rank that ended first says why.",
            ) from error

    @contextmanager
    def exchanging(self) -> Generator[None]:
        """While fragments travel: an exception leaves the ranks apart, and torch's name them."""
        with self.in_one_piece(), self._named():
            yield

    @contextmanager
    def in_one_piece(self) -> Generator[None]:
        """While a fragment moves, here or between ranks: an exception leaves the ranks apart."""
        try:
            yield
        except BaseException:
            self.apart = True
            raise

    # Fragments.

    def provides(self, fragment: Fragment) -> bool:
        """Whether any rank but the leader holds something of a fragment that the leader does not.
        For one rank alone."""
        others = range(1, self.size)
        return any(self.holdings.blocks(fragment, rank, provided=True) for rank in others)

    def gather(self, fragment: Fragment) -> F32:
        """The parameters (n,) at the leader, in host memory; nothing elsewhere."""
        with self.exchanging():
            return self._gather(fragment)

    def scatter(self, fragment: Fragment, values: F32, keep: float) -> None:
        """Everywhere params = values + keep * params; `values` (n,) are the leader's."""
        with self.exchanging():
            self._scatter(fragment, values, partial(self._move, keep=keep))
        self.parameters.reshard()

    def hand_over(self, fragment: Fragment, movement: F32, share: float) -> None:
        """Everywhere the optimizer's moments take a share of `movement` (n,), the leader's."""
        parts: list[Part] = []

        def add(block: Block, moved: Tensor) -> None:
            parts.append(Part(block.piece.tensor, partial(_rows, block), moved))

        with self.exchanging():
            self._scatter(fragment, movement, add)
        if self.moments is not None:
            # An error of the rule is no lost rank.
            with self.in_one_piece():
                self.moments.mend(parts, share)

    def _gather(self, fragment: Fragment) -> F32:
        mine = self.holdings.blocks(fragment, self.rank, provided=True)
        if self.rank != LEADER:
            if mine:
                flat = torch.cat([self._view(block).reshape(-1).float() for block in mine])
                dist.send(flat.to(self._device), LEADER, group=self._carrier)
            return NOTHING
        coming: list[tuple[list[Block], Tensor, Any]] = []
        for rank in range(1, self.size):
            blocks = self.holdings.blocks(fragment, rank, provided=True)
            if blocks:
                flat = self._buffer(blocks)
                coming.append((blocks, flat, dist.irecv(flat, rank, group=self._carrier)))
        values = empty_f32(fragment.elements)
        for block in mine:
            torch.from_numpy(self._place(block, values)).copy_(self._view(block))
        for blocks, flat, work in coming:
            work.wait()
            for block, part in zip(blocks, _parts(blocks, flat), strict=True):
                torch.from_numpy(self._place(block, values)).copy_(part)
        return values

    def _scatter(
        self, fragment: Fragment, values: F32, take: Callable[[Block, Tensor], None]
    ) -> None:
        """`take` gets each block that this rank holds, and its values in its shape."""
        mine = self.holdings.blocks(fragment, self.rank)
        going: list[Any] = []
        if self.holdings.is_replicated(fragment):
            if self.rank == LEADER:
                flat = torch.from_numpy(values.copy()).to(self._device)
            else:
                flat = self._buffer(mine)
            dist.broadcast(flat, LEADER, group=self._carrier)
        elif self.rank != LEADER:
            flat = self._buffer(mine)
            if mine:
                dist.recv(flat, LEADER, group=self._carrier)
        else:
            for rank in range(1, self.size):
                blocks = self.holdings.blocks(fragment, rank)
                if blocks:
                    packed = self._packed(blocks, values)
                    going.append((packed, dist.isend(packed, rank, group=self._carrier)))
            flat = self._packed(mine, values)
        for block, part in zip(mine, _parts(mine, flat), strict=True):
            take(block, part)
        for _, work in going:
            work.wait()

    def _move(self, block: Block, values: Tensor, *, keep: float) -> None:
        view = self._view(block)
        values_here = values.to(view.device)
        # Parameters that are not finite, times 0, would spoil what they become.
        if keep:
            kept = view.to(torch.float32, copy=True)
            # Rounded twice, as by a single process.
            values_here = kept.mul_(keep).add_(values_here)
        view.copy_(values_here)

    def _view(self, block: Block) -> Tensor:
        """The parameters of a block here, in its shape, sharing their memory."""
        return _rows(block, local_part(self.parameters.tensors[block.piece.tensor]))

    def _place(self, block: Block, values: F32) -> F32:
        """A block's part of a fragment's `values` (n,), in its shape, sharing their memory."""
        piece = block.piece
        rest = self.holdings.shapes[piece.tensor][1:]
        rows = values[piece.offset : piece.offset + piece.count].reshape(-1, *rest)
        return rows[block.place]

    def _buffer(self, blocks: Sequence[Block]) -> Tensor:
        return torch.empty(sum(block.elements for block in blocks), device=self._device)

    def _packed(self, blocks: Sequence[Block], values: F32) -> Tensor:
        """A rank's blocks of a fragment's `values`, one after the other."""
        packed = empty_f32(sum(block.elements for block in blocks))
        offset = 0
        for block in blocks:
            part = packed[offset : offset + block.elements].reshape(block.shape)
            np.copyto(part, self._place(block, values))
            offset += block.elements
        return torch.from_numpy(packed).to(self._device)

    def leave(self, *, together: bool = False) -> None:
        """Ends the groups; ranks that wait for this one hear of it, because its connections close.
        For one rank alone, unless all leave `together`. A second call is harmless.

        A group is kept until the process ends, and its connections with it, where its destructor
        would wait for other ranks: they may never come, because they train on, or wait for this
        process to end. That of gloo waits while work is on its way, that of NCCL always.
        """
        if self._left:
            return
        self._left = True
        is_quiet = all(each is not None and each.is_completed() for each in self._works.values())
        # gloo's destructor does not wait for a transfer that was broken off.
        ends_alone = self._device.type == "cpu"
        groups = ((self._words, is_quiet), (self._carrier, together or ends_alone))
        del self._words, self._carrier
        for group, is_idle in groups:
            if is_idle:
                with suppress(ValueError):  # The program has ended all groups before.
                    dist.destroy_process_group(group)
            else:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if is_quiet:
            self._works.clear()


def encoded(fields: Mapping[str, str]) -> bytes:
    """An error's fields as they travel."""
    return msgspec.json.encode(fields)


def _rows(block: Block, part: Tensor) -> Tensor:
    """A block of what this rank holds of a tensor, in its shape, sharing its memory."""
    return part.reshape(1) if not part.dim() else part[block.rows]


def _parts(blocks: Sequence[Block], flat: Tensor) -> list[Tensor]:
    """Blocks that lie one after the other, each in its shape."""
    parts = torch.split(flat, [block.elements for block in blocks])
    return [part.view(block.shape) for block, part in zip(blocks, parts, strict=True)]


def _boxes(numbers: Sequence[int], dims: Sequence[int]) -> list[Box]:
    """The boxes of tensors with so many dimensions each."""
    runs = list(zip(numbers[::2], numbers[1::2], strict=True))
    boxes: list[Box] = []
    for count in dims:
        boxes.append(tuple(runs[:count]))
        del runs[:count]
    return boxes
