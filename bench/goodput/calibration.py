"""The stall model's four fitted costs, and the other fits that the published table allows.

Two costs come from the rows of elastic data parallelism and of M = 4, 8 and 16. Two come from the
row of data parallelism without elasticity. Each fit is least squares among the costs that are near
enough to every cell of their rows. M = 2 is left out, so that its row is a prediction. The fits use
closed forms; the tapes confirm them. The structure (which failure stalls whom) was chosen with the
whole table in view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from math import expm1
from typing import Final, NamedTuple, TypeAlias

from narrows.bench.goodput.published import (
    CHIP_FAILURE_S,
    CHIPS,
    DATA_PARALLEL_PERCENT,
    DECOUPLED_PERCENT,
    ELASTIC_PERCENT,
    PREDICTED,
)
from narrows.bench.goodput.stall_model import Costs
from narrows.bench.goodput.tapes import Slices

SLICE_CHIPS: Final = 256
"""Assumed; goodput depends on the product of slice size and time out."""

REPAIR_S: Final = 300.0
"""Assumed: five minutes. The table says no more than that it is short: 0 to 600 s fit as well."""

ALONE_POINTS: Final = 2.0
"""Largest distance of a fit from any cell of the two rows of data parallelism."""

DECOUPLED_POINTS: Final = 3.0
"""The same for the decoupled rows. The table itself has 58 and 54% for equal chips per learner."""

GATHERS_S: Final = range(20, 601, 10)
RECONFIGURATIONS_S: Final = [0.1 * i for i in range(50, 200)]
RESTARTS_S: Final = range(30, 91)
CHECKPOINTS_S: Final = range(10, 151, 10)
"""Checkpoint intervals that are tried, seconds."""

FITTED_CONSTANTS: Final = {
    "slices.gather_s": "elastic rows: M = 1, 4, 8, 16",
    "reconfigure_s": "elastic rows: M = 1, 4, 8, 16",
    "restart_s": "data parallel",
    "checkpoint_s": "data parallel",
}
"""Fitted constants, by the rows that they are fitted to. The model's other constants are published
or assumed."""

Pair: TypeAlias = tuple[float, float]


class Target(NamedTuple):
    """One published cell, and the largest distance of a fit from it."""

    chips: float
    """Chips of one job or learner."""
    percent: float
    tolerance_points: float


def missing_share(out_s: float) -> float:
    """Share of the slices that are out, each for `out_s` seconds. A slice that is out cannot
    fail."""
    return SLICE_CHIPS * out_s / (CHIP_FAILURE_S + SLICE_CHIPS * out_s)


def elastic_percent(chips: float, gather_s: float, reconfigure_s: float) -> float:
    """Goodput of an elastic job. It stalls at each failure, and each time that it takes slices in.

    The first slice that is back waits `gather_s`; those that follow meanwhile wait half of it on
    average. A stall absorbs the failures in it. The times to take slices in are further apart than
    a stall is long. A stall of a failure absorbs those that fall into it.
    """
    first_per_s = chips / CHIP_FAILURE_S
    followers = first_per_s * gather_s
    wait_s = gather_s * (1 + followers / 2) / (1 + followers)
    present = 1 - missing_share(REPAIR_S + wait_s)
    failures_per_s = first_per_s * present
    taking_in = failures_per_s / (1 + followers) * reconfigure_s
    return 100 * present / (1 / (1 - taking_in) + failures_per_s * reconfigure_s)


def data_parallel_percent(chips: float, restart_s: float, checkpoint_s: float) -> float:
    """Goodput of a job that restarts: the work since the last checkpoint is done again."""
    failures_per_s = chips * (1 - missing_share(REPAIR_S)) / CHIP_FAILURE_S
    again_s = 1 / failures_per_s - checkpoint_s / expm1(failures_per_s * checkpoint_s)
    return 100 / (1 + failures_per_s * (restart_s + again_s))


@cache
def elastic_fits() -> tuple[Pair, ...]:
    """(gather_s, reconfigure_s) near enough to all elastic cells but M = 2, the best first."""
    targets = _targets(ELASTIC_PERCENT, 1, ALONE_POINTS)
    for learners, row in DECOUPLED_PERCENT.items():
        if learners != PREDICTED:
            targets += _targets(row, learners, DECOUPLED_POINTS)
    return _fits(elastic_percent, product(GATHERS_S, RECONFIGURATIONS_S), targets)


@cache
def data_parallel_fits() -> tuple[Pair, ...]:
    """(restart_s, checkpoint_s) near enough to the row without elasticity, the best first."""
    targets = _targets(DATA_PARALLEL_PERCENT, 1, ALONE_POINTS)
    return _fits(data_parallel_percent, product(RESTARTS_S, CHECKPOINTS_S), targets)


def _targets(row: Sequence[int], learners: int, points: float) -> list[Target]:
    return [
        Target(chips / learners, percent, points) for chips, percent in zip(CHIPS, row, strict=True)
    ]


def _fits(
    percent: Callable[[float, float, float], float],
    pairs: Iterable[Pair],
    targets: Sequence[Target],
) -> tuple[Pair, ...]:
    near: list[tuple[float, Pair]] = []
    for pair in pairs:
        errors = [(percent(each.chips, *pair) - each.percent, each) for each in targets]
        if all(abs(error) <= each.tolerance_points for error, each in errors):
            near.append((sum(error * error for error, _ in errors), pair))
    return tuple(pair for _, pair in sorted(near))


def calibrated() -> Costs:
    """The best fits."""
    (gather_s, reconfigure_s), (restart_s, checkpoint_s) = (
        elastic_fits()[0],
        data_parallel_fits()[0],
    )
    slices = Slices(SLICE_CHIPS, REPAIR_S, gather_s)
    return Costs(slices, restart_s, checkpoint_s, reconfigure_s)


def fit_range_percent(learners: int, chips: int) -> tuple[float, float]:
    """Smallest and largest goodput of a decoupled run under any fit that is near enough.

    A learner is an elastic job with its share of the chips.
    """
    each = [elastic_percent(chips / learners, *pair) for pair in elastic_fits()]
    return min(each), max(each)
