"""A learner of several processes: FSDP2 shards one model over them, on CPUs or on GPUs.

narrows broker --goal-tokens 2e6 --set run.learners_at_start=2 --state-dir runs/fsdp
torchrun --standalone --nproc-per-node 2 examples/fsdp.py site-a
torchrun --standalone --nproc-per-node 2 examples/fsdp.py site-b

Sites may have other numbers of ranks, and a site may be one process: `python examples/fsdp.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from narrows.learner import Learner, NarrowsError

BATCH = 16
CONTEXT = 64
ON_GPU = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPU else "cpu"


def batches() -> Iterator[torch.Tensor]:
    """Random bytes, others on each rank; put your loader here, with a DistributedSampler."""
    torch.manual_seed(1 + RANK)
    while True:
        yield torch.randint(0, 256, (BATCH, CONTEXT + 1)).to(DEVICE)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # The same on every rank and at every site.
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256)).to(DEVICE)
    if dist.is_initialized():
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def train(name: str) -> None:
    model = make_model()
    # After fully_shard, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    with Learner(model, optimizer, broker=broker, name=name) as learner:
        for step, batch in enumerate(learner.until_end(batches())):  # On every rank.
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            learner.log(tokens=batch[:, 1:].numel(), loss=loss)  # This rank's; they are added up.
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 and RANK == 0:
                print(f"{name}: step {step}, loss {loss.item():.3f}, run {learner.progress:.0%}")
    learner.save(f"{name}.safetensors")  # On every rank: each gives its part, rank 0 writes.


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING if RANK else logging.INFO, format="%(message)s")
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: torchrun --standalone --nproc-per-node 2 fsdp.py NAME")
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        if ON_GPU:
            torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
