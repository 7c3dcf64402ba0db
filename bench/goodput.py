"""`narrows bench goodput`: the useful share of a large cluster's time when its chips fail.

Nothing here runs on accelerators. A tape says which slice of chips is out from when to when, and
all methods play the same tape. A stall model says what a failure costs. Data parallel restarts on
spare chips and repeats the work since its checkpoint. Elastic data parallel stops to leave a slice
out, and again to take slices in. A learner of a decoupled run is an elastic job on its own chips;
the real hosts of broker and learners play the beginning of its tape too, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.reference.worker import need_torch
from narrows.bench.sim.run import Plan, Simulation
from narrows.learner.session import Session

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
PUBLISHED_PERCENT: Final = {
    ("data parallel", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}
"""Decoupled DiLoCo (arXiv 2604.21428), Table 1, by method, learners and CHIPS."""
CHIP_FAILURE_S: Final = 365.25 * 86_400
"""Mean time between two interruptions of one chip, as published."""

# The stall model's seconds. The paper prints none of them: four are fitted by least squares to 25
# of its cells. The row of two learners was not used, so it is a prediction.
RESTART_S: Final = 52.0
"""Data parallel: from a failure to the first step after it. Fitted to its row."""
CHECKPOINT_S: Final = 70.0
"""Data parallel: between two checkpoints. Fitted to its row."""
RECONFIGURE_S: Final = 17.5
"""Elastic: a stall to leave a slice out, or to take some in. This and GATHER_S are fitted to the
rows of elastic, and of 4, 8 and 16 learners."""
GATHER_S: Final = 180.0
"""Elastic: how long the first slice that is back waits for others."""
REPAIR_S: Final = 300.0
"""Mean time until a slice is back; assumed. 0 to 600 s change no cell by more than a point."""
SLICE_CHIPS: Final = 256
"""Chips that leave and come back together; assumed."""

STEP_S: Final = 20.0
"""Seconds of the tape per inner step. The hosts play a step in one second, so their own delays
(beats, joining, the line) weigh 20 times as much as they would."""
STEP_TOKENS: Final = 1_000_000
LEAD_STEPS: Final = 100
"""Steps before the tape begins. By then all have joined, and as much is under way as later."""

COLUMNS: Final = (
    Column("method", "method"),
    Column("learners", "learners"),
    Column("chips", "chips", "{:,}"),
    Column("published %", "published_percent"),
    Column("stall model %", "model_percent", "{:.1f}"),
    Column("uptime %", "uptime_percent", "{:.2f}"),
    Column("hosts: steps %", "made_percent", "{:.1f}"),
    Column("merged %", "merged_percent", "{:.1f}"),
    Column("in a merge", "contributors_mean", "{:.2f}"),
)
"""Percent of the allocated chip time. Steps: whole steps that learners made. Merged: tokens that
durable rounds hold. Uptime: at least one learner trains."""


@dataclass(frozen=True)
class GoodputCell:
    """A cluster, and what runs on it."""

    method: str
    learners: int
    chips: int
    days: float
    """Length of the tape for the stall model."""
    steps: int
    """Steps that the hosts of a decoupled run play, from the beginning of the tape."""
    seed: int = 1


def goodput(*, short: Short = False, json: Json = None) -> None:
    """Measure the share of allocated chip time that is useful, beside the published table."""
    need_torch()
    days = 3.0 if short else 30.0
    steps = 300 if short else 2000
    columns = CHIPS[3:4] if short else CHIPS
    cells = [
        GoodputCell(method, learners, chips, days, steps)
        for method, learners in PUBLISHED_PERCENT
        for chips in columns
    ]
    bench("goodput", cells, measure, COLUMNS, headline, json=json, seed=1)


def measure(cell: GoodputCell) -> Row:
    """The stall model on the whole tape, and the hosts on its beginning."""
    span_s = cell.days * 86_400
    slices = round(cell.chips / SLICE_CHIPS)
    which, outages = failure_tape(slices, span_s, cell.seed)
    owner = which * cell.learners // slices
    parts = [outages[owner == index] for index in range(cell.learners)]

    if cell.method == "data parallel":
        courses = [data_parallel(part) for part in parts]
    else:
        courses = [elastic(part, slices / cell.learners) for part in parts]

    row: Row = {
        "published_percent": PUBLISHED_PERCENT[cell.method, cell.learners][CHIPS.index(cell.chips)],
        "model_percent": 100 * fmean(course.useful_s(span_s) for course in courses) / span_s,
        "uptime_percent": 100 * uptime(courses, span_s),
    }
    if cell.method == "decoupled":
        row |= played(courses, cell)
    return row


def headline(rows: Sequence[Row]) -> list[str]:
    """The distance of each method from the published cells, and the cells that the paper quotes."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        for key in ("model_percent", "merged_percent"):
            mine = [row for row in rows if row["method"] == method and key in row]
            told = [
                f"{row[key]:.1f}% (published {row['published_percent']})"
                for row in mine
                if row["chips"] == 1_200_000 and row["learners"] in (1, 8)
            ]
            off = [abs(row[key] - row["published_percent"]) for row in mine]
            if off:
                lines.append(
                    f"{method}, {key.partition('_')[0]}: {fmean(off):.1f} points off the published"
                    f" cells, worst {max(off):.1f}; at 1.2 M chips {', '.join(told)}"
                )
    return lines


