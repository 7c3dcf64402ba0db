"""`narrows bench quality`: the loss that a run reaches, beside data parallel at equal tokens.

The hosts of broker and learners are the real ones, the time is virtual, and the learners train the
reference GPT: so the seed decides a loss, however busy the machine is. Data parallel is one model
whose step takes a batch of each learner, with the exact mean gradient and the same schedule. Both
have the preset's peak learning rate. It was tuned for data parallel (the best of 0.25 to 4 times
itself), and not for runs.

All unequal cells, and the equal ones beside them, see the same number of tokens, whichever of their
learners trains on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.quality_cells import (
    FOUR,
    TWO,
    QualityCell,
    equal_cells,
    searched_cells,
    unequal_cells,
)
from narrows.bench.reference.worker import need_torch
from narrows.proto.errors import ConfigError

STUDENT_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles for 1 to 9 degrees of freedom."""
SEEDS_MAX: Final = len(STUDENT_T) + 1

COLUMNS: Final = (
    Column("speeds", "speeds"),
    Column("keep", "keep"),
    Column("dead", "dead"),
    Column("steps", "steps"),
    Column("loss", "loss", "{:.4f}"),
    Column("data parallel", "loss_data_parallel", "{:.4f}"),
    Column("excess %", "excess_percent", "{:+.2f}"),
    Column("from", "low_percent", "{:+.2f}"),
    Column("to", "high_percent", "{:+.2f}"),
    Column("in a merge", "contributors_mean", "{:.2f}"),
)
"""Losses are nats per byte of validation text, means over the seeds. The interval is of 95%."""
SEARCHED: Final = (
    Column("steps", "steps"),
    Column("beta1", "beta1"),
    Column("peak", "peak"),
    Column("loss", "loss", "{:.4f}"),
)
"""Columns of the search: settings of data parallel, and the mean of its final losses."""


def quality(
    *,
    short: Short = False,
    json: Json = None,
    seeds: int = 6,
    unequal: bool = False,
    search: bool = False,
) -> None:
    """Measure how much worse than data parallel a run's model is at equal tokens.

    Parameters
    ----------
    seeds
        Runs of each cell, 2 to 10; each has its first parameters, order of the text and mishaps.
    unequal
        Measure the cells of unequal learners alone.
    search
        Search data parallel's own settings, on seeds that judge nothing.
    """
    need_torch()
    if not 2 <= seeds <= SEEDS_MAX:
        raise ConfigError("--seeds", expected=f"2 to {SEEDS_MAX}", got=str(seeds))
    if short:
        cells = [QualityCell(speeds, steps=200, seeds=2) for speeds in (TWO, FOUR)]
    elif search:
        cells = searched_cells(seeds)
    elif unequal:
        cells = unequal_cells(seeds)
    else:
        cells = equal_cells(seeds) + unequal_cells(seeds)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        if search:
            bench("quality", cells, partial(measure_rival, pool), SEARCHED, best, json=json)
        else:
            bench("quality", cells, partial(measure, pool), COLUMNS, headline, json=json)


def measure(pool: Executor, cell: QualityCell) -> Row:
    """Trains all seeds of a cell; the row has their losses, and their excess over data parallel."""
    from narrows.bench.trained import train  # It loads PyTorch.

    jobs = [pool.submit(train, cell, seed) for seed in cell.seed_numbers]
    # Data parallel knows neither speeds nor deaths: cells that differ in these share a reference.
    equals = replace(
        cell, speeds=":".join("1" * cell.learners), keep=0.5, dead="nobody", handover=0.0
    )
    references = data_parallel(pool, equals)
    runs = [each.result() for each in jobs]
    return {
        **compared([run.losses[-1] for run in runs], references),
        "losses_at_marks": [
            fmean(losses) for losses in zip(*(run.losses for run in runs), strict=True)
        ],
        "contributors_mean": fmean(run.contributors for run in runs),
    }


def measure_rival(pool: Executor, cell: QualityCell) -> Row:
    """Trains data parallel with the settings of a cell, on all its seeds."""
    from narrows.bench.trained import train_data_parallel

    runs = list(pool.map(partial(train_data_parallel, cell), cell.seed_numbers))
    losses = [run[-1] for run in runs]
    return {
        "loss": fmean(losses),
        "losses_at_marks": [fmean(each) for each in zip(*runs, strict=True)],
        "losses": losses,
    }


def best(rows: Sequence[Row]) -> list[str]:
    """The setting with the lowest mean loss, for each length."""
    lines = []
    for steps in sorted({row["steps"] for row in rows}):
        row = min((row for row in rows if row["steps"] == steps), key=lambda row: row["loss"])
        setting = f"beta1 {row['beta1']}, peak x {row['peak']}"
        lines.append(f"{steps} steps: {setting} is the best of data parallel ({row['loss']:.4f})")
    return lines


@cache
def data_parallel(pool: Executor, cell: QualityCell) -> list[float]:
    """Losses of all seeds. Several cells have the same reference, which is trained once."""
    from narrows.bench.trained import train_data_parallel

    runs = pool.map(partial(train_data_parallel, cell), cell.seed_numbers)
    return [losses[-1] for losses in runs]


def compared(losses: Sequence[float], references: Sequence[float]) -> Row:
    """Excess over data parallel, with the interval of Student's t.

    A loss is compared with the reference of the same seed: both begin with the same parameters and
    read the same text, so the luck that they share cancels.
    """
    excess = [100 * (a / b - 1) for a, b in zip(losses, references, strict=True)]
    half = STUDENT_T[len(excess) - 2] * stdev(excess) / len(excess) ** 0.5
    return {
        "loss": fmean(losses),
        "loss_data_parallel": fmean(references),
        "excess_percent": fmean(excess),
        "low_percent": fmean(excess) - half,
        "high_percent": fmean(excess) + half,
        "losses": list(losses),
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """The excess of each cell."""
    return [
        f"{row['speeds']}, {row['dead']} dead, keep {row['keep']}, {row['steps']} steps:"
        f" {row['excess_percent']:+.1f}% [{row['low_percent']:+.1f}, {row['high_percent']:+.1f}]"
        f" over data parallel's {row['loss_data_parallel']:.3f}"
        for row in rows
    ]
