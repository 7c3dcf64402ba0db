"""`narrows bench goodput`: the useful share of a large cluster's time when its chips fail.

Every line of the rows file is one cell. A bench that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from rich.console import Console

from narrows.bench.goodput.calibration import FITTED_CONSTANTS, calibrated
from narrows.bench.goodput.cells import DAY_S, DAYS, HEADLINE, GoodputCell, sweeps, table
from narrows.bench.goodput.machines import PlannedRun
from narrows.bench.goodput.published import CHIPS, LEARNERS, PREDICTED, SCAVENGING_TIMES
from narrows.bench.goodput.run import courses_of, plans_of, run_cell
from narrows.bench.goodput.stall_model import Course
from narrows.bench.kit import machine
from narrows.bench.kit.runner import Row, run_missing
from narrows.broker.cli.tables import Table, show, terminal

SEED: Final = 1
PICTURE_S: Final = 1800.0
FULL_DAYS: Final = 10
SHORT_S: Final = 20_000.0


def run_goodput_bench(
    rows_file: Path,
    json_file: Path | None,
    plot: Path | None,
    *,
    full: bool,
    short: bool,
    workers: int,
) -> None:
    """Runs the missing cells, prints the tables, and writes the requested files.

    `short`: tapes of SHORT_S and no sweep. `workers` 0: one per core.
    """
    console = terminal()
    days = FULL_DAYS if full else DAYS
    cells = table(SHORT_S) if short else table(DAY_S * days) + sweeps()
    rows = run_cells(cells, rows_file, workers=workers or os.cpu_count() or 1, console=console)
    set_relative_times(rows)
    results = [row for row in rows if row["method"] != "sweep"]
    show(console, percent_table("goodput, % (published)", results, "goodput_percent", ""))
    show(console, percent_table("uptime, %", results, "uptime_percent", "uptime_"))
    distances = agreement(results)
    show(console, agreement_table(distances))
    for sweep in dict.fromkeys(row["sweep"] for row in rows if row["sweep"]):
        show(console, sweep_table(sweep, [row for row in rows if row["sweep"] == sweep]))
    result = {"seed": SEED, "costs": asdict(calibrated()), "fitted_constants": FITTED_CONSTANTS}
    machine.write_result(json_file, "goodput", result | {"agreement": distances, "rows": rows})
    if plot is not None:
        from narrows.bench.kit.plots import goodput_by_chips, time_lines

        goodput_by_chips(results, plot)
        time_lines(half_an_hour(), plot.with_stem(f"{plot.stem}-time-lines"))


def run_cells(
    cells: Sequence[GoodputCell], path: Path, *, workers: int, console: Console
) -> list[Row]:
    """The rows of the cells; runs those that `path` does not have."""
    head = {"seed": SEED, "costs": asdict(calibrated())}
    keyed = {_key(head | asdict(cell)): cell for cell in cells}

    def say(row: Row) -> str:
        name = row["name"] or f"M = {row['learners']}, {row['chips']:,} chips"
        return f"{row['sweep'] or row['method']}: {name}: {row['goodput_percent']:.1f}%"

    def cost(key: str) -> float:
        cell = keyed[key]
        by_model = cell.method in ("data_parallel", "elastic")
        return 3e3 if by_model else (cell.learners + cell.added / 2) * cell.span_s / cell.step_s

    rows = run_missing(
        {key: (cell, SEED) for key, cell in keyed.items()}, run_cell, path,
        key_of=_key, say=say, workers=workers, console=console, cost_of=cost,
    )  # fmt: skip
    return [rows[key] for key in keyed]


def _key(row: Mapping[str, Any]) -> str:
    """The key of a cell: everything that makes it another cell, and the costs that it was run
    with."""
    names = ["seed", "costs", *GoodputCell.__dataclass_fields__]
    return json.dumps({name: row[name] for name in names}, sort_keys=True)


def set_relative_times(rows: Sequence[Row]) -> None:
    """Sets `relative_time` of the scavenging rows: time to the goal, relative to no added
    learner."""
    mine = [row for row in rows if row["sweep"] == "scavenging"]
    for row in mine:
        (alone,) = (each for each in mine if each["added"] == 0)
        row["relative_time"] = row["goal_s"] / alone["goal_s"]
        row["published_relative_time"] = SCAVENGING_TIMES[25 * row["added"]]


def agreement(rows: Sequence[Row]) -> list[Row]:
    """Distance of these rows from the published cells, in points, by the cells that were fitted."""
    groups: dict[str, tuple[str, Sequence[int]]] = {
        "data parallel, fitted": ("data_parallel", [1]),
        "elastic, fitted": ("elastic", [1]),
        "decoupled, fitted": ("decoupled", [m for m in LEARNERS if m != PREDICTED]),
        f"decoupled, M = {PREDICTED}, predicted": ("decoupled", [PREDICTED]),
        "decoupled, all": ("decoupled", LEARNERS),
    }
    distances: list[Row] = []
    for name, (method, learners) in groups.items():
        points = [
            abs(row["goodput_percent"] - row["published_percent"])
            for row in rows
            if row["method"] == method and row["learners"] in learners
        ]
        if points:
            mean, worst = fmean(points), max(points)
            distances.append(
                {"cells_of": name, "cells": len(points), "mean_points": mean, "worst_points": worst}
            )
    return distances


def agreement_table(groups: Sequence[Row]) -> Table:
    """A table of `agreement`."""
    shown = Table(("", "cells", "mean", "worst"), title="distance from the published cells, points")
    for each in groups:
        distances = (f"{each[name]:.1f}" for name in ("mean_points", "worst_points"))
        shown.add(each["cells_of"], str(each["cells"]), *distances)
    return shown


def percent_table(title: str, rows: Sequence[Row], key: str, prefix: str) -> Table:
    """A table of methods by chips, with half of the interval."""
    shown = Table(("method", *(f"{chips // 1000}k" for chips in CHIPS)), title=title)
    for method, learners in dict.fromkeys((row["method"], row["learners"]) for row in rows):
        of = {r["chips"]: r for r in rows if (r["method"], r["learners"]) == (method, learners)}
        entries = [_entry(of[chips], key, prefix) for chips in CHIPS if chips in of]
        name = f"M = {learners}" if method == "decoupled" else method.replace("_", " ")
        shown.add(name, *entries)
    return shown


def _entry(row: Row, key: str, prefix: str) -> str:
    half = row[key] - row[f"{prefix}ci_low_percent"]
    published = row["published_percent"] if key == "goodput_percent" else None
    return f"{row[key]:.1f} ±{half:.1f}" + (f" ({published:.0f})" if published else "")


def sweep_table(sweep: str, rows: Sequence[Row]) -> Table:
    """A table of the fields that all variants have, and of those that only this sweep measures."""
    own = [
        name
        for name in ("fast_contribute_percent", "slow_contribute_percent", "relative_time")
        if name in rows[0]
    ]
    names = ("goodput_percent", "uptime_percent", "merged_percent", "contributors_mean", *own)
    headings = ("variant", *(name.replace("_", " ") for name in names))
    shown = Table(headings, title=f"sweep: {sweep}")
    for row in rows:
        shown.add(row["name"], *(f"{row[name]:.2f}" for name in names))
    return shown


def half_an_hour() -> dict[str, list[tuple[float, float]]]:
    """Times in which each job trains on the headline's tape: the data-parallel jobs by the stall
    model, the learners as the state machines did."""
    cell = GoodputCell("decoupled", *HEADLINE, PICTURE_S)
    lines = {
        method.replace("_", " "): stretches(
            courses_of(replace(cell, method=method, learners=1), PICTURE_S, SEED)[0]
        )
        for method in ("data_parallel", "elastic")
    }
    run = PlannedRun(plans_of(cell, SEED), PICTURE_S, SEED, {})
    run.play()
    return lines | {name: stretches(run.measured_course(name)) for name in run.plans}


def stretches(course: Course) -> list[tuple[float, float]]:
    """Times at which a job begins and stops to train, seconds."""
    stops_s = np.append(course.times_s[1:], course.span_s)
    up = course.up > 0
    return list(zip(course.times_s[up].tolist(), stops_s[up].tolist(), strict=True))
