"""`narrows bench attack`: its commands and options. What they need is loaded when they run."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from narrows.bench.kit.torch_needed import need_torch

attack = cyclopts.App(name="attack", help="Attack a run, and measure what it costs the others.")


@attack.command
def poison(
    *,
    rows: Path = Path("runs/attack-poison.jsonl"),
    json: Path | None = None,
    steps: int = 300,
    seeds: tuple[int, ...] = (12, 13),
    groups: tuple[str, ...] = (),
    workers: int = 1,
) -> None:
    """Measure the loss that a learner with poisoned pushes costs, and how soon it is named.

    Small models are trained in one process; the merge is the real one. About 15 seconds a run.

    Parameters
    ----------
    rows
        File that each run is added to. A run that it has is not repeated.
    json
        File for the table.
    steps
        Steps of a run.
    seeds
        Seeds of the runs.
    groups
        Only these groups: attacks, robust, tokens, unequal.
    workers
        Processes.
    """
    need_torch()
    from narrows.bench.attack.poison import run_poison_bench

    run_poison_bench(rows, json, steps=steps, seeds=seeds, groups=groups, workers=workers)
