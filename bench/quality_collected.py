"""What all runs of a rows file say together: `narrows bench quality --collected`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

from narrows.bench.quality_report import Row, reported
from narrows.bench.quality_run import Cell
from narrows.bench.rows import read_rows
from narrows.learner.gpt import preset

Shape: TypeAlias = tuple[object, ...]
"""What a run and its measure have in common."""

SHAPE: Final = ("model", "learners", "steps", "inner")
LABELS: Final = ("group", "name", *SHAPE)


def collected(path: Path) -> list[Row]:
    """A row per cell of the file, in the file's order, beside data parallel of the same shape.

    Cells are told apart by their labels: what is not in a cell's settings was as the defaults
    had it at the `commit` of its runs. Runs whose seed their measure lacks are left out.
    """
    runs = read_rows(path)
    twins = _by(SHAPE, (run for run in runs if run["data_parallel"]))
    best = {shape: best_rate(each) for shape, each in twins.items()}
    rows: list[Row] = []
    for labels, each in _by(LABELS, runs).items():
        measure = best.get(labels[-len(SHAPE) :], {})
        paired = {run["seed"]: run for run in each if run["seed"] in measure}
        if paired:
            cell = Cell(**{name: each[0][name] for name in Cell.__dataclass_fields__})
            rows.append(reported(cell, list(paired.values()), [measure[seed] for seed in paired]))
    return rows


def best_rate(runs: Iterable[Row]) -> dict[int, Row]:
    """Data parallel by seed, at the rate with the lowest mean validation loss among those that
    were run with the most seeds: where one seed was enough to drop a rate, there are no others."""

    def loss(rate: dict[int, Row]) -> tuple[int, float]:
        return -len(rate), fmean(run["validation_loss"] for run in rate.values())

    runs = [run | {"rate": run["peak_learning_rate"] or _preset_rate(run)} for run in runs]
    rates = ({run["seed"]: run for run in each} for each in _by(("rate",), runs).values())
    return min(rates, key=loss)


def _preset_rate(run: Row) -> float:
    return preset(run["model"]).peak_learning_rate


def _by(names: Sequence[str], runs: Iterable[Row]) -> dict[Shape, list[Row]]:
    """In order."""
    found: dict[Shape, list[Row]] = {}
    for run in runs:
        found.setdefault(tuple(run[name] for name in names), []).append(run)
    return found
