"""Counts the steps that an optimizer without its inner state needs to warm up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import SGD, Optimizer

RAMP_STEPS_MIN = 20
"""In a trial, full rate with empty moments gained nothing for 20 steps."""


def ramp_steps(optimizers: Sequence[Optimizer]) -> int:
    """Steps until the optimizers' empty moments mean something: 1/(1 - beta2), at least 20.

    This is the largest number over the optimizers, and 0 if each has its state, or, as plain SGD,
    keeps none.
    """
    return max((_ramp_steps(o) for o in optimizers if not o.state and _keeps_state(o)), default=0)


def _ramp_steps(optimizer: Optimizer) -> int:
    beta2s = [float(g["betas"][1]) for g in optimizer.param_groups if len(g.get("betas", ())) > 1]
    # 1 / (1 - 0.999) is a little more than 1000 in floating point.
    horizons = [math.ceil(1 / (1 - beta2) - 1e-6) for beta2 in beta2s if beta2 < 1]
    return max([RAMP_STEPS_MIN, *horizons])


def _keeps_state(optimizer: Optimizer) -> bool:
    return not isinstance(optimizer, SGD) or any(g["momentum"] for g in optimizer.param_groups)
