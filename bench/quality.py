"""`narrows bench quality`: the loss that a run reaches, beside data parallel at equal tokens.

The hosts of broker and learners are the real ones, the time is virtual, and the learners train the
reference GPT: so the seed decides a loss, however busy the machine is. Data parallel is one model
whose step takes a batch of each learner, with the exact mean gradient and the same schedule.

Data parallel is a rival that was searched: over Adam's beta1 and the peak learning rate, for each
length of a run. `--search` repeats that. Seeds that chose a setting report nothing.

All unequal cells, and the equal ones beside them, see the same number of tokens, whichever of their
learners trains on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any, Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.quality_cells import (
    FOUR,
    TWO,
    QualityCell,
    mixed_cells,
    rival,
    searched_cells,
    site_cells,
)
from narrows.bench.reference.worker import need_torch
from narrows.proto.errors import ConfigError

STUDENT_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles for 1 to 9 degrees of freedom."""
SEEDS_MAX: Final = len(STUDENT_T) + 1

PUBLISHED: Final = {
    "35M": (0.7, 2.0, 3.9),
    "90M": (0.5, 1.5, 3.1),
    "180M": (0.3, 1.1, 2.3),
    "335M": (0.1, 0.9, 2.0),
    "550M": (0.2, 0.7, 1.7),
    "1.3B": (0.2, 0.5, 1.3),
    "2.4B": (-0.1, 0.3, 1.1),
}
"""Excess of DiLoCo over data parallel in % at 20 tokens per parameter, with 2, 4 and 8 replicas.
Source: Charles et al., Scaling Laws for DiLoCo (arXiv 2503.09799), table 4."""

COLUMNS: Final = (
    Column("speeds", "speeds"),
    Column("dead", "dead"),
    Column("steps", "steps"),
    Column("tokens/param", "tokens_per_param", "{:.1f}"),
    Column("hand-over", "handover"),
    Column("peak", "peak"),
    Column("beta1", "beta1"),
    Column("outer rate", "outer_lr"),
    Column("momentum", "outer_momentum"),
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
    seeds: int = 8,
    mixes: bool = False,
    search: bool = False,
) -> None:
    """Measure how much worse than data parallel a run's model is at equal tokens.

    Parameters
    ----------
    seeds
        Runs of each cell, 2 to 10; each has its first parameters, order of the text and mishaps.
    mixes
        Measure unequal learners, learners that die, and newcomers, instead of equal sites.
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
    elif mixes:
        cells = mixed_cells(seeds)
    else:
        cells = site_cells(seeds)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        try:
            runs = Runs(pool, cells, rivals_alone=search)
            if search:
                bench("quality", cells, partial(measure_rival, runs), SEARCHED, best, json=json)
            else:
                bench("quality", cells, partial(measure, runs), COLUMNS, headline, json=json)
        finally:
            pool.shutdown(cancel_futures=True)


class Runs:
    """Every run of every cell, begun at once, so that no processor waits for the end of a cell."""

    def __init__(self, pool: Executor, cells: Sequence[QualityCell], *, rivals_alone: bool) -> None:
        from narrows.bench.trained import train, train_data_parallel  # They load PyTorch.

        self._jobs: dict[tuple[bool, QualityCell, int], Future[Any]] = {}
        for cell in cells:
            against = cell if rivals_alone else rival(cell)
            for seed in cell.seed_numbers:
                if not rivals_alone:
                    self._jobs[False, cell, seed] = pool.submit(train, cell, seed)
                # Cells that differ in speeds, deaths or settings alone share their reference.
                if (True, against, seed) not in self._jobs:
                    job = pool.submit(train_data_parallel, against, seed)
                    self._jobs[True, against, seed] = job

    def trained(self, cell: QualityCell) -> list[Any]:
        """A `trained.Trained` for each seed."""
        return [self._jobs[False, cell, seed].result() for seed in cell.seed_numbers]

    def data_parallel(self, cell: QualityCell) -> list[list[float]]:
        """Losses of data parallel at `trained.MARKS`, for each seed."""
        return [self._jobs[True, cell, seed].result() for seed in cell.seed_numbers]


def measure(runs: Runs, cell: QualityCell) -> Row:
    """Losses of all seeds of a cell, and their excess over data parallel."""
    from narrows.bench.trained import tokens_per_param

    trained = runs.trained(cell)
    against = rival(cell)
    rivals = runs.data_parallel(against)
    return {
        **compared([run.losses[-1] for run in trained], [losses[-1] for losses in rivals]),
        "losses_at_marks": means([run.losses for run in trained]),
        "losses_data_parallel_at_marks": means(rivals),
        "rival_beta1": against.beta1,
        "rival_peak": against.peak,
        "tokens_per_param": tokens_per_param(cell),
        "contributors_mean": fmean(run.contributors for run in trained),
    }


def measure_rival(runs: Runs, cell: QualityCell) -> Row:
    """Losses of data parallel with the settings of a cell."""
    losses = runs.data_parallel(cell)
    return {
        "loss": fmean(each[-1] for each in losses),
        "losses_at_marks": means(losses),
        "losses": [each[-1] for each in losses],
    }


def means(losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean over the seeds at each mark."""
    return [fmean(each) for each in zip(*losses, strict=True)]


def best(rows: Sequence[Row]) -> list[str]:
    """The setting with the lowest mean loss, for each length."""
    lines = []
    for steps in sorted({row["steps"] for row in rows}):
        row = min((row for row in rows if row["steps"] == steps), key=lambda row: row["loss"])
        setting = f"beta1 {row['beta1']}, peak x {row['peak']}"
        lines.append(f"{steps} steps: {setting} is the best of data parallel ({row['loss']:.4f})")
    return lines


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
    """The excess of each cell, and what was published for larger models."""
    lines = [
        f"{row['speeds']}, {row['dead']} dead, {row['steps']} steps, hand-over {row['handover']},"
        f" peak x {row['peak']}: {row['excess_percent']:+.1f}%"
        f" [{row['low_percent']:+.1f}, {row['high_percent']:+.1f}] over data parallel's"
        f" {row['loss_data_parallel']:.3f}, {row['tokens_per_param']:.0f} tokens per parameter"
        for row in rows
    ]
    curve = (
        f"{size} {two:+.1f}, {four:+.1f}, {eight:+.1f}"
        for size, (two, four, eight) in PUBLISHED.items()
    )
    return [
        *lines,
        "published at 20 tokens per parameter, for 2, 4, 8 replicas: " + "; ".join(curve),
    ]
