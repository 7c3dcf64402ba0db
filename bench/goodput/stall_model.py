"""The stall model: from a failure tape to the times at which a job trains, and its share of chips.

Goodput is the share of the allocated chip time that is spent on useful training. Uptime is the
share of time in which the system as a whole makes steps: at least one learner does (Decoupled
DiLoCo, arXiv 2604.21428, Sec. 2). The loss of a failure:

- data parallel: everything stops, restarts from the newest checkpoint on spare chips, and repeats
  the work since that checkpoint;
- elastic data parallel: everything stops while the job leaves the slice out, and stops once more
  to take in slices that are back, those of some minutes together; in between the slice is missing;
- decoupled: the same as elastic, but only for the learner that the slice belongs to. So the goodput
  of M learners on N chips is that of one elastic job on N/M chips.

A stall absorbs the failures that happen in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from narrows.bench.goodput.tapes import Slices, Tape
from narrows.proto.codec import F64

NEVER: Final[F64] = np.empty((0, 2))
"""An empty list of spans."""


@dataclass(frozen=True)
class Costs:
    """Costs of a failure; times in seconds."""

    slices: Slices
    restart_s: float
    """Data parallel: from a failure to the first step after it."""
    checkpoint_s: float
    """Data parallel: a checkpoint is written after each restart and so often."""
    reconfigure_s: float
    """Elastic: how long a job stops while a slice leaves, and while some are taken in."""


@dataclass(frozen=True)
class Course:
    """Course of a job: segment i begins at `times_s[i]`, the last one ends at `span_s`.

    `up` (n,) is 1 where the job trains and 0 where it is stalled, `share` (n,) its present chips.
    """

    span_s: float
    times_s: F64
    up: F64
    share: F64

    def up_s(self, until_s: F64) -> F64:
        """Seconds trained from 0 to each time."""
        return self._integral(self.up, until_s)

    def useful_s(self, until_s: F64) -> F64:
        """The same, weighted by the share of the chips that took part."""
        return self._integral(self.up * self.share, until_s)

    def is_up(self, at_s: F64) -> F64:
        """1 or 0 at each time from 0 on."""
        return self.up[np.searchsorted(self.times_s, at_s, side="right") - 1]

    def _integral(self, rate: F64, until_s: F64) -> F64:
        edges = np.append(self.times_s, self.span_s)
        sums = np.concatenate(([0.0], np.cumsum(rate * np.diff(edges))))
        return np.interp(until_s, edges, sums)


def course(tape: Tape, stalls_s: F64) -> Course:
    """The course of a job with these stalls (n, 2), seconds. Stalls may overlap. The share is that
    of the slices that are not out."""
    return _course(tape.span_s, stalls_s, _spans(tape.failed_s, tape.back_s), tape.slices)


def full_course(span_s: float, stalls_s: F64) -> Course:
    """The same for a job that has all of its chips whenever it trains."""
    return _course(span_s, stalls_s, NEVER, 1)


def data_parallel(tape: Tape, costs: Costs) -> Course:
    """All chips in one job that needs each of them."""

    def length_s(up_s: float) -> float:
        return costs.restart_s + up_s % costs.checkpoint_s

    return full_course(tape.span_s, absorbed(tape.failed_s, length_s))


def elastic(tape: Tape, costs: Costs) -> Course:
    """One job, or one learner, that trains on without a slice."""
    gathered = tape.gathered(costs.slices.gather_s)
    changes_s = np.sort(np.concatenate((gathered.failed_s, gathered.back_s)))
    return course(gathered, absorbed(changes_s, lambda up_s: costs.reconfigure_s))


def absorbed(causes_s: F64, length_s: Callable[[float], float]) -> F64:
    """Stalls (n, 2) that causes at these times, in order, bring about.

    `length_s` gives the length of a stall, from the time trained since the stall before it.
    """
    stalls_s: list[tuple[float, float]] = []
    resumed_s = float(causes_s[0]) if causes_s.size else 0.0
    for cause_s in causes_s.tolist():
        if cause_s >= resumed_s:
            end_s = cause_s + length_s(cause_s - resumed_s)
            stalls_s.append((cause_s, end_s))
            resumed_s = end_s
    return np.array(stalls_s).reshape(-1, 2)


def _spans(start_s: F64, end_s: F64) -> F64:
    return np.stack((start_s, end_s), axis=1)


def _course(span_s: float, stalls_s: F64, outages_s: F64, slices: int) -> Course:
    edges_s = np.concatenate(([0.0], stalls_s.ravel(), outages_s.ravel()))
    times_s = np.unique(edges_s[(edges_s >= 0) & (edges_s < span_s)])
    up = _covering(times_s, stalls_s) == 0
    share = 1.0 - _covering(times_s, outages_s) / slices
    return Course(span_s, times_s, up.astype(np.float64), share)


def _covering(at_s: F64, spans_s: F64) -> F64:
    """Number of `spans_s` (n, 2) that hold each time."""
    begun = np.searchsorted(np.sort(spans_s[:, 0]), at_s, side="right")
    ended = np.searchsorted(np.sort(spans_s[:, 1]), at_s, side="right")
    return (begun - ended).astype(np.float64)


def goodput(courses: Sequence[Course], edges_s: F64) -> F64:
    """Useful share of the chip time between each two edges, for equal learners."""
    useful_s = np.sum([np.diff(each.useful_s(edges_s)) for each in courses], axis=0)
    shares: F64 = useful_s / (len(courses) * np.diff(edges_s))
    return shares


def uptime(courses: Sequence[Course], edges_s: F64) -> F64:
    """Share of the time between each two edges in which at least one learner trained."""
    times_s = np.unique(np.concatenate([each.times_s for each in courses]))
    up = np.max([each.is_up(times_s) for each in courses], axis=0)
    together = Course(courses[0].span_s, times_s, up, np.ones_like(up))
    shares: F64 = np.diff(together.up_s(edges_s)) / np.diff(edges_s)
    return shares
