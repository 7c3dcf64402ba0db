"""A summary of all runs of a rows file: `narrows bench quality --collected`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

from narrows.bench.kit.rows import read_rows
from narrows.bench.quality.catalogue import ModelShape, shape_of
from narrows.bench.quality.report import Row, reported
from narrows.bench.quality.run import QualityCell
from narrows.learner.reference.gpt import preset

Values: TypeAlias = tuple[object, ...]

SHAPE: Final = ModelShape._fields
LABELS: Final = ("group", "name", *SHAPE, "config_digest")
NEEDED: Final = {*QualityCell.__dataclass_fields__, "seed", "validation_loss", "test_loss"}
"""Names in a row of this bench. Rows of other benches in the same file lack some of them."""


def collected(path: Path) -> list[Row]:
    """A row per cell of the file, in the file's order, beside data parallel at equal tokens.

    Cells differ by their labels and by the defaults of their time, as far as a run has recorded
    them; older runs had the defaults of their `commit`. Runs whose seed data parallel lacks are
    left out.
    """
    runs = [{"config_digest": ""} | run for run in read_rows(path) if NEEDED <= run.keys()]
    twins = _by(SHAPE, (run for run in runs if run["data_parallel"]))
    best = {shape: best_rate(each) for shape, each in twins.items()}
    rows: list[Row] = []
    for each in _by(LABELS, runs).values():
        cell = QualityCell(**{name: each[0][name] for name in QualityCell.__dataclass_fields__})
        measure = best.get(shape_of(cell), {})
        paired = {run["seed"]: run for run in each if run["seed"] in measure}
        if paired:
            rows.append(reported(cell, list(paired.values()), [measure[seed] for seed in paired]))
    return rows


def best_rate(runs: Iterable[Row]) -> dict[int, Row]:
    """Data parallel by seed, at the learning rate with the lowest mean validation loss.

    Only rates with the most seeds count: a rate with fewer was dropped after one look.
    """

    def loss(rate: dict[int, Row]) -> tuple[int, float]:
        return -len(rate), fmean(run["validation_loss"] for run in rate.values())

    runs = [run | {"rate": run["peak_learning_rate"] or _preset_rate(run)} for run in runs]
    rates = ({run["seed"]: run for run in each} for each in _by(("rate",), runs).values())
    return min(rates, key=loss)


def _preset_rate(run: Row) -> float:
    return preset(run["model"]).peak_learning_rate


def _by(names: Sequence[str], runs: Iterable[Row]) -> dict[Values, list[Row]]:
    """The runs by the values of these names, in order."""
    groups: dict[Values, list[Row]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in names), []).append(run)
    return groups
