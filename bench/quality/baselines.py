"""Baselines of a run: one learner alone, and data parallel at equal tokens.

`python -m narrows.bench.quality.baselines alone --steps 1000 --json alone.json` prints a JSON line
about every two seconds and writes the result; `data-parallel` does the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from cyclopts import App

from narrows.learner.reference.corpus import Corpus, Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import (
    GPT,
    learning_rate,
    make_optimizer,
    parameter_count,
    preset,
    set_learning_rate,
    token_tensor,
    validation_loss,
)
from narrows.proto.errors import ConfigError

__all__ = ["Baseline", "Recipe", "train_alone", "train_data_parallel", "validation_loss"]

PROGRESS_INTERVAL_S = 2.0

Progress: TypeAlias = dict[str, float | int | str]
Report: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True)
class Recipe:
    """Training recipe of a baseline. A learner of a run with the same recipe does the same per
    step."""

    steps: int
    """Optimizer steps."""
    preset: str = "tiny"
    batch: int = 0
    """Windows per step and learner; 0: the preset's."""
    seed: int = 0
    """Seed of the order of the text. The model begins like every learner's."""
    peak_learning_rate: float = 0.0
    """0: the preset's."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 0:
            raise ConfigError(
                "steps must be positive and batch not negative",
                got=f"{self.steps} steps, batch {self.batch}",
            )


@dataclass(frozen=True)
class Baseline:
    """A trained model and its record: kind, loss (validation, nats per byte), tokens, times."""

    model: GPT
    record: dict[str, Any]


def train_alone(corpus: Corpus, recipe: Recipe, *, report: Report | None = None) -> Baseline:
    """One learner on the whole text: `recipe.steps` steps with its own batch."""
    return _train("alone", corpus, recipe, ["alone"], report)


def train_data_parallel(
    corpus: Corpus,
    recipe: Recipe,
    *,
    names: Sequence[str] = ("a", "b", "c", "d"),
    report: Report | None = None,
) -> Baseline:
    """Steps with the exact mean gradient of one batch per name; the tokens equal those of a run.

    The readers are those of learners with these names.
    """
    return _train("data_parallel", corpus, recipe, names, report)


def _train(
    kind: str, corpus: Corpus, recipe: Recipe, names: Sequence[str], report: Report | None
) -> Baseline:
    config = preset(recipe.preset)
    model = GPT(config, seed=0)
    batch = recipe.batch or config.batch
    readers = [
        Reader(corpus.train, batch=batch, context=config.context, name=name, seed=recipe.seed)
        for name in names
    ]
    step_tokens = len(names) * batch * config.context
    meter = _Meter(kind, recipe.steps, step_tokens, report)
    peak = recipe.peak_learning_rate or config.peak_learning_rate
    optimizer = make_optimizer(model, peak)
    for step in range(recipe.steps):
        set_learning_rate(optimizer, learning_rate(step / recipe.steps, peak))
        meter.after_step(step + 1, accumulate(model, readers))
        optimizer.step()
        optimizer.zero_grad()
    # The counts first: evaluation is not part of the baseline's seconds.
    record = meter.record() | {
        "loss": validation_loss(model, fixed_windows(corpus.validation, context=config.context)),
        "parameters": parameter_count(model),
        "corpus_digest": corpus.corpus_digest,
        "recipe": asdict(recipe),
    }
    return Baseline(model, record)


def accumulate(model: GPT, readers: Sequence[Reader]) -> float:
    """Adds the mean gradient over one batch per reader; returns the mean loss before the step."""
    total = 0.0
    for reader in readers:
        x, y = next(reader)
        loss = model.loss(token_tensor(x), token_tensor(y)) / len(readers)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


class _Meter:
    """Counts steps, tokens and seconds, and reports them now and then."""

    def __init__(self, kind: str, steps: int, step_tokens: int, report: Report | None) -> None:
        self._kind, self._steps, self._step_tokens, self._report = kind, steps, step_tokens, report
        self._started_s = self._told_s = time.monotonic()
        self._cpu_started_s = time.process_time()

    def after_step(self, step: int, train_loss: float) -> None:
        now_s = time.monotonic()
        due = now_s - self._told_s >= PROGRESS_INTERVAL_S or step == self._steps
        if self._report is not None and due:
            self._told_s = now_s
            self._report({**self._counts(step), "train_loss": train_loss})

    def record(self) -> dict[str, Any]:
        cpu_s = time.process_time() - self._cpu_started_s
        return {**self._counts(self._steps), "cpu_s": cpu_s}

    def _counts(self, step: int) -> Progress:
        wall_s = time.monotonic() - self._started_s
        tokens = step * self._step_tokens
        counts: Progress = {"kind": self._kind, "step": step, "steps": self._steps}
        return counts | {"tokens": tokens, "wall_s": wall_s, "tokens_per_s": tokens / wall_s}


app = App(name="narrows.bench.quality.baselines", help="Train a baseline of the reference model.")


@app.command
def alone(
    *,
    steps: int,
    preset: str = "tiny",
    batch: int = 0,
    seed: int = 0,
    data: Path | None = None,
    threads: int = 1,
    json: Path | None = None,
) -> None:
    """One learner alone on the whole text. steps: optimizer steps; json: file for the result."""
    torch.set_num_threads(threads)
    recipe = Recipe(steps=steps, preset=preset, batch=batch, seed=seed)
    _publish(train_alone(load_corpus(data), recipe, report=print_progress), json)


@app.command
def data_parallel(
    *,
    steps: int,
    learners: int = 4,
    preset: str = "tiny",
    batch: int = 0,
    seed: int = 0,
    data: Path | None = None,
    threads: int = 1,
    json: Path | None = None,
) -> None:
    """One batch per learner in every step, in one process. steps: optimizer steps."""
    torch.set_num_threads(threads)
    recipe = Recipe(steps=steps, preset=preset, batch=batch, seed=seed)
    names = [f"learner-{index}" for index in range(learners)]
    corpus = load_corpus(data)
    _publish(train_data_parallel(corpus, recipe, names=names, report=print_progress), json)


def print_progress(progress: Progress) -> None:
    """One JSON line on stdout."""
    print(json.dumps(progress), flush=True)


def _publish(baseline: Baseline, path: Path | None) -> None:
    print_progress(baseline.record)
    if path is not None:
        path.write_text(json.dumps(baseline.record, indent=2) + "\n")


if __name__ == "__main__":
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
