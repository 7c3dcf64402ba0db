"""A real broker in a thread, and small training loops that join it over loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptance.kit import Ports
from torch import Tensor, nn

from narrows.broker.config import load_broker
from narrows.broker.process.service import Service
from narrows.learner import Learner

WAIT_S = 30.0
STEP = threading.Event()
"""Never set."""


class Broker:
    """One state directory and the broker that serves it, life after life at one address."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.folder = folder
        self._settings = {
            "fragments.count": 2,
            "fragments.sync_period_steps": 4,
            "fragments.overlap_steps": 1,
            "broker.state_dir": str(folder / "state"),
            **settings,
        }
        self.ports = Ports()
        """Kept between two lives: another test must not take them."""
        self.address = f"tcp://127.0.0.1:{self.ports.first}"
        self.start()

    def start(self) -> None:
        """Begins the next life."""
        config = load_broker(None, {**self._settings, "broker.listen": self.address})
        self.service = Service(config, events=self.folder / "broker.jsonl")
        self.address = self.service.link.listens_on
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def stop(self) -> None:
        """Ends this life in order."""
        self.service.stop("the test stops it")
        self.join()

    def join(self) -> None:
        """Waits for the end of this life."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the broker does not end"

    def events(self, event: str) -> list[dict[str, Any]]:
        """Lines of its events file of one kind."""
        path = self.folder / "broker.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@contextmanager
def broker(folder: Path, **settings: object) -> Iterator[Broker]:
    """A broker while the block lasts; settings with __ for the dot."""
    made = Broker(folder, {name.replace("__", "."): value for name, value in settings.items()})
    try:
        yield made
    finally:
        made.stop()
        made.ports.close()


def tiny(seed: int = 0, **options: Any) -> nn.Sequential:
    """About 3,000 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64, **options), nn.Tanh(), nn.Linear(64, 16, **options))


def batches(seed: int = 0) -> Iterator[Tensor]:
    """Endless batches of 8 rows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 32, generator=generator)


def train(
    learner: Learner,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    until: Callable[[], object] = lambda: False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The loop of the documentation; at most WAIT_S."""
    give_up = time.monotonic() + WAIT_S
    for batch in learner.until_end(batches(seed)):
        if until():
            return
        assert time.monotonic() < give_up, f"in vain: {learner.stats()}"
        loss = model(batch.to(dtype)).square().mean()
        loss.backward()
        learner.log(tokens=8, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        STEP.wait(0.002)  # A step of a real model takes time; without it nothing could overlap.


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def until(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """Waits for what other threads and processes do."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail(f"in vain: {what()}")
