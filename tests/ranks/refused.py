"""Islands that cannot be, as each of two ranks meets them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.island import Island, Model, build
from torch import nn

from narrows.learner import ErrorCode, Learner, LocalProtocolError


def meet(work: Callable[[], None], folder: Path, rank: int) -> None:
    """One of two ranks."""
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    work()
    dist.destroy_process_group()


def refused(model: nn.Module, name: str = "a", **more: Any) -> LocalProtocolError:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LocalProtocolError) as caught:
        Learner(model, optimizer, broker="tcp://127.0.0.1:1", name=name, **more)
    return caught.value


def who_shares_tokens_must_be_told() -> None:
    """Tensor parallel ranks learn from the same tokens."""
    model, *_ = build(Island("tp", 2))
    error = refused(model)
    assert error.code is ErrorCode.MISUSE and 'data_parallel=mesh["dp"]' in error.remedy
    assert "tp" in error.got and "blocks" in error.message
    assert "mesh" in refused(model, data_parallel="dp").expected


def models_that_differ_are_refused() -> None:
    """Each rank of a pipeline has other layers."""
    layers = Model(torch.float32).blocks[dist.get_rank() :]
    assert "Pipeline" in refused(layers).remedy


CASES: tuple[Callable[[], None], ...] = (
    who_shares_tokens_must_be_told,
    models_that_differ_are_refused,
)
