"""The processes of the acceptance tests: a learner with a toy model, or a command.

A step of the toy is a timed wait; everything around it is what a user would write.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

STEPS_FILE_BYTES = 48


@dataclass(frozen=True)
class Toy:
    """A learner of a square matrix whose loss is its squared distance from a target."""

    name: str
    broker: str | None
    folder: Path
    """Gets NAME.joined, NAME.steps, NAME.jsonl (events), and at the end NAME.safetensors and
    NAME.json."""
    step_s: float = 0.01
    tokens: int = 100
    """Tokens of one step."""
    width: int = 48
    """Side of the matrix; the model has width * (width + 1) parameters."""
    seed: int = 0
    """Seed of the target. The start is the same for all."""
    key: str | None = None
    lr: float = 0.05
    noise: float = 0.3
    """Spread of the target from step to step, so that every push says something."""
    join_timeout_s: float = 25.0
    leave_timeout_s: float | None = 25.0
    hang_at: float = 2.0
    """Progress of the run at which it stops stepping for ever; above 1: never."""


def start_model(width: int) -> nn.Linear:
    """The model from which all toys start."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    return nn.Linear(width, width)


def target_of(width: int, seed: int) -> Tensor:
    """The target of a toy's weight; that of its bias is 0."""
    import torch

    torch.manual_seed(1000 + seed)
    return torch.randn(width, width)


def learn(toy: Toy) -> None:
    """Trains until the end of the run; exit codes are those of the command line."""
    import torch

    from narrows.learner import BrokerUnreachable, Learner, NarrowsError, Refused

    torch.set_num_threads(1)
    model = start_model(toy.width)
    target = target_of(toy.width, toy.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=toy.lr)
    said, code, steps, losses = "", 0, 0, list[float]()
    pace = threading.Event()
    stats: dict[str, Any] = {}
    steps_file = os.open(toy.folder / f"{toy.name}.steps", os.O_RDWR | os.O_CREAT)
    options: dict[str, Any] = {"key": toy.key} if toy.key else {}
    try:
        learner = Learner(
            model, optimizer, broker=toy.broker, name=toy.name if not toy.key else None,
            join_timeout_s=toy.join_timeout_s, leave_timeout_s=toy.leave_timeout_s,
            events=toy.folder / f"{toy.name}.jsonl", **options,
        )  # fmt: skip
        with learner:
            (toy.folder / f"{toy.name}.joined").touch()
            for _ in learner.until_end(itertools.repeat(None)):
                pace.wait(toy.step_s)
                goal = target + toy.noise * torch.randn(toy.width, toy.width)
                loss = (model.weight - goal).square().sum() / 2 + model.bias.square().sum() / 2
                loss.backward()  # type: ignore[no-untyped-call]
                learner.log(tokens=toy.tokens, loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                losses.append(loss.item())
                line = f"{steps} {steps * toy.tokens} {learner.progress:.4f}"
                os.pwrite(steps_file, line.ljust(STEPS_FILE_BYTES).encode(), 0)
                if learner.progress >= toy.hang_at:
                    threading.Event().wait()
        stats = learner.stats()
        learner.save(toy.folder / f"{toy.name}.safetensors")
    except NarrowsError as error:
        said = str(error)
        code = 3 if isinstance(error, Refused) else 4 if isinstance(error, BrokerUnreachable) else 1
        print(f"{toy.name}: {said}", file=sys.stderr, flush=True)
    told = {"said": said, "steps": steps, "tokens": steps * toy.tokens, "losses": losses}
    (toy.folder / f"{toy.name}.json").write_text(json.dumps({**told, "stats": stats}))
    sys.exit(code)


def steps(folder: Path, name: str) -> tuple[int, int]:
    """Steps and tokens that a toy learner has made in its present life."""
    path = folder / f"{name}.steps"
    words = path.read_text().split() if path.exists() else []
    return (int(words[0]), int(words[1])) if words else (0, 0)


def command(
    arguments: list[str], environment: dict[str, str], folder: Path, out: Path | None = None
) -> None:
    """Runs `narrows ARGUMENTS` in this process, as the installed script does."""
    os.environ.update(environment)
    os.chdir(folder)
    if out is not None:
        _redirect(out, 1)
    from narrows.__main__ import main

    sys.argv = ["narrows", *arguments]
    main()


def run_logged(log: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs `target` with its output in `log`. SIGUSR2 adds the stacks of all threads."""
    _redirect(log, 1, 2)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if target is learn:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    target(*arguments)


def _redirect(path: Path, *numbers: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in numbers:
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
