"""Trains data parallel: DistributedDataParallel over Gloo, a gradient all-reduce in every step."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.exchange import use_interface_of
from narrows.bench.peers.member import (
    ROUND_TIMEOUT_S,
    PeerMember,
    PeerTraining,
    stay,
    tell_ready,
    training_of,
)
from narrows.learner.reference.gpt import GPT


class Loss(nn.Module):
    """The model and its loss as one module: DistributedDataParallel follows only `forward`."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss(x, y)


class ParallelMember(PeerMember):
    """A member whose gradients are averaged while they are computed."""

    wrapped: DistributedDataParallel

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.wrapped(x, y)
        return loss


def store_of(training: PeerTraining) -> TCPStore:
    return TCPStore(
        training.host, training.port, is_master=training.coordinator, wait_for_workers=False
    )


def main() -> None:
    training = training_of()
    if training.coordinator:
        store = store_of(training)
        print(f"store at port {store.port}", flush=True)
        tell_ready(training)
        stay()
        return
    member = ParallelMember(training)
    member.wait_for_start()
    use_interface_of(training.host)
    dist.init_process_group(
        "gloo",
        store=store_of(training),
        rank=training.rank,
        world_size=training.world,
        timeout=timedelta(seconds=ROUND_TIMEOUT_S),
    )
    member.wrapped = DistributedDataParallel(Loss(member.model))
    while not member.done:
        member.train()
        member.exchanged(training.world)
    member.finish()
    # Gloo's threads would be torn down while others still have connections open.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
