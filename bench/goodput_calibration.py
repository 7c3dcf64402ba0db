"""The stall model's costs, fitted to the two published rows of data parallel and to nothing else.

In each row: the least squares among the costs that are within 2 points in every column. The fit
uses closed forms, the tapes confirm them; the decoupled rows follow without another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import expm1
from typing import Final, TypeAlias

from narrows.bench.failure_tapes import Slices
from narrows.bench.goodput_published import (
    CHIP_FAILURE_S,
    CHIPS,
    DATA_PARALLEL_PERCENT,
    ELASTIC_PERCENT,
    TOLERANCE_POINTS,
)
from narrows.bench.stall_model import Costs

SLICE_CHIPS: Final = 256
"""Assumed; goodput depends on the product of slice size and repair time, which is fitted."""

REPAIRS_S: Final = range(0, 15_000, 300)
RECONFIGURATIONS_S: Final = [0.1 * i for i in range(50, 200)]
RESTARTS_S: Final = range(30, 91)
CHECKPOINTS_S: Final = range(10, 151, 10)
"""What is tried, seconds."""

Pair: TypeAlias = tuple[float, float]


def missing_share(repair_s: float) -> float:
    """Share of the slices that are out: one that is out cannot fail."""
    out_s = SLICE_CHIPS * repair_s
    return out_s / (CHIP_FAILURE_S + out_s)


def elastic_percent(chips: float, repair_s: float, reconfigure_s: float) -> float:
    """Goodput of an elastic job: each failure and each return stalls it, as renewals.

    Stalls that absorb what happens in them leave it 1 / (1 + rate x length) of its time.
    """
    missing = missing_share(repair_s)
    failures_per_s = chips * (1 - missing) / CHIP_FAILURE_S
    return 100 * (1 - missing) / (1 + 2 * failures_per_s * reconfigure_s)


def data_parallel_percent(
    chips: float, repair_s: float, restart_s: float, checkpoint_s: float
) -> float:
    """Goodput of a job that restarts: the work since the last checkpoint is done again."""
    failures_per_s = chips * (1 - missing_share(repair_s)) / CHIP_FAILURE_S
    again_s = 1 / failures_per_s - checkpoint_s / expm1(failures_per_s * checkpoint_s)
    return 100 / (1 + failures_per_s * (restart_s + again_s))


@cache
def elastic_fits() -> tuple[Pair, ...]:
    """(repair_s, reconfigure_s) within tolerance of the elastic row, the best first."""
    return _fits(elastic_percent, product(REPAIRS_S, RECONFIGURATIONS_S), ELASTIC_PERCENT)


@cache
def data_parallel_fits() -> tuple[Pair, ...]:
    """(restart_s, checkpoint_s) within tolerance of the other row, the best first."""
    repair_s = elastic_fits()[0][0]

    def percent(chips: float, restart_s: float, checkpoint_s: float) -> float:
        return data_parallel_percent(chips, repair_s, restart_s, checkpoint_s)

    return _fits(percent, product(RESTARTS_S, CHECKPOINTS_S), DATA_PARALLEL_PERCENT)


def _fits(
    percent: Callable[[float, float, float], float],
    pairs: product[tuple[float, float]],
    row: Sequence[float],
) -> tuple[Pair, ...]:
    def errors(pair: Pair) -> list[float]:
        return [percent(chips, *pair) - each for chips, each in zip(CHIPS, row, strict=True)]

    tried = [(errors(pair), pair) for pair in pairs]
    near = [(each, pair) for each, pair in tried if max(map(abs, each)) <= TOLERANCE_POINTS]
    return tuple(pair for _, pair in sorted(near, key=lambda fit: sum(e * e for e in fit[0])))


def calibrated() -> Costs:
    """The best fit of both rows."""
    (repair_s, reconfigure_s), (restart_s, checkpoint_s) = (
        elastic_fits()[0],
        data_parallel_fits()[0],
    )
    return Costs(Slices(SLICE_CHIPS, repair_s), restart_s, checkpoint_s, reconfigure_s)


def fit_range_percent(learners: int, chips: int) -> tuple[float, float]:
    """Smallest and largest goodput of a decoupled run under any fit within tolerance.

    A learner is an elastic job with its share of the chips.
    """
    each = [elastic_percent(chips / learners, *pair) for pair in elastic_fits()]
    return min(each), max(each)
