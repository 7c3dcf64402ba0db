"""Paired statistics: how much worse one setting is than another, with a confidence interval.

Runs with the same seed share first parameters, order of the text and evaluation windows. The common
part cancels in the difference of each pair, so a few seeds are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

STUDENT_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles for 1 to 30 degrees of freedom; beyond, the last is too large by 4% at most."""


@dataclass(frozen=True)
class Paired:
    """Excess of losses over those of a reference, in percent of the reference."""

    mean_percent: float
    low_percent: float | None
    """95% interval of the mean; None for one pair, which does not show the spread."""
    high_percent: float | None
    n: int
    """Number of pairs."""

    def __str__(self) -> str:
        if self.low_percent is None:
            return f"{self.mean_percent:+.2f}%"
        return f"{self.mean_percent:+.2f}% [{self.low_percent:+.2f}, {self.high_percent:+.2f}]"


def paired(losses: Sequence[float], reference_losses: Sequence[float]) -> Paired:
    """Excess by pairs; both sequences in the same order of seeds. The interval is Student's t,
    which needs roughly normal differences. Raises ValueError for different lengths."""
    excess = [100 * (a / b - 1) for a, b in zip(losses, reference_losses, strict=True)]
    n, mean = len(excess), fmean(excess)
    if n == 1:
        return Paired(mean, None, None, n)
    half = half_interval(excess)
    return Paired(mean, mean - half, mean + half, n)


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of two or more values, Student's t."""
    quantile = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1]
    return quantile * stdev(values) / sqrt(len(values))
