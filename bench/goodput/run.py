"""One cell of the goodput bench: its tape, the model or machines that play it, and the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

import numpy as np

from narrows.bench.goodput.calibration import calibrated, fit_range_percent
from narrows.bench.goodput.cells import MONTH_S, GoodputCell
from narrows.bench.goodput.machines import TOKENS_PER_STEP, MachinePlan, PlannedRun
from narrows.bench.goodput.published import published_percent
from narrows.bench.goodput.stall_model import (
    NEVER,
    Course,
    absorbed,
    data_parallel,
    elastic,
    full_course,
    goodput,
    uptime,
)
from narrows.bench.goodput.tapes import failure_tape
from narrows.bench.kit.runner import Row
from narrows.bench.kit.stats import half_interval
from narrows.proto.codec import F64

BLOCKS: Final = 10
"""Number of parts of a tape; their spread gives the interval of the mean. A part is longer than any
slice is out, so that parts hardly depend on each other."""

HOUR_S: Final = 3600.0


def run_cell(cell: GoodputCell, seed: int) -> Row:
    """Plays the cell; `goodput_percent` and `uptime_percent` have 95% intervals."""
    measure = _by_model if cell.method in ("data_parallel", "elastic") else _by_machines
    return {"seed": seed, **asdict(cell), "costs": asdict(calibrated()), **measure(cell, seed)}


def courses_of(cell: GoodputCell, span_s: float, seed: int) -> list[Course]:
    """The course of each learner on the cell's tape."""
    costs = calibrated()
    tape = failure_tape(cell.chips, span_s, seed, costs.slices)
    if cell.method == "data_parallel":
        return [data_parallel(tape, costs)]
    return [elastic(tape.part(i, cell.learners), costs) for i in range(cell.learners)]


def plans_of(cell: GoodputCell, seed: int) -> list[MachinePlan]:
    """One plan per learner; added learners come last."""
    if cell.restarts:
        return _restarting(cell, seed)
    if cell.chips:
        return [MachinePlan(course) for course in courses_of(cell, cell.span_s, seed)]
    free = full_course(cell.span_s, NEVER)
    pace = (1.0, cell.slow)
    begins_s = np.arange(0.0, cell.span_s, 2 * HOUR_S)
    absences_s = np.stack((begins_s, begins_s + HOUR_S), axis=1)
    plans = [MachinePlan(free, pace=pace[i % 2]) for i in range(cell.learners)]
    added = MachinePlan(free, absences_s, lent=True, ramp_steps=cell.ramp_steps)
    return [*plans, *([added] * cell.added)]


def _restarting(cell: GoodputCell, seed: int) -> list[MachinePlan]:
    """Plans of learners whose process dies at a failure. It comes back with all of its chips and
    without its memory: it joins and fetches the model."""
    costs = calibrated()
    tape = failure_tape(cell.chips, cell.span_s, seed, costs.slices)
    plans: list[MachinePlan] = []
    for index in range(cell.learners):
        stalls_s = absorbed(tape.part(index, cell.learners).failed_s, lambda up: costs.restart_s)
        absences_s = stalls_s[stalls_s[:, 0] > 0]
        course = full_course(cell.span_s, absences_s)
        plans.append(MachinePlan(course, absences_s, ramp_steps=cell.ramp_steps))
    return plans


def _by_model(cell: GoodputCell, seed: int) -> Row:
    courses = courses_of(cell, cell.span_s, seed)
    return {
        "source": "stall model",
        **_measured(
            cell.span_s, lambda e: goodput(courses, e), lambda e: uptime(courses, e)
        ),
        "published_percent": published_percent().get(cell.place),
    }  # fmt: skip


def _by_machines(cell: GoodputCell, seed: int) -> Row:
    run = PlannedRun(plans_of(cell, seed), cell.span_s, seed, cell.settings, step_s=cell.step_s)
    run.play()
    row = {
        "source": "state machines",
        **_measured(cell.span_s, run.goodput, run.uptime),
        "merged_percent": 100 * run.merged_share(),
        "contributors_mean": fmean(len(commit.contributors) for commit in run.commits),
        "merges": len(run.commits),
        "longest_gap_s": run.longest_gap_s(),
    }
    if cell.method == "decoupled":
        row |= _beside(cell, seed)
    if cell.slow != 1:
        row |= _by_speed(run)
    if cell.sweep == "scavenging":
        row |= _goal_time(cell, run)
    return row


def _measured(
    span_s: float, goodput_of: Callable[[F64], F64], uptime_of: Callable[[F64], F64]
) -> Row:
    edges_s = np.linspace(0.0, span_s, BLOCKS + 1)
    row: dict[str, Any] = {}
    for name, prefix, shares in (
        ("goodput_percent", "", goodput_of(edges_s)),
        ("uptime_percent", "uptime_", uptime_of(edges_s)),
    ):
        percents = (100 * shares).tolist()
        mean, half = fmean(percents), half_interval(percents)
        row[name] = mean
        row[f"{prefix}ci_low_percent"] = mean - half
        # Drawn lengths of steps may together be a little shorter than usual.
        row[f"{prefix}ci_high_percent"] = min(mean + half, max(mean, 100.0))
    return row


def _beside(cell: GoodputCell, seed: int) -> Row:
    """The stall model alone: on the same tape, on a tape of a month, and under all other fits."""
    same = courses_of(cell, cell.span_s, seed)
    month = courses_of(cell, MONTH_S, seed)
    low, high = fit_range_percent(cell.learners, cell.chips)
    of_month = _measured(MONTH_S, lambda e: goodput(month, e), lambda e: uptime(month, e))
    of_tape = _measured(cell.span_s, lambda e: goodput(same, e), lambda e: uptime(same, e))
    return {
        "published_percent": published_percent().get(cell.place),
        **{f"tape_model_{k}": of_tape[k] for k in ("goodput_percent", "uptime_percent")},
        **{f"month_model_{key}": value for key, value in of_month.items()},
        "fit_low_percent": low,
        "fit_high_percent": high,
    }


def _by_speed(run: PlannedRun) -> Row:
    """Percentage of the merges that have a learner's contribution, by the learner's pace."""
    counts = list(run.contributions().values())
    merges = len(run.commits)
    return {
        "fast_contribute_percent": 100 * fmean(counts[0::2]) / merges,
        "slow_contribute_percent": 100 * fmean(counts[1::2]) / merges,
    }


def _goal_time(cell: GoodputCell, run: PlannedRun) -> Row:
    """Time until as many tokens are merged as the permanent learners train in half of the tape."""
    goal = cell.learners * TOKENS_PER_STEP * cell.span_s / 2 / cell.step_s
    times_s, tokens = run.merged_tokens()
    return {"goal_s": float(np.interp(goal, np.cumsum(tokens), times_s))}
