"""`narrows bench wan`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_wan(
    *,
    rows: Path = Path("runs/wan.jsonl"),
    json: Path | None = None,
    full: bool = False,
    short: bool = False,
    budget: bool = False,
    training: bool = False,
) -> None:
    """Measure exchanges over a line of a given rate and delay, beside other systems (root, Linux).

    Builds network namespaces whose links the kernel holds to a rate. About ten minutes on two
    cores, a day with --full. What was interrupted goes on where it stopped.

    Parameters
    ----------
    rows
        File that gets one JSON line per cell; what is in it is not run again.
    json
        File for the rows of this selection.
    full
        The whole grid: 10 Mbit/s to unlimited, 0 to 100 ms, 1 to 64 M parameters, 2 and 4 learners.
    short
        A few cells of the selection: two minutes.
    budget
        Instead: is the budget held on the wire and used, from 10 Mbit/s to 2 Gbit/s (30 minutes).
    training
        Instead: train over slow lines, beside data parallel over Gloo (20 minutes).
    """
    if budget:
        from narrows.bench.wan.budget import run_budget_bench

        run_budget_bench(rows, json, short=short)
    elif training:
        need_torch()
        from narrows.bench.wan.training import run_training_bench

        run_training_bench(rows, json, short=short)
    else:
        from narrows.bench.wan.bench import run_wan_bench

        run_wan_bench(rows, json, full=full, short=short)
