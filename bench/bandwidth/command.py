"""`narrows bench bandwidth`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_bandwidth(
    *, json: Path | None = None, plot: Path | None = None, wire: bool = True
) -> None:
    """Model the Gbit/s that a compute utilisation takes, beside the published table.

    Also what real runs put on the wire, model against measurement; about a minute.

    Parameters
    ----------
    json
        File for the rows.
    plot
        Picture of the model's cells against the published ones (needs the extra `bench`).
    wire
        Run broker and learners too; without it only the arithmetic, in seconds.
    """
    if wire:
        need_torch()
    from narrows.bench.bandwidth.bench import run_bandwidth_bench

    run_bandwidth_bench(json, plot, wire=wire)
