"""Exponentially smoothed mean and deviation of a measured time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Smoothed:
    """Mean and mean deviation as TCP estimates round trips (Jacobson 1988, gains 1/8 and 1/4).

    The first sample sets the mean and half of itself as deviation, so that the first prediction
    is generous.
    """

    mean: float = 0.0
    deviation: float = 0.0
    samples: int = 0

    def add(self, value: float) -> None:
        """Takes one measured time into mean and deviation, in seconds."""
        assert 0.0 <= value < math.inf, f"a measured time of {value} s"
        if self.samples == 0:
            self.mean, self.deviation = value, value / 2
        else:
            error = value - self.mean
            self.mean += error / 8
            self.deviation += (abs(error) - self.deviation) / 4
        self.samples += 1
        assert self.deviation >= 0.0, self

    def upper(self, deviations: float = 3.0) -> float:
        """The mean plus `deviations` mean deviations: a value that is rarely exceeded."""
        assert deviations >= 0.0, deviations
        return self.mean + deviations * self.deviation
