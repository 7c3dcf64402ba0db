"""One run of `narrows bench quality`: learners that train the reference GPT in virtual time.

Importing this module loads PyTorch, which takes seconds.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import torch

from narrows.bench.quality_cells import QualityCell
from narrows.bench.reference.gpt import GPT, PRESETS, learning_rate, make_optimizer
from narrows.bench.reference.text import Text, Tokens, load_text
from narrows.bench.sim.run import Plan, Simulation, Site
from narrows.learner.handover import AdamMoments
from narrows.learner.loop import ramp_steps
from narrows.learner.parameters import Parameters
from narrows.learner.session import Session

STEP_S: Final = 1.0
"""Virtual seconds of a step of the fastest learner. Delays of the line and of workers are a few
percent of that."""
NOISE: Final = 0.1
"""Largest deviation of a step's time, as a share of it."""
AWAY_PERIOD_S: Final = 200.0
"""A learner that is dead half of the time dies once in each such period, one learner after the
other."""
WINDOWS: Final = 1024
"""Windows of validation text."""


MARKS: Final = (0.1, 0.25, 0.5, 1.0)
"""Shares of a run after which its loss is measured: a late start is told from a worse end."""


class Trained(NamedTuple):
    """One run of a cell."""

    losses: list[float]
    """Validation losses at MARKS; the last is that of the final model."""
    contributors: float
    """Learners per merge."""


def train(cell: QualityCell, seed: int) -> Trained:
    """Trains the learners of a cell. Losses before the end are those of the first learner's
    parameters, which lead its published copies by what it has not pushed yet."""
    torch.set_num_threads(1)
    preset = PRESETS[cell.preset]
    speeds = [float(each) for each in cell.speeds.split(":")]
    step_tokens = cell.learners * preset.batch * preset.context
    settings: dict[str, object] = {
        "run.learners_at_start": cell.learners - (cell.dead == "late"),
        "run.goal_tokens": cell.steps * step_tokens,
        "run.tokens_per_run_step": step_tokens,
        "merge.outer_lr": cell.outer_lr,
        "merge.outer_momentum": cell.outer_momentum,
        "fragments.keep": cell.keep,
        "fragments.handover": cell.handover,
    }
    steps_s = [STEP_S * max(speeds) / speed for speed in speeds]
    marks: list[float] = []
    plan = Plan(seed, settings, steps_s, partial(Student, cell, marks))
    plan.ends = 20 * STEP_S * cell.steps
    for index in range({"one": 1, "each": cell.learners}.get(cell.dead, 0)):
        begins_s = AWAY_PERIOD_S * (index + 0.5) / cell.learners
        for at_s in np.arange(begins_s, plan.ends, AWAY_PERIOD_S).tolist():
            plan.befalls(at_s, index, Site.die, AWAY_PERIOD_S / 2)
    if cell.dead == "late":
        plan.befalls(STEP_S, cell.learners - 1, Site.die, STEP_S * cell.steps / 4)
    with TemporaryDirectory(prefix="narrows-bench-") as folder:
        run = Simulation(plan, Path(folder))
        run.until(plan.ends)
        contributors = run.contributors_mean()
    # At the end of a run all learners that are alive hold the same model.
    student = next(site.trainee for site in run.sites if site.host.session.final)
    assert isinstance(student, Student)
    return Trained([*marks, student.model.validation_loss(windows(cell))], contributors)


def train_data_parallel(cell: QualityCell, seed: int) -> list[float]:
    """Validation losses at MARKS, at equal tokens: each step learns from one batch of every
    learner."""
    torch.set_num_threads(1)
    preset = PRESETS[cell.preset]
    model = GPT(preset, seed=seed)
    peak = cell.peak * preset.peak_learning_rate
    optimizer = make_optimizer(model, peak, (cell.beta1, cell.beta2))
    readers = [
        text().tokens(batch=preset.batch, context=preset.context, order=f"{seed}:learner-{index}")
        for index in range(cell.learners)
    ]
    losses: list[float] = []
    for step in range(cell.steps):
        progress = step / cell.steps
        if progress >= MARKS[len(losses)]:
            losses.append(model.validation_loss(windows(cell)))
        rate = learning_rate(progress, step, peak)
        # One batch of each learner, which together are the batch of this step.
        batches = zip(*(next(reader) for reader in readers), strict=True)
        x, y = (np.concatenate(parts) for parts in batches)
        optimize(model, optimizer, rate, x, y)
    return [*losses, model.validation_loss(windows(cell))]


def tokens_per_param(cell: QualityCell) -> float:
    """Tokens that a run learns from, for each parameter."""
    preset = PRESETS[cell.preset]
    with torch.device("meta"):
        elements = sum(each.numel() for each in GPT(preset).parameters())
    return cell.steps * cell.learners * preset.batch * preset.context / elements


class Student:
    """One life of a learner, with the reference worker's model, text and schedule."""

    def __init__(self, cell: QualityCell, marks: list[float], site: Site) -> None:
        """The first learner adds the losses at MARKS to `marks`, through all its lives."""
        self._site = site
        self._cell = cell
        self._marks = marks
        self.preset = PRESETS[cell.preset]
        seed = site.run.plan.seed
        self.model = GPT(self.preset, seed=seed)
        self._peak = cell.peak * self.preset.peak_learning_rate
        self.optimizer = make_optimizer(self.model, self._peak, (cell.beta1, cell.beta2))
        self.source = Parameters(self.model)
        self.layout = self.source.layout
        self.hand_over = AdamMoments(self.source, [self.optimizer]).hand_over
        self._order = f"{seed}:learner-{site.index}"
        self._steps = 0

    def step_s(self, now: float) -> float:
        return self._site.step_s * self._site.world.rng.uniform(1 - NOISE, 1 + NOISE)

    def step(self, session: Session, now: float) -> int:
        settings = session.settings
        run_tokens = session.run_tokens(now)
        run_step = run_tokens / settings.tokens_per_run_step
        if self._steps == 0:
            # It begins where the run stands, as the reference worker does.
            self._batches = text().tokens(
                batch=self.preset.batch,
                context=self.preset.context,
                order=self._order,
                skip=int(run_step),
            )
            if any(part.base > 0 for part in session.parts):
                # It joins a run that has begun, and the moments of its optimizer are new.
                session.set_ramp(ramp_steps([self.optimizer]))
        self._steps += 1

        progress = run_tokens / settings.goal_tokens
        if self._site.index == 0 and MARKS[len(self._marks)] <= min(progress, MARKS[-2]):
            self._marks.append(self.model.validation_loss(windows(self._cell)))
        rate = learning_rate(progress, run_step, self._peak)
        rate *= min(1.0, self._steps / max(1, session.ramp_steps))
        x, y = next(self._batches)
        optimize(self.model, self.optimizer, rate, x, y)
        return int(x.size)


def optimize(
    model: GPT, optimizer: torch.optim.Optimizer, rate: float, x: Tokens, y: Tokens
) -> None:
    """Makes one step with a batch."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.loss(torch.from_numpy(x), torch.from_numpy(y)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


@cache
def text() -> Text:
    """The standard library's sources, loaded once in a process."""
    return load_text()


@cache
def windows(cell: QualityCell) -> Tokens:
    """The windows of validation text that judge every run."""
    return text().validation_windows(context=PRESETS[cell.preset].context, count=WINDOWS)
