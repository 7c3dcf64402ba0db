"""The processes of the acceptance tests: learners as users write them, and programs.

A step of these learners is a timed wait; everything around it is what a user would write.
"""

import itertools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrows.learner import BrokerUnreachable, Learner, NarrowsError, Refused

EXIT_CODES = {Refused: 3, BrokerUnreachable: 4}
"""Those of the command line; 1 for every other error."""


def start_model(width: int) -> nn.Linear:
    """The model from which all toys start: width * (width + 1) parameters."""
    torch.manual_seed(7)
    return nn.Linear(width, width)


def target_of(width: int, seed: int) -> Tensor:
    """The target of a toy's weight; that of its bias is 0."""
    torch.manual_seed(1000 + seed)
    return torch.randn(width, width)


def learn(
    folder: Path,
    name: str,
    *,
    broker: str,
    seed: int = 0,
    width: int = 48,
    lr: float = 0.05,
    noise: float = 0.3,
    step_s: float = 0.01,
    tokens: int = 100,
    key: str | None = None,
    pause_at: int | None = None,
    **options: Any,
) -> None:
    """Trains to the end of the run; the exit codes are those of the command line.

    The loss is the squared distance of a matrix from a target of its own. The target moves from
    step to step, so that every push says something. The folder gets NAME.steps (a byte for each,
    from the moment when it has joined), NAME.jsonl (events), NAME-first.safetensors after a step,
    and NAME.safetensors at the end. options: of `Learner`. Before step `pause_at` it pauses for
    ever.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    model = start_model(width)
    target = target_of(width, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    pace = threading.Event()
    who = {"key": key} if key else {"name": name}
    options = {"join_timeout_s": 25.0, "leave_timeout_s": 25.0, **who, **options}
    events = folder / f"{name}.jsonl"
    try:
        with Learner(model, optimizer, broker=broker, events=events, **options) as learner:
            steps_file = (folder / f"{name}.steps").open("wb", buffering=0)
            for step in learner.until_end(itertools.count()):
                if step == pause_at:
                    with learner.pause("evaluating"):
                        pace.wait()
                pace.wait(step_s)
                goal = target + noise * torch.randn(width, width)
                loss = ((model.weight - goal).square().sum() + model.bias.square().sum()) / 2
                loss.backward()  # type: ignore[no-untyped-call]
                learner.log(tokens=tokens, loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                if steps_file.tell() == 0:
                    learner.save(folder / f"{name}-first.safetensors")
                steps_file.write(b".")
        learner.save(folder / f"{name}.safetensors")
    except NarrowsError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODES.get(type(error), 1))


def insist(folder: Path, name: str, **options: Any) -> None:
    """Starts `learn` again whenever it has ended, as a supervisor does."""
    while True:
        with suppress(SystemExit):
            learn(folder, name, **options)
        threading.Event().wait(2.0)


def steps(folder: Path, name: str) -> int:
    """Steps that a toy learner has made in its present life."""
    path = folder / f"{name}.steps"
    return path.stat().st_size if path.exists() else 0


def execute(folder: Path, arguments: Sequence[str]) -> None:
    """Makes this process a program that finds this installation of `narrows` in its path."""
    os.chdir(folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "NARROWS_KEY": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    os.execvpe(arguments[0], list(arguments), {**os.environ, **more})
