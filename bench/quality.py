"""`narrows bench quality`: which settings come closest to data parallel at equal tokens.

Every row of the results file is one run of one cell with one seed, written as soon as it is
there: a bench that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from narrows.bench import machine
from narrows.bench.quality_run import Cell, run_cell
from narrows.broker.model import warm_up

Job: TypeAlias = tuple[Cell, int]
"""A cell and a seed."""

Row: TypeAlias = dict[str, Any]


def run_jobs(jobs: Sequence[Job], path: Path, *, workers: int, console: Console) -> list[Row]:
    """Runs what `path` (one JSON row per line) does not have yet; returns the rows of all jobs.

    Each worker is a process with one thread; the machine's noise changes times, never losses.
    """
    known = {_key(row): row for row in read_rows(path)}
    missing = [job for job in jobs if _job_key(*job) not in known]
    if missing:
        warm_up()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    path.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
        futures = {pool.submit(run_cell, *job): job for job in missing}
        for done, future in enumerate(as_completed(futures), 1):
            row = machine.describe() | future.result()
            known[_key(row)] = row
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            spent_s = time.monotonic() - started_s
            left_s = spent_s / done * (len(missing) - done)
            cell, seed = futures[future]
            console.print(
                f"{done}/{len(missing)}, {left_s / 60:.0f} min left: {cell.group}: {cell.name},"
                f" seed {seed}: {row['validation_loss']:.4f}",
                highlight=False,
            )
    return [known[_job_key(*job)] for job in jobs]


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _job_key(cell: Cell, seed: int) -> str:
    # Through JSON, so that tuples and the lists that they come back as are equal.
    return _key(json.loads(json.dumps({**asdict(cell), "seed": seed})))


def _key(row: Row) -> str:
    """What makes a run another run: everything about the cell but its labels."""
    names = [*Cell.__dataclass_fields__, "seed"]
    return json.dumps({n: row[n] for n in names if n not in ("group", "name")}, sort_keys=True)


def jobs_of(cells: Iterable[Cell], seeds: Iterable[int]) -> list[Job]:
    """Every cell with every seed, seed by seed: an early look sees all cells."""
    cells = list(cells)
    return [(cell, seed) for seed in seeds for cell in cells]
