"""Learning rates on the run's clock: a schedule of a framework counts its own steps alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from narrows.learner.learner import Learner
from narrows.learner.loop import bare_optimizers, once_a_step

Rate: TypeAlias = float | Tensor


class RunRate:
    """Sets the learning rates of an optimizer for each of its steps, and takes them back after it.

    A LambdaLR knows the rate of every step, so in a run with a goal it is read at the step that
    corresponds to the run's progress. Every other schedule goes on from its last rate: it keeps its
    own clock, and only the learner's `lr_scale` acts, unseen by the schedule.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        total_steps: float,
    ) -> None:
        """schedulers: those of the framework, of any optimizer. total_steps: their length, if it
        is known: positive and finite."""
        self.steps = 0
        """Steps that the optimizer has made."""
        self._learner = learner
        self._groups = optimizer.param_groups
        mine = [each for each in schedulers if optimizer in bare_optimizers(each.optimizer)]
        self._scheduler = mine[0] if mine else None
        is_known = isinstance(self._scheduler, LambdaLR) and 0 < total_steps < math.inf
        self._total_steps = total_steps if is_known else 0.0
        self._own: list[Rate] = []
        """Rates to go back to; empty if they were not touched."""
        self._hooks = [
            optimizer.register_step_pre_hook(once_a_step(optimizer, self._before_step)),
            optimizer.register_step_post_hook(once_a_step(optimizer, self._after_step)),
        ]

    def remove(self) -> None:
        """Leaves the optimizer to its schedule."""
        for hook in self._hooks:
            hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self) -> None:
        scale = self._learner.lr_scale
        follows_run = self._total_steps > 0 and self._learner.goal_tokens > 0
        if scale == 1.0 and not follows_run:
            return
        self._own = [group["lr"] + 0.0 for group in self._groups]  # A tensor is set in place.
        rates = self._own
        if follows_run and isinstance(self._scheduler, LambdaLR):
            # Not step 0, whose rate is 0 in a warm-up: progress stays 0 until the first merge.
            step = max(1, int(self._learner.progress * self._total_steps))
            rules = zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            rates = [base * rule(step) for base, rule in rules]
        rates = [rate * scale for rate in rates]
        self._set(rates)
        if self._scheduler is not None:
            self._scheduler._last_lr = rates  # What frameworks log.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_step(self) -> None:
        self.steps += 1
        self._set(self._own)
        self._own = []

    def _set(self, rates: Sequence[Rate]) -> None:
        for group, rate in zip(self._groups, rates, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
