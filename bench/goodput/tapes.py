"""Failure tapes: the times at which each slice of a cluster is out.

One tape per number of chips is played to every method, whole or in parts. So methods differ only by
their reaction to the same failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from narrows.bench.goodput.published import CHIP_FAILURE_S
from narrows.proto.codec import F64

WARM_UP_REPAIRS: Final = 10
"""A tape starts this many mean repairs before 0, so that slices are out from the beginning on."""


@dataclass(frozen=True)
class Slices:
    """The unit that fails: a group of chips that leave and come back together."""

    chips: int
    repair_s: float
    """Mean time until a slice is back."""
    gather_s: float
    """Seconds that a job waits, once a slice is back, to take in other slices together with it."""

    def count(self, chips: int) -> int:
        """Number of slices of a cluster."""
        return max(1, round(chips / self.chips))

    def draw_repairs(self, rng: np.random.Generator, count: int) -> F64:
        """Durations in seconds, exponentiated Weibull with shape 1 and exponent 2: the longer of
        two exponential times. The paper names the family and no parameters. Only the mean matters
        to goodput, because slices are repaired independently of each other."""
        longer: F64 = self.repair_s / 1.5 * rng.exponential(size=(2, count)).max(axis=0)
        return longer


@dataclass(frozen=True)
class Tape:
    """Outages (n,) in the order of their beginnings, seconds; times before 0 are the past."""

    span_s: float
    slices: int
    slice_: npt.NDArray[np.int64]
    failed_s: F64
    back_s: F64

    def part(self, index: int, of: int) -> Tape:
        """The outages of the `index`-th of `of` equal learners."""
        first, stop = self.slices * index // of, self.slices * (index + 1) // of
        mine = (self.slice_ >= first) & (self.slice_ < stop)
        kept = self.slice_[mine] - first, self.failed_s[mine], self.back_s[mine]
        return Tape(self.span_s, stop - first, *kept)

    def gathered(self, gather_s: float) -> Tape:
        """The same tape with slices out until they are taken in: the first that is back waits
        `gather_s`; all that come back meanwhile are taken in together with it."""
        taken_in_s, due_s = self.back_s.copy(), -math.inf
        for i in np.argsort(self.back_s).tolist():
            if self.back_s[i] > due_s:
                due_s = float(self.back_s[i]) + gather_s
            taken_in_s[i] = due_s
        return replace(self, back_s=taken_in_s)


def failure_tape(chips: int, span_s: float, seed: int, slices: Slices) -> Tape:
    """Poisson failures, one per chip and `CHIP_FAILURE_S`. A slice that is out, or not yet taken
    in, cannot fail."""
    rng = np.random.default_rng([seed, chips])
    count, start_s = slices.count(chips), -WARM_UP_REPAIRS * slices.repair_s
    failures = rng.poisson(chips * (span_s - start_s) / CHIP_FAILURE_S)
    failed_s = np.sort(rng.uniform(start_s, span_s, failures))
    slice_ = rng.integers(count, size=failures)
    back_s = failed_s + slices.draw_repairs(rng, failures)
    present_s = np.full(count, start_s)
    counts = np.zeros(failures, bool)
    for i in range(failures):
        if failed_s[i] >= present_s[slice_[i]]:
            present_s[slice_[i]] = back_s[i] + slices.gather_s
            counts[i] = True
    return Tape(span_s, count, slice_[counts], failed_s[counts], back_s[counts])