# The tape, and the course of a job on it. Spans are arrays (n, 2): begin and end, in seconds.


def failure_tape(slices: int, span_s: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The slices that fail (n,), and the spans (n, 2) in which they are out, from before 0 on.

    Failures are Poisson. A slice that is out, or not taken in yet, cannot fail. A repair takes the
    longer of two exponential times. That is an exponentiated Weibull as in the paper, which does
    not publish the parameters; only the mean matters to goodput.
    """
    rng = np.random.default_rng([seed, slices])
    begin_s = -10 * REPAIR_S
    count = rng.poisson(slices * SLICE_CHIPS * (span_s - begin_s) / CHIP_FAILURE_S)
    which = rng.integers(slices, size=count)
    failed_s = np.sort(rng.uniform(begin_s, span_s, count))
    # The mean of the longer of two exponential times is 1.5 times the mean of one.
    back_s = failed_s + REPAIR_S / 1.5 * rng.exponential(size=(2, count)).max(axis=0)

    # Failures of a slice that is not there are dropped.
    present_s = np.full(slices, begin_s)
    counts = np.zeros(count, bool)
    for index, (each, at_s) in enumerate(zip(which.tolist(), failed_s.tolist(), strict=True)):
        if at_s >= present_s[each]:
            counts[index] = True
            present_s[each] = back_s[index] + GATHER_S
    return which[counts], np.stack((failed_s, back_s), axis=1)[counts]


def absorbed(causes_s: Sequence[float], lost_s: Callable[[float], float]) -> NDArray[Any]:
    """The stalls (n, 2) that causes at these times bring about, in order of time.

    A cause that falls into a stall makes no second one. `lost_s` gives the length of a stall from
    the time trained since the one before.
    """
    stalls = [(0.0, 0.0)]
    # The first cause always counts, also one before 0.
    resumed_s = next(iter(causes_s), 0.0)
    for cause_s in causes_s:
        if cause_s >= resumed_s:
            end_s = cause_s + lost_s(cause_s - resumed_s)
            stalls.append((cause_s, end_s))
            resumed_s = end_s
    return np.array(stalls)


class Course:
    """The times at which a job trains, and the share of its chips that take part.

    Edges cut the time into segments. In segment i, `up[i]` says whether the job trains, and
    `share[i]` is the share of its chips that take part.
    """

    def __init__(self, stalls: NDArray[Any], outages: NDArray[Any], slices: float) -> None:
        times = np.unique(np.concatenate((stalls.ravel(), outages.ravel())))
        self.edges_s = np.append(times, times[-1] + 1e9)
        self.up = self._covering(stalls) == 0
        self.share = 1 - self._covering(outages) / slices
        lasts_s = np.diff(self.edges_s)
        self._up_s = np.concatenate(([0.0], np.cumsum(self.up * lasts_s)))
        self._useful_s = np.concatenate(([0.0], np.cumsum(self.up * self.share * lasts_s)))

    def _covering(self, spans: NDArray[Any]) -> NDArray[Any]:
        """The number of spans that cover each segment: those that have begun and not ended."""
        begun, ended = (
            np.searchsorted(np.sort(times), self.edges_s[:-1], side="right") for times in spans.T
        )
        return begun - ended

    def useful_s(self, until_s: float) -> float:
        """Seconds from 0 on in which it trained, weighted by the chips that took part."""
        begin, end = np.interp([0.0, until_s], self.edges_s, self._useful_s)
        return float(end - begin)

    def step_s(self, begun_s: float) -> float:
        """Seconds that a step takes which begins at this time; after a stall it goes on."""
        trained_s = np.interp(begun_s, self.edges_s, self._up_s)
        return float(np.interp(trained_s + STEP_S, self._up_s, self.edges_s)) - begun_s

    def segment(self, at_s: Any) -> Any:
        """Indices into `up` and `share` at a time, or at an array of times."""
        index = np.searchsorted(self.edges_s, at_s, side="right") - 1
        return np.clip(index, 0, len(self.up) - 1)


def data_parallel(outages: NDArray[Any]) -> Course:
    """The course of one job on all chips, which needs each of them and has spare ones."""
    stalls = absorbed(outages[:, 0].tolist(), lambda up_s: RESTART_S + up_s % CHECKPOINT_S)
    return Course(stalls, np.zeros((1, 2)), 1)


def elastic(outages: NDArray[Any], slices: float) -> Course:
    """The course of one job that trains on without the slices that are out.

    The first slice that is back waits GATHER_S for others; the job takes them in together.
    """
    taken_in = outages.copy()
    due_s = -np.inf
    for index in np.argsort(outages[:, 1]).tolist():
        if outages[index, 1] > due_s:
            due_s = outages[index, 1] + GATHER_S
        taken_in[index, 1] = due_s
    stalls = absorbed(np.sort(taken_in.ravel()).tolist(), lambda _: RECONFIGURE_S)
    return Course(stalls, taken_in, slices)


def uptime(courses: Sequence[Course], span_s: float) -> float:
    """Share of the time in which at least one of the jobs trains."""
    times_s = np.unique(np.concatenate([each.edges_s for each in courses]))
    up = np.any([each.up[each.segment(times_s)] for each in courses], axis=0)
    return float(np.sum(np.diff(np.clip(times_s, 0.0, span_s)) * up[:-1])) / span_s


# The hosts on the tape.


class Job:
    """A learner whose steps follow its course; its parameters do not matter."""

    def __init__(self, course: Course) -> None:
        from torch import nn

        from narrows.learner.parameters import Parameters

        self.source = Parameters(nn.Linear(8, 8))
        self.layout = self.source.layout
        self.hand_over = None
        self.made_tokens = 0
        self._course = course
        self._begun_s = 0.0

    def step_s(self, now: float) -> float:
        self._begun_s = (now - LEAD_STEPS) * STEP_S
        return self._course.step_s(self._begun_s) / STEP_S

    def step(self, session: Session, now: float) -> int:
        share = float(self._course.share[self._course.segment(self._begun_s)])
        tokens = round(share * STEP_TOKENS)
        if now > LEAD_STEPS:
            self.made_tokens += tokens
        return tokens


def played(courses: Sequence[Course], cell: GoodputCell) -> Row:
    """Plays the tape's beginning with the hosts, at default settings.

    Percents are of the chip time of the steps that they play.
    """
    jobs = [Job(course) for course in courses]
    merged_tokens = list[float]()
    plan = Plan(
        cell.seed,
        {"run.learners_at_start": len(jobs)},
        steps_s=[1.0] * len(jobs),
        begin=lambda site: jobs[site.index],
    )
    plan.ends = LEAD_STEPS + cell.steps
    with TemporaryDirectory(prefix="narrows-bench-") as folder:
        run = Simulation(plan, Path(folder))
        for until_s in (LEAD_STEPS, plan.ends):
            run.until(until_s)
            assert run.host is not None, "a calm broker does not die"
            merged_tokens.append(run.host.syncer.state.clock.run_tokens)
        contributors = run.contributors_mean()
    at_begin, at_end = merged_tokens
    full = STEP_TOKENS * cell.steps * cell.learners
    return {
        "made_percent": 100 * sum(job.made_tokens for job in jobs) / full,
        "merged_percent": 100 * (at_end - at_begin) / full,
        "contributors_mean": contributors,
    }
