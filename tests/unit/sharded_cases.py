"""Models that torch has spread over the processes of a group, and what must hold in each of these.

A case runs in a group of one process (tests/unit) and of several (tests/ranks)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model_cases import Small, loss_of, small
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from narrows.learner.handover import AdamMoments
from narrows.learner.parameters import Parameters, local_part, whole
from narrows.learner.ranks.meeting import LEADER, NOTHING, Ranks
from narrows.learner.weights import WeightWatch
from narrows.proto.layout import build_table


def whole_model() -> Small:
    """Tied weights, a vector of one element (there may be more ranks), and a frozen vector."""
    model = small()
    model.gain = nn.Parameter(torch.tensor([2.0]))  # FSDP2 shards no scalars.
    model.norm.bias.requires_grad_(False)
    return model


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp() -> Small:
    model = whole_model()
    fully_shard(model.hidden, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model


def ddp() -> nn.Module:
    return DistributedDataParallel(whole_model())


def columns() -> nn.Module:
    return parallelize_module(whole_model(), mesh(), {"hidden": ColwiseParallel()})


def rows() -> nn.Module:
    return parallelize_module(whole_model(), mesh(), {"hidden": RowwiseParallel()})


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return loss_of(model)


def one_layout_and_one_file(folder: Path) -> None:
    """However a model is spread, layout and saved file are those of a single process."""
    rank = dist.get_rank()
    one = Parameters(whole_model())
    files = [folder / f"{rank}.safetensors"]
    one.save(files[0], {"format": "pt"})
    for make in (ddp, fsdp, columns, rows):
        parameters = Parameters(make())
        assert parameters.layout == one.layout and parameters.names == one.names, make
        files.append(folder / f"{make.__name__}.safetensors")
        parameters.save(files[-1], {"format": "pt"}, writes=rank == 0)
    if rank == 0:
        assert len({file.read_bytes() for file in files}) == 1
        whole_model().load_state_dict(load_file(files[-1]), strict=True)


def a_replica_is_saved_by_one_rank_alone(folder: Path) -> None:
    parameters = Parameters(ddp())
    if dist.get_rank() == 0:
        parameters.save(folder / "model.safetensors", {})


def no_place_for_the_file(folder: Path) -> None:
    """Rank 0 cannot write its file; the others must not wait for its parts."""
    writes = dist.get_rank() == 0
    (folder / "file").touch()
    try:
        Parameters(fsdp()).save(folder / "file" / "model", {}, writes=writes)
    except OSError:
        assert writes
    else:
        assert not writes


def what_an_evaluation_has_gathered_hides_nothing(folder: Path) -> None:
    """FSDP2 keeps the root's whole parameters after a forward pass without a backward one."""
    model = fsdp()
    evaluate(model)
    assert not isinstance(model.table.weight, DTensor), "the trap is set"
    parameters = Parameters(model)
    assert all(isinstance(tensor, DTensor) for tensor in parameters.tensors)
    assert parameters.layout == Parameters(whole_model()).layout
    evaluate(model)
    adopted = whole_model()
    with torch.no_grad():
        for tensor in parameters.tensors:
            local_part(tensor).mul_(0.5)
        for tensor in Parameters(adopted).tensors:
            tensor.mul_(0.5)
    parameters.reshard()
    assert torch.equal(evaluate(model), evaluate(adopted))
    watch = WeightWatch(parameters, [torch.optim.SGD(parameters.tensors)])
    evaluate(model)
    watch.adopting()
    with torch.no_grad():
        for tensor in [*map(local_part, parameters.tensors), *Parameters(adopted).tensors]:
            tensor.mul_(0.5)
    assert torch.equal(evaluate(model), evaluate(adopted))


def momentum_turns_wherever_it_lies(folder: Path) -> None:
    """Each rank mends what it holds of the moments; the movement is the leader's."""
    due: list[Tensor] = []
    for make in (whole_model, ddp, fsdp, columns, rows):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for each in model.parameters():
            if each.requires_grad:
                each.grad = each.detach() * 0.3 + 0.01
        optimizer.step()
        parameters = Parameters(model)
        moments = AdamMoments(parameters, [optimizer])
        (fragment,) = build_table(parameters.layout.entries, 1)
        movement = np.linspace(-1e-3, 2e-3, fragment.elements, dtype=np.float32)
        if make is whole_model:
            before = [optimizer.state[each]["exp_avg"].clone() for each in parameters.tensors]
            moments.hand_over(fragment, movement, 0.5)
        else:
            theirs = movement if dist.get_rank() == LEADER else NOTHING
            Ranks(parameters, counts=True, moments=moments).hand_over(fragment, theirs, 0.5)
        became = [whole(optimizer.state[each]["exp_avg"]) for each in parameters.tensors]
        if make is whole_model:
            due = became
        for mended, was_due, was in zip(became, due, before, strict=True):
            assert (was_due - was).abs().max() > 1e-4
            torch.testing.assert_close(mended, was_due, rtol=1e-4, atol=1e-6, msg=make.__name__)


def copied(model: Small) -> None:
    for each in model.parameters():
        each.copy_(each * 1.5)


def loaded(model: Small) -> None:
    model.load_state_dict({name: each.clone() * 1.5 for name, each in model.state_dict().items()})


def other_memory(model: Small) -> None:
    table: Any = model.table.weight
    table._local_tensor = table._local_tensor * 1.5


def a_stranger_is_noticed_and_an_optimizer_is_not(folder: Path) -> None:
    """Each rank warns of whoever writes to its shards between two steps."""
    ways: list[Any] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    for way, writes in zip(ways, (copied, loaded, other_memory), strict=True):
        warned: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, to=warned: to.append(record.getMessage())  # type: ignore
        logging.getLogger("narrows.learner").addHandler(handler)
        model = fsdp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **way)
        parameters = Parameters(model)
        watch = WeightWatch(parameters, [optimizer])
        evaluate(model)  # What it gathers must not be taken for parameters that do not travel.
        watch.start()
        for _ in range(3):
            _step(model, optimizer, watch)
            evaluate(model)
        assert not warned, (way, warned)
        parameters.reshard()
        with torch.no_grad():
            writes(model)
        _step(model, optimizer, watch)
        (line,) = warned
        assert "swap them back" in line
        assert not watch.changed()
        with torch.no_grad():
            torch._foreach_mul_(parameters.tensors, 1.5)  # It counts no write to a DTensor.
        assert watch.changed()
        logging.getLogger("narrows.learner").removeHandler(handler)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, watch: WeightWatch) -> None:
    """A step and an adoption, in the order of the Learner's hooks."""
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    watch.before_step()
    optimizer.step()
    optimizer.zero_grad()
    watch.stepped()
    watch.adopting()
    with torch.no_grad():
        for each in model.parameters():
            local_part(each).mul_(0.99)
    watch.boundary_over()


CASES: tuple[Callable[[Path], None], ...] = (
    one_layout_and_one_file,
    a_replica_is_saved_by_one_rank_alone,
    no_place_for_the_file,
    what_an_evaluation_has_gathered_hides_nothing,
    a_stranger_is_noticed_and_an_optimizer_is_not,
    momentum_turns_wherever_it_lies,
)
