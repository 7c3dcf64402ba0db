"""The processes of the acceptance tests: learners as users write them, commands, programs.

A step of these learners is a timed wait; everything around it is what a user would write.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from narrows.learner import BrokerUnreachable, Learner, NarrowsError, Refused

ROWS, WIDTH, BATCH = 32, 16, 64


class Task(NamedTuple):
    """A model and what it learns."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    get_loss: Callable[[], Tensor]
    """The loss of the next batch."""


def start_model(width: int) -> nn.Linear:
    """The model from which all toys start: width * (width + 1) parameters."""
    torch.manual_seed(7)
    return nn.Linear(width, width)


def target_of(width: int, seed: int) -> Tensor:
    """The target of a toy's weight; that of its bias is 0."""
    torch.manual_seed(1000 + seed)
    return torch.randn(width, width)


def matrix(seed: int, width: int, lr: float, noise: float) -> Task:
    """The loss is the squared distance of a matrix from a target of its own. The target moves from
    step to step, so that every push says something."""
    model, target = start_model(width), target_of(width, seed)

    def get_loss() -> Tensor:
        goal = target + noise * torch.randn(width, width)
        return ((model.weight - goal).square().sum() + model.bias.square().sum()) / 2

    return Task(model, [torch.optim.SGD(model.parameters(), lr=lr)], get_loss)


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


def tied(seed: int, is_compiled: bool) -> Task:
    """A tied model with two optimizers learns that every token is followed by the next one in the
    table."""
    torch.manual_seed(seed)
    model = Tied()
    # Every backend gives the model the prefix and the hooks of a compiled one; this one is quick.
    called: Any = torch.compile(model, backend="eager") if is_compiled else model

    def get_loss() -> Tensor:
        tokens = torch.randint(0, ROWS, (BATCH,))
        return nn.functional.cross_entropy(called(tokens), (tokens + 1) % ROWS)

    get_loss()  # Compiles before the others have to wait for it.
    hidden = torch.optim.SGD(model.hidden.parameters(), lr=0.1)
    return Task(called, [hidden, torch.optim.AdamW(model.table.parameters(), lr=0.02)], get_loss)


def learn(
    folder: Path,
    name: str,
    *,
    broker: str,
    model: Literal["matrix", "tied", "compiled"] = "matrix",
    seed: int = 0,
    width: int = 48,
    lr: float = 0.05,
    noise: float = 0.3,
    step_s: float = 0.01,
    tokens: int = 100,
    hang_at: float = 2.0,
    key: str | None = None,
    **options: Any,
) -> None:
    """Trains to the end of the run; the exit codes are those of the command line.

    The folder gets NAME.steps (a byte for each, from the moment when it has joined), NAME.jsonl
    (events), NAME-first.safetensors after a step, and at the end NAME.safetensors and NAME.json.
    hang_at: progress of the run at which it stops stepping for ever; above 1: never.
    options: of `Learner`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    task = matrix(seed, width, lr, noise) if model == "matrix" else tied(seed, model == "compiled")
    said, code, losses, pace = "", 0, list[float](), threading.Event()
    who = {"key": key} if key else {"name": name}
    options = {"join_timeout_s": 25.0, "leave_timeout_s": 25.0, **who, **options}
    events = folder / f"{name}.jsonl"
    try:
        made = Learner(task.model, task.optimizers, broker=broker, events=events, **options)
        with made as learner:
            steps_file = (folder / f"{name}.steps").open("wb", buffering=0)
            for _ in learner.until_end(itertools.repeat(None)):
                pace.wait(step_s)
                loss = task.get_loss()
                loss.backward()  # type: ignore[no-untyped-call]
                learner.log(tokens=tokens, loss=loss)
                for optimizer in task.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                steps_file.write(b".")
                if len(losses) == 1:
                    learner.save(folder / f"{name}-first.safetensors")
                if learner.progress >= hang_at:
                    threading.Event().wait()
        learner.save(folder / f"{name}.safetensors")
    except NarrowsError as error:
        said = str(error)
        code = 3 if isinstance(error, Refused) else 4 if isinstance(error, BrokerUnreachable) else 1
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    (folder / f"{name}.json").write_text(json.dumps({"said": said, "losses": losses}))
    sys.exit(code)


def steps(folder: Path, name: str) -> int:
    """Steps that a toy learner has made in its present life."""
    path = folder / f"{name}.steps"
    return path.stat().st_size if path.exists() else 0


def command(
    folder: Path, arguments: Sequence[str], *, crash_at: str = "", out: Path | None = None
) -> None:
    """Runs `narrows ARGUMENTS` in this process, as the installed script does."""
    os.environ.update({"NARROWS_CRASH_AT": crash_at} if crash_at else {})
    os.chdir(folder)
    if out is not None:
        _redirect(out, 1)
    from narrows.__main__ import main

    sys.argv = ["narrows", *arguments]
    main()


def execute(folder: Path, arguments: Sequence[str]) -> None:
    """Makes this process a program that finds this installation of `narrows` in its path."""
    os.chdir(folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "NARROWS_KEY": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    os.execvpe(arguments[0], list(arguments), {**os.environ, **more})


def run(
    log: Path, target: Callable[..., None], arguments: Sequence[Any], more: dict[str, Any]
) -> None:
    """Runs `target` with its output in `log`. SIGABRT adds the stacks of all threads."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _redirect(log, 1, 2)
    faulthandler.enable()
    target(*arguments, **more)


def _redirect(path: Path, *numbers: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in numbers:
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
