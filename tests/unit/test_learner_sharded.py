"""Parameters that torch has sharded, in a group of one process: DTensors as several ranks have."""

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from model_cases import Small, loss_of, small
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from narrows.learner.parameters import Parameters, local_part
from narrows.learner.weights import WeightWatch
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import build_table


@pytest.fixture(autouse=True)
def group() -> Generator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole_model() -> Small:
    model = small()
    model.gain = nn.Parameter(torch.tensor([2.0]))  # FSDP2 shards no scalars.
    model.norm.bias.requires_grad_(False)
    return model


def sharded() -> Small:
    model = whole_model()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return loss_of(model)


def test_a_sharded_model_has_the_layout_and_the_values_of_a_whole_one(tmp_path: Path) -> None:
    """Holds `Parameters`."""
    model = sharded()
    assert all(isinstance(each, DTensor) for each in model.parameters())
    parameters = Parameters(model)
    one = Parameters(whole_model())
    assert parameters.layout == one.layout and parameters.names == one.names
    for fragment in build_table(one.layout.entries, 2):
        out = np.empty((2, fragment.elements), np.float32)
        parameters.read(fragment, out[0])
        one.read(fragment, out[1])
        assert out[0].tobytes() == out[1].tobytes()
    for index, each in enumerate((parameters, one)):
        each.save(tmp_path / f"{index}.safetensors", {"format": "pt"})
    files = [(tmp_path / f"{index}.safetensors").read_bytes() for index in range(2)]
    assert files[0] == files[1]
    whole_model().load_state_dict(load_file(tmp_path / "0.safetensors"), strict=True)


def test_what_an_evaluation_has_gathered_hides_neither_names_nor_values() -> None:
    """FSDP2 keeps the root's whole parameters after a forward pass without a backward one. Holds
    `Parameters.reshard`."""
    model = sharded()
    before = evaluate(model)
    assert not isinstance(model.table.weight, DTensor), "the trap is set"
    parameters = Parameters(model)
    assert all(isinstance(each, DTensor) for each in parameters.tensors)
    assert parameters.layout == Parameters(whole_model()).layout

    assert torch.equal(evaluate(model), before)
    for fragment in build_table(parameters.layout.entries, 2):
        parameters.write(fragment, np.full(fragment.elements, 0.5, np.float32))
    parameters.reshard()
    adopted = whole_model()
    with torch.no_grad():
        for each in adopted.parameters():
            if each.requires_grad:
                each.fill_(0.5)
    assert torch.equal(evaluate(model), evaluate(adopted))


def test_an_evaluation_before_the_block_leaves_no_strangers() -> None:
    """Holds `WeightWatch.start`."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = WeightWatch(Parameters(model), [optimizer])
    evaluate(model)
    watch.start()


@pytest.mark.parametrize("kind", ["copy_", "load_state_dict", "other memory"])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_who_writes_to_a_shard_is_noticed_and_an_optimizer_is_not(
    kind: str, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds `WeightWatch.before_step`."""
    caplog.set_level(logging.WARNING, "narrows.learner")
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
    watch = WeightWatch(Parameters(model), [optimizer])
    watch.start()

    def step() -> None:
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

    for _ in range(3):
        evaluate(model)
        step()
    assert not caplog.messages
    with torch.no_grad():
        if kind == "copy_":
            for each in model.parameters():
                each.copy_(each * 1.5)
        elif kind == "load_state_dict":
            model.load_state_dict({k: v.clone() * 1.5 for k, v in model.state_dict().items()})
        else:
            table: Any = model.table.weight
            table._local_tensor = table._local_tensor * 1.5
    step()
    (line,) = caplog.messages
    assert "swap them back" in line


def test_a_sum_that_is_not_made_yet_is_refused() -> None:
    """Holds `Parameters`."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    with pytest.raises(LocalProtocolError, match=r"'weight' is a partial DTensor") as caught:
        Parameters(model)
    assert caught.value.code is ErrorCode.MISUSE and caught.value.remedy
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh))
    assert [entry.name for entry in Parameters(model).layout.entries] == ["weight", "bias"]
