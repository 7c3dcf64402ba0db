"""What each rank of an island does in the tests of its parameters; a rank whose check fails ends
with code 1."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_cases import Small, loss_of, small
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from narrows.learner.parameters import Parameters, check_same_model, local_part
from narrows.learner.weights import WeightWatch
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import fingerprint

RANKS = 2


def meet(work: Callable[[Path], None], folder: Path, rank: int) -> None:
    """One rank: meets the others at a file in the folder, and works."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS
    )
    work(folder)
    dist.barrier()
    dist.destroy_process_group()


def whole_model() -> Small:
    """Tied weights, a vector of one element (fewer than ranks), and a frozen vector."""
    model = small()
    model.gain = nn.Parameter(torch.tensor([2.0]))  # FSDP2 shards no scalars.
    model.norm.bias.requires_grad_(False)
    return model


def fsdp() -> Small:
    model = whole_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def ddp() -> nn.Module:
    return DistributedDataParallel(whole_model())


def columns() -> Small:
    model = whole_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, {"hidden": ColwiseParallel()})
    return model


def rows() -> Small:
    model = whole_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, {"hidden": RowwiseParallel()})
    return model


SHARDINGS: tuple[Callable[[], nn.Module], ...] = (ddp, fsdp, columns, rows)


def layouts(folder: Path) -> None:
    """However the model is spread, its layout and its saved file are those of a single process."""
    one = Parameters(whole_model())
    one.save(folder / f"one-{dist.get_rank()}.safetensors", {"format": "pt"})
    for make in SHARDINGS:
        parameters = Parameters(make())
        assert parameters.layout == one.layout, make
        assert parameters.names == one.names, make
        assert parameters.layout.frozen_digest
        parameters.save(
            folder / f"{make.__name__}.safetensors",
            {"format": "pt"},
            writes=dist.get_rank() == 0,
        )


def saves_on_one_rank_alone(folder: Path) -> None:
    """A model that is replicated needs nobody else to be saved."""
    parameters = Parameters(ddp())
    if dist.get_rank() == 0:
        parameters.save(folder / "model.safetensors", {})


def no_place_for_the_file(folder: Path) -> None:
    """Rank 0 cannot write its file; the other one must not wait for it."""
    rank = dist.get_rank()
    file_for_a_folder = folder / f"{rank}.txt"
    file_for_a_folder.touch()
    try:
        Parameters(fsdp()).save(file_for_a_folder / "model", {}, writes=rank == 0)
    except OSError:
        assert rank == 0
    else:
        assert rank == 1


def evaluated(folder: Path) -> None:
    """An evaluation has gathered the root: the shards are looked at and written all the same."""
    model = fsdp()
    with torch.no_grad():
        loss_of(model)
    assert not isinstance(model.table.weight, DTensor), "the trap is set"
    parameters = Parameters(model)
    assert parameters.layout == Parameters(whole_model()).layout
    with torch.no_grad():
        loss_of(model)
        for tensor in parameters.tensors:
            local_part(tensor).fill_(0.5)
        parameters.reshard()
        adopted = whole_model()
        for each in adopted.parameters():
            if each.requires_grad:
                each.fill_(0.5)
        assert torch.equal(loss_of(model), loss_of(adopted))


def stranger(folder: Path) -> None:
    """Somebody else writes to the parameters between two steps: every rank says so."""
    model = fsdp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = WeightWatch(Parameters(model), [optimizer])
    watch.start()

    def step() -> None:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        watch.before_step()
        optimizer.step()
        optimizer.zero_grad()
        watch.stepped()
        watch.boundary_over()

    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("narrows.learner").addHandler(handler)
    step()
    with torch.no_grad():
        loss_of(model)
    step()
    assert not warned
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each * 1.5)
    step()
    (line,) = warned
    assert "swap them back" in line


def stages(folder: Path) -> None:
    """Each rank has another part of the layers, as with pipeline parallelism."""
    mine = whole_model().get_submodule("table" if dist.get_rank() == 0 else "hidden")
    told = [""] * RANKS
    dist.all_gather_object(told, fingerprint(Parameters(mine).layout))
    try:
        check_same_model(told)
    except LocalProtocolError as error:
        assert "ranks 1 have other parameters than rank 0" in str(error)
        assert "fully_shard" in error.remedy
    else:
        raise AssertionError("ranks with other layers are taken for one model")


def loaded(folder: Path, name: str) -> dict[str, Any]:
    """A saved model, loaded strictly."""
    state = load_file(folder / f"{name}.safetensors")
    whole_model().load_state_dict(state, strict=True)
    return state
