"""Summaries of the runs of the quality bench: rows for files, tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final, TypeAlias

from narrows.bench.kit.stats import Paired, paired
from narrows.bench.quality.catalogue import DATA_PARALLEL, GROUPS, question
from narrows.bench.quality.run import QualityCell
from narrows.broker.cli.tables import Table

Row: TypeAlias = dict[str, Any]

KNOWN: Final = (*GROUPS, DATA_PARALLEL)


def reported(cell: QualityCell, runs: Sequence[Row], reference: Sequence[Row]) -> Row:
    """The runs of a cell on the test text beside those of its reference, in the same order of
    seeds."""
    losses = [run["test_loss"] for run in runs]
    reference_losses = [run["test_loss"] for run in reference]
    excess = paired(losses, reference_losses)

    def mean(name: str) -> float:
        return fmean(run[name] for run in runs)

    return {
        "cell": cell.name,
        "group": cell.group,
        "model": cell.model,
        "inner": cell.inner,
        "learners": cell.learners,
        "steps": cell.steps,
        "mode": "data_parallel" if cell.data_parallel else str(cell.config().run.mode),
        "up_bits_per_param": mean("up_bits_per_param"),
        "down_bits_per_param": mean("down_bits_per_param"),
        "loss": fmean(losses),
        "loss_data_parallel": fmean(reference_losses),
        "excess_percent": excess.mean_percent,
        "ci_low_percent": excess.low_percent,
        "ci_high_percent": excess.high_percent,
        "seeds": [run["seed"] for run in runs],
        "contributors_mean": mean("contributors_mean"),
        "virtual_s": mean("virtual_s"),
        "learner_steps": fmean(map(_steps_made, runs)),
    }


def _steps_made(row: Row) -> float:
    """Steps of a learner. In rows that lack them the goal counted what was trained."""
    return float(row["learner_steps"] if "learner_steps" in row else row["steps"])


def rate_row(runs: Sequence[Row]) -> Row:
    """The runs of data parallel at one learning rate, on the validation text."""
    names = ("model", "learners", "steps", "inner", "peak_learning_rate")
    return {
        **{name: runs[0][name] for name in names},
        "validation_loss": fmean(run["validation_loss"] for run in runs),
        "seeds": [run["seed"] for run in runs],
    }


def table(group: str, rows: Sequence[Row]) -> Table:
    """The rows of a group."""
    shown = Table(
        ("cell", "model", "learners", "bits up", "bits down", "test loss", "over data parallel",
         "learners per merge", "steps made"),
        keys=2,
        title=f"{group}: {question(group)}" if group in KNOWN else group,
    )  # fmt: skip
    for row in rows:
        if row["mode"] == "data_parallel":
            what_it_took = ("-", "-", "-")
        else:
            interval = row["ci_low_percent"], row["ci_high_percent"]
            excess = Paired(row["excess_percent"], *interval, len(row["seeds"]))
            contributors = f"{row['contributors_mean']:.2f}"
            what_it_took = (str(excess), contributors, f"{_steps_made(row):.0f}")
        shown.add(
            row["cell"], row["model"], str(row["learners"]), f"{row['up_bits_per_param']:.2f}",
            f"{row['down_bits_per_param']:.2f}", f"{row['loss']:.4f}", *what_it_took,
        )  # fmt: skip
    return shown


def rate_table(rows: Sequence[Row]) -> Table:
    """The `rate_row`s from which the reference was chosen."""
    shown = Table(
        ("model", "learners", "steps", "inner", "rate", "validation loss"),
        left=("inner",),
        title="data parallel: mean validation loss",
    )
    for row in rows:
        shown.add(
            row["model"], str(row["learners"]), str(row["steps"]), row["inner"],
            f"{row['peak_learning_rate']:g}", f"{row['validation_loss']:.4f}",
        )  # fmt: skip
    return shown
