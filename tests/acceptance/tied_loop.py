"""A user's PyTorch loop: tied and half-precision weights, two optimizers, compiled if wanted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

ROWS, WIDTH, BATCH = 32, 16, 64


class Tied(nn.Module):
    """Embedding and head share one weight; a hidden layer in bfloat16; a buffer stays at home."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Buffer(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        inner: Tensor = self.hidden(self.table(tokens).bfloat16())
        return torch.as_tensor(self.head(torch.tanh(inner).float() * self.scale))


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, ROWS, (BATCH,), generator=generator)


def train(name: str, broker: str, folder: Path, seed: int, compiled: bool) -> None:
    """Learns that every token is followed by the next one in the table, to the end of the run.

    Writes NAME-first.safetensors after a step, and at the end NAME.safetensors and
    NAME-losses.json.
    """
    from narrows.learner import Learner

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Tied()
    # Every backend gives the model the prefix and the hooks of a compiled one; this one is quick.
    called = torch.compile(model, backend="eager") if compiled else model
    assert isinstance(called, nn.Module)
    optimizers = [
        torch.optim.SGD(model.hidden.parameters(), lr=0.1),
        torch.optim.AdamW(model.table.parameters(), lr=0.02),
    ]
    losses: list[float] = []
    pace = threading.Event()
    called(next(batches(seed)))  # Compiles before the others have to wait for it.
    with Learner(
        called, optimizers, broker=broker, name=name, events=folder / f"{name}.jsonl"
    ) as learner:
        for tokens in learner.until_end(batches(seed)):
            loss = nn.functional.cross_entropy(called(tokens), (tokens + 1) % ROWS)
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=tokens.numel(), loss=loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 1:
                learner.save(folder / f"{name}-first.safetensors")
            pace.wait(0.005)
    learner.save(folder / f"{name}.safetensors")
    (folder / f"{name}-losses.json").write_text(json.dumps(losses))
