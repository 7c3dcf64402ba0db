"""One run of `narrows bench quality`: learners that train the reference GPT in virtual time.

Importing this module loads PyTorch, which takes seconds.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch

from narrows.bench.quality_cells import QualityCell
from narrows.bench.reference.gpt import GPT, PRESETS, learning_rate, make_optimizer
from narrows.bench.reference.text import Text, Tokens, load_text
from narrows.bench.sim.run import Plan, Simulation, Site
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


def train(cell: QualityCell, seed: int) -> tuple[float, float]:
    """Validation loss of a run's final model, and learners per merge."""
    torch.set_num_threads(1)
    preset = PRESETS[cell.preset]
    speeds = [float(each) for each in cell.speeds.split(":")]
    step_tokens = cell.learners * preset.batch * preset.context
    settings: dict[str, object] = {
        "run.learners_at_start": cell.learners,
        "run.goal_tokens": cell.steps * step_tokens,
        "run.tokens_per_run_step": step_tokens,
        "fragments.keep": cell.keep,
    }
    steps_s = [STEP_S * max(speeds) / speed for speed in speeds]
    plan = Plan(seed, settings, steps_s, partial(Student, cell))
    plan.ends = 20 * STEP_S * cell.steps
    for index in range({"nobody": 0, "one": 1, "each": cell.learners}[cell.dead]):
        begins_s = AWAY_PERIOD_S * (index + 0.5) / cell.learners
        for at_s in np.arange(begins_s, plan.ends, AWAY_PERIOD_S).tolist():
            plan.befalls(at_s, index, Site.die, AWAY_PERIOD_S / 2)
    with TemporaryDirectory(prefix="narrows-bench-") as folder:
        run = Simulation(plan, Path(folder))
        run.until(plan.ends)
        contributors = run.contributors_mean()
    # At the end of a run all learners that are alive hold the same model.
    student = next(site.trainee for site in run.sites if site.host.session.final)
    assert isinstance(student, Student)
    return student.model.validation_loss(windows(cell)), contributors


def train_data_parallel(cell: QualityCell, seed: int) -> float:
    """Validation loss at equal tokens: each step learns from one batch of every learner."""
    torch.set_num_threads(1)
    preset = PRESETS[cell.preset]
    model = GPT(preset, seed=seed)
    optimizer = make_optimizer(model, preset.peak_learning_rate)
    readers = [
        text().tokens(batch=preset.batch, context=preset.context, order=f"{seed}:learner-{index}")
        for index in range(cell.learners)
    ]
    for step in range(cell.steps):
        rate = learning_rate(step / cell.steps, step, preset.peak_learning_rate)
        # One batch of each learner, which together are the batch of this step.
        batches = zip(*(next(reader) for reader in readers), strict=True)
        x, y = (np.concatenate(parts) for parts in batches)
        optimize(model, optimizer, rate, x, y)
    return model.validation_loss(windows(cell))


class Student:
    """One life of a learner, with the reference worker's model, text and schedule."""

    def __init__(self, cell: QualityCell, site: Site) -> None:
        self._site = site
        self.preset = PRESETS[cell.preset]
        seed = site.run.plan.seed
        self.model = GPT(self.preset, seed=seed)
        self.optimizer = make_optimizer(self.model, self.preset.peak_learning_rate)
        self.source = Parameters(self.model)
        self.layout = self.source.layout
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
        rate = learning_rate(progress, run_step, self.preset.peak_learning_rate)
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
