"""The part of the integrations that needs no framework: learning rates on the run's clock."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from narrows.integrations.membership import Membership, positions_of
from narrows.integrations.rates import RunRate
from narrows.learner import LocalProtocolError

TOTAL = 100.0


class Noting(torch.optim.Optimizer):
    """Notes the rates with which its steps are made. Not an SGD: once a process has made a plain
    SGD, torch runs the hooks of a step in its `step` as well, so they would run twice."""

    def __init__(self, lr: float | Tensor) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], {"lr": lr})
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(float(self.param_groups[0]["lr"]))


def learner(**state: Any) -> Any:
    return SimpleNamespace(**{"lr_scale": 1.0, "goal_tokens": 1000, "progress": 0.0, **state})


def counts_down(optimizer: Noting) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 - step / TOTAL)


@pytest.mark.parametrize("lr", [2.0, torch.tensor(2.0)], ids=["float", "tensor"])
def test_a_schedule_that_knows_every_step_is_read_at_the_runs_progress(lr: float | Tensor) -> None:
    optimizer = Noting(lr)
    scheduler = counts_down(optimizer)
    told = learner()
    rate = RunRate(told, optimizer, [scheduler], TOTAL)
    for told.progress, told.lr_scale in ((0.0, 1.0), (0.5, 1.0), (0.75, 0.5), (1.0, 1.0)):
        optimizer.step()
        assert float(scheduler.get_last_lr()[0]) == optimizer.rates[-1], "what is logged"
        scheduler.step()
    # Not 2.0 at first: in a warm-up step 0 has rate 0, and progress stays 0 until a first merge.
    assert optimizer.rates == pytest.approx([2.0 * 0.99, 1.0, 0.25, 0.0])
    assert rate.steps == 4
    rate.remove()
    optimizer.step()
    assert optimizer.rates[-1] == pytest.approx(2.0 * 0.96), "its own clock"
    if isinstance(lr, Tensor):
        assert optimizer.param_groups[0]["lr"] is lr, "a compiled step holds it"


@pytest.mark.parametrize(("goal_tokens", "total"), [(0, TOTAL), (1000, float("inf")), (1000, -1.0)])
def test_without_a_goal_or_an_end_a_schedule_keeps_its_own_clock(
    goal_tokens: int, total: float
) -> None:
    optimizer = Noting(2.0)
    scheduler = counts_down(optimizer)
    RunRate(learner(goal_tokens=goal_tokens, progress=0.5), optimizer, [scheduler], total)
    optimizer.step()
    scheduler.step()
    optimizer.step()
    assert optimizer.rates == pytest.approx([2.0, 2.0 * 0.99])


def test_a_schedule_that_goes_on_from_its_last_rate_does_not_see_a_newcomers_ramp() -> None:
    optimizer = Noting(2.0)
    other = Noting(2.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    told = learner(lr_scale=0.25)
    RunRate(told, optimizer, [scheduler, ExponentialLR(other, 0.5)], TOTAL)
    for told.lr_scale in (0.25, 0.5, 1.0):
        optimizer.step()
        assert scheduler.get_last_lr() == [optimizer.rates[-1]]
        scheduler.step()
    assert optimizer.rates == [0.5, 0.5, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_positions_are_counted_by_shape_and_anything_else_is_told() -> None:
    assert positions_of({"input_ids": torch.zeros(4, 32), "labels": torch.zeros(1)}) == 128
    for batch, got in (({"pixels": 1}, "pixels"), ([1], "list"), ({"input_ids": [1]}, "input_ids")):
        with pytest.raises(LocalProtocolError, match=rf"{got}.* tokens=lambda"):
            positions_of(batch)


def test_an_option_that_no_learner_has_is_told_before_training() -> None:
    with pytest.raises(TypeError, match="brokers"):
        Membership({"brokers": "tcp://127.0.0.1:1"})
