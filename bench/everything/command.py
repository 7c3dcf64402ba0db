"""`narrows bench all`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_all(*, folder: Path | None = None, full: bool = False) -> None:
    """Run a small selection of every bench, then the report: 20 minutes on two quiet cores.

    Each bench writes its JSON into the folder. What was interrupted goes on where it stopped; a
    bench that fails is told, the others run, and the command fails at the end.

    Parameters
    ----------
    folder
        For results, rows and report.html (default: runs/bench, with --full runs/bench-full).
    full
        What the documents report, and the demo with its baselines: half a day or more.
    """
    need_torch()
    from narrows.bench.everything.bench import run_everything

    run_everything(folder or Path("runs/bench-full" if full else "runs/bench"), full=full)
