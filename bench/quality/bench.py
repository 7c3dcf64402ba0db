"""`narrows bench quality`: the settings that come closest to data parallel at equal tokens.

Every line of the rows file is one run of one cell with one seed, written as soon as the run has
ended. A bench that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from rich.console import Console

from narrows.bench.kit import machine
from narrows.bench.kit.names import check_names
from narrows.bench.kit.runner import run_missing
from narrows.bench.quality import catalogue as quality_cells
from narrows.bench.quality.catalogue import CHOOSING_SEEDS, REPORTING_SEEDS, rates_of
from narrows.bench.quality.collected import collected
from narrows.bench.quality.report import Row, rate_row, rate_table, reported, table
from narrows.bench.quality.run import QualityCell, config_digest, run_cell
from narrows.broker.cli.tables import show, terminal
from narrows.broker.merging import warm_up
from narrows.proto.errors import ConfigError

Job: TypeAlias = tuple[QualityCell, int]
"""A cell and a seed."""

Runs: TypeAlias = dict[str, list[Row]]
"""The runs of each cell, by `cell_key`, in the order of the seeds."""


def run_quality_bench(
    rows_file: Path,
    json_file: Path | None,
    plot: Path | None,
    *,
    full: bool,
    short: bool,
    workers: int,
    groups: Sequence[str],
) -> None:
    """Runs the missing runs, prints a table per group, and writes the requested files.

    `short`: the shortest selection instead. `workers` 0: one per core. `groups` empty: all. Raises
    ConfigError for an unknown group.
    """
    console = terminal()
    catalogue = quality_cells.full() if full else quality_cells.small()
    cells = of_groups(quality_cells.short() if short else catalogue, groups)

    def run(cells: Iterable[QualityCell], seeds: Sequence[int]) -> Runs:
        distinct = {key_of(cell): cell for cell in cells}
        jobs = jobs_of(distinct.values(), seeds)
        rows = run_jobs(jobs, rows_file, workers=workers or os.cpu_count() or 1, console=console)
        return {key: rows[i :: len(distinct)] for i, key in enumerate(distinct)}

    choices = run((rate for cell in cells for rate in rates_of(cell)), CHOOSING_SEEDS)
    best = [best_rate(cell, choices) for cell in cells]
    runs = run([*best, *cells], REPORTING_SEEDS)

    def report(cell: QualityCell, reference: QualityCell) -> Row:
        return reported(cell, runs[key_of(cell)], runs[key_of(reference)])

    measures = {key_of(each): each for each in best}.values()
    rows = [report(each, each) for each in measures] + [*map(report, cells, best)]
    rates = [rate_row(each) for each in choices.values()]
    show(console, rate_table(rates))
    _show(console, rows)
    machine.write_result(json_file, "quality", {"rows": rows, "data_parallel_rates": rates})
    if plot is not None:
        _draw(plot, rows, [best[0], *of_groups(cells, [cells[0].group])], runs)


def report_collected(rows_file: Path, json_file: Path | None, plot: Path | None) -> None:
    """Prints and writes a summary of all runs in `rows_file`; runs nothing.

    Raises ConfigError if there are none.
    """
    from narrows.bench.kit.plots import loss_against_bits

    rows = collected(rows_file)
    if not rows:
        raise ConfigError(
            f"no cell of {rows_file} has data parallel of its shape and seeds beside it",
            remedy="give the file of runs with --rows",
        )
    _show(terminal(), rows)
    machine.write_result(json_file, "quality", {"rows": rows})
    if plot is not None:
        loss_against_bits(rows, plot)


def _show(console: Console, rows: Sequence[Row]) -> None:
    for group in dict.fromkeys(row["group"] for row in rows):
        show(console, table(group, [row for row in rows if row["group"] == group]))


def _draw(path: Path, rows: Sequence[Row], cells: Sequence[QualityCell], runs: Runs) -> None:
    """Draws all rows into `path`, and the curves of `cells` beside it."""
    from narrows.bench.kit.plots import loss_against_bits, loss_curves

    loss_against_bits(rows, path)
    curves = [run | {"name": cell.name} for cell in cells for run in runs[key_of(cell)]]
    loss_curves(curves, path.with_stem(f"{path.stem}-curves"))


def of_groups(cells: Sequence[QualityCell], groups: Sequence[str]) -> list[QualityCell]:
    """The cells of these groups, or of all groups. Raises ConfigError."""
    known = tuple(dict.fromkeys(cell.group for cell in cells))
    check_names("group in this selection", groups, known)
    return [cell for cell in cells if not groups or cell.group in groups]


def best_rate(cell: QualityCell, choices: Runs) -> QualityCell:
    """Data parallel at the rate whose mean validation loss is the lowest."""

    def loss(rate: QualityCell) -> float:
        return fmean(run["validation_loss"] for run in choices[key_of(rate)])

    best = min(rates_of(cell), key=loss)
    return replace(best, name=f"data parallel, {best.inner}, {best.peak_learning_rate:g}")


def run_jobs(jobs: Sequence[Job], path: Path, *, workers: int, console: Console) -> list[Row]:
    """Runs the jobs that `path` (one JSON row per line) does not have; returns the rows of all
    jobs.

    The machine's noise changes times, never losses.
    """

    def say(row: Row) -> str:
        cell, seed = keyed[_run_key(row)]
        return f"{cell.group}: {cell.name}, seed {seed}: {row['validation_loss']:.4f}"

    keyed: dict[str, Job] = {}
    for job in jobs:
        keyed.setdefault(_job_key(*job), job)
    warm_up()
    rows = run_missing(
        keyed, run_cell, path, key_of=_run_key, say=say, workers=workers, console=console
    )
    return [
        rows[_job_key(cell, seed)] | {"group": cell.group, "name": cell.name} for cell, seed in jobs
    ]


def _run_key(row: Mapping[str, Any]) -> str:
    return f"{row['seed']} {_cell_key(row)}"


def _job_key(cell: QualityCell, seed: int) -> str:
    return f"{seed} {key_of(cell)}"


def key_of(cell: QualityCell) -> str:
    """The key of a cell: everything about it but its labels. The settings count with the defaults
    of this version, so that a changed default makes new runs."""
    return _cell_key({**asdict(cell), "config_digest": config_digest(cell)})


def _cell_key(row: Mapping[str, Any]) -> str:
    # As JSON: there a tuple equals the list that it comes back as. A row of an older version may
    # lack a name.
    names = QualityCell.__dataclass_fields__.keys() - {"group", "name", "settings"}
    identity = {name: row.get(name) for name in names}
    return json.dumps(identity | {"config": row.get("config_digest", "")}, sort_keys=True)


def jobs_of(cells: Iterable[QualityCell], seeds: Iterable[int]) -> list[Job]:
    """Every cell with every seed, seed by seed, so that an early look sees all cells."""
    cells = list(cells)
    return [(cell, seed) for seed in seeds for cell in cells]
