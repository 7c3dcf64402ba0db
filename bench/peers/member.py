"""One member of a training run of another system, with the model, text and schedule of our
learners.

Runs in the environment of another system, so it may import only torch, NumPy, xxhash, the standard
library, and those modules of ours that need no more.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from narrows.learner.reference.corpus import Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import (
    GPT,
    learning_rate,
    make_optimizer,
    preset,
    set_learning_rate,
    token_tensor,
    validation_loss,
)

OUTER_LR: Final = 0.4
OUTER_MOMENTUM: Final = 0.6
"""Outer learning rate and momentum of every system with an outer optimizer: our defaults, tuned on
this model (docs/quality.md)."""

START: Final = "start"
"""File that the bench writes when all members are ready."""

POLL_S: Final = 0.02

ROUND_TIMEOUT_S: Final = 10.0
"""Longest wait of a system for a member in one exchange, wherever the system has such a setting."""


@dataclass(frozen=True)
class PeerTraining:
    """Task of one process of a training run."""

    rank: int
    world: int
    """Number of members, without the coordinator."""
    host: str
    port: int
    """Port of the coordinator, in the protocol of its system."""
    preset: str
    steps: int
    """Inner steps of each member."""
    sync_steps: int
    """H, inner steps between two exchanges."""
    start_step: int
    """Step of the run at which a member returns."""
    step_wait_s: float
    """Seconds added to every inner step: a stand-in for a larger model."""
    folder: Path
    """Folder for events and results; shared by all processes."""
    coordinator: bool

    @property
    def name(self) -> str:
        """Name of this process's files."""
        return "coordinator" if self.coordinator else f"member-{self.rank}"


def training_of(arguments: Sequence[str] | None = None) -> PeerTraining:
    """The command line of a training script."""
    parser = argparse.ArgumentParser(description="one member of a training run")
    for name in ("rank", "world", "port", "steps", "sync-steps", "start-step"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("host", "preset"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--step-wait-s", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--coordinator", action="store_true")
    return PeerTraining(**vars(parser.parse_args(arguments)))


class PeerMember:
    """The inner loop of one member, and its reports to the bench."""

    def __init__(self, training: PeerTraining) -> None:
        torch.set_num_threads(1)
        config = preset(training.preset)
        corpus = load_corpus()
        self.training = training
        self.step = training.start_step
        self.model = GPT(config, seed=0)
        self.optimizer = make_optimizer(self.model, config.peak_learning_rate)
        self._windows = fixed_windows(corpus.validation, context=config.context)
        self._reader = Reader(
            corpus.train,
            batch=config.batch,
            context=config.context,
            name=f"learner-{training.rank}",
            start_batch=training.start_step,
        )

    def wait_for_start(self) -> None:
        """Returns when all members are ready, so that none begins alone. A late member returns at
        once."""
        tell_ready(self.training)
        while not (self.training.folder / START).exists():
            time.sleep(POLL_S)

    @property
    def done(self) -> bool:
        return self.step >= self.training.steps

    def gradients(self) -> None:
        """Sets the rate and computes the gradients of the next batch."""
        rate = learning_rate(self.step / self.training.steps, self.model.config.peak_learning_rate)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad()
        x, y = next(self._reader)
        self.loss_of(token_tensor(x), token_tensor(y)).backward()  # type: ignore[no-untyped-call]

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of a batch, int64 (batch, context); a system may wrap it."""
        return self.model.loss(x, y)

    def train(self, steps: int = 1) -> None:
        """Makes inner steps; hooks of the optimizer exchange within them."""
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
            self.step += 1
            time.sleep(self.training.step_wait_s)

    def exchanged(self, members: int) -> None:
        """Reports a complete exchange among so many members, this one included."""
        path = self.training.folder / f"{self.training.name}.jsonl"
        with path.open("a") as file:
            record = {"time_s": time.time(), "step": self.step, "members": members}
            file.write(json.dumps(record) + "\n")

    def finish(self) -> None:
        """Writes steps and validation loss (nats per byte); stays for the others until SIGTERM."""
        loss = validation_loss(self.model, self._windows)
        path = self.training.folder / f"{self.training.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"steps": self.step, "loss": loss}) + "\n")
        partial.replace(path)
        stay()


def tell_ready(training: PeerTraining) -> None:
    """Reports that this process waits for the start."""
    (training.folder / f"{training.name}.ready").touch()


def stay() -> None:
    """Returns on SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
