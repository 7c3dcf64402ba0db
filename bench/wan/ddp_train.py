"""The reference model in data parallel over Gloo: one rank, with the learners' recipe.

`python -m narrows.bench.wan.ddp_train --rank 0 --world 2 --address HOST:PORT ...` writes a JSON
summary with the keys of the reference worker, and the seconds of a step without communication.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from cyclopts import App
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from narrows.learner.reference.corpus import Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import (
    GPT,
    make_optimizer,
    parameter_count,
    preset,
    scheduled_rate,
    set_learning_rate,
    token_tensor,
    validation_loss,
)

COMPUTE_STEPS: Final = 10
"""Steps without communication that are timed first; their gradients are thrown away."""


class _Loss(torch.nn.Module):
    """The model as a function of (x, y), so that the module inside DDP returns the loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model.loss(x, y)


def _bf16(state: Any, bucket: Any) -> Any:
    """torch's hook under another name. Under its own name torch refuses it without NCCL, though
    Gloo sums bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


_bf16.__annotations__ = {}  # DDP wants the type itself here, or nothing, but no text.


class Rank:
    """One of the processes."""

    def __init__(self, model: GPT, reader: Reader, *, bf16: bool) -> None:
        self.model, self.reader = model, reader
        self.parallel = DistributedDataParallel(_Loss(model))
        if bf16:
            parallel: Any = self.parallel
            parallel.register_comm_hook(None, _bf16)
        self.peak = model.config.peak_learning_rate
        self.optimizer = make_optimizer(model, self.peak)
        self.steps = self.tokens = 0

    def compute_s(self) -> float:
        """Median seconds of forward and backward without communication."""
        seconds: list[float] = []
        for _ in range(COMPUTE_STEPS):
            started_s = time.monotonic()
            with self.parallel.no_sync():
                self._backward()
            seconds.append(time.monotonic() - started_s)
        self.optimizer.zero_grad()
        return median(seconds)

    def train(self, seconds: float) -> float:
        """Steps until rank 0 says that the time is over; returns the seconds that they took."""
        dist.barrier()
        started_s = time.monotonic()
        goes_on = torch.ones(1)
        while goes_on.item():
            set_learning_rate(self.optimizer, scheduled_rate(0.0, self.steps, self.peak))
            self.tokens += self._backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            goes_on[0] = time.monotonic() - started_s < seconds
            dist.broadcast(goes_on, src=0)
        return time.monotonic() - started_s

    def _backward(self) -> int:
        x, y = next(self.reader)
        loss: torch.Tensor = self.parallel(token_tensor(x), token_tensor(y))
        loss.backward()  # type: ignore[no-untyped-call]
        return x.size


app = App(name="narrows.bench.wan.ddp_train", help="Train the reference model in data parallel.")


@app.default
def train(
    *,
    rank: int,
    world: int,
    address: str,
    model: str,
    batch: int,
    seconds: float,
    gradients: Literal["f32", "bf16"],
    json_file: Path,
) -> None:
    """One rank. address: HOST:PORT of rank 0; batch: windows per rank and step."""
    torch.set_num_threads(1)
    config = preset(model)
    corpus = load_corpus()
    gpt = GPT(config, seed=0)
    reader = Reader(corpus.train, batch=batch, context=config.context, name=f"l{rank}")
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    each = Rank(gpt, reader, bf16=gradients == "bf16")
    compute_s = each.compute_s()
    loop_s = each.train(seconds)
    summary: dict[str, Any] = {
        "steps": each.steps,
        "tokens": each.tokens,
        "loop_s": loop_s,
        "tokens_per_s": each.tokens / loop_s,
        "compute_s_per_step": compute_s,
        "parameters": parameter_count(gpt),
    }
    windows = fixed_windows(corpus.validation, context=config.context)
    summary["validation_loss"] = validation_loss(gpt, windows)
    json_file.write_text(json.dumps(summary) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
