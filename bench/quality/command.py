"""`narrows bench quality`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def bench_quality(
    *,
    rows: Path = Path("runs/quality.jsonl"),
    json: Path | None = None,
    plot: Path | None = None,
    full: bool = False,
    short: bool = False,
    workers: int = 0,
    groups: str = "",
    collected: bool = False,
) -> None:
    """Measure how close settings come to data parallel at equal tokens, by test loss.

    Trains small models in a simulation on a virtual clock: about 15 minutes on two cores, hours
    with --full. What was interrupted goes on where it stopped.

    Parameters
    ----------
    rows
        File that gets one JSON line per run; what is in it is not run again, whatever the
        defaults were when it was run.
    json
        File for the cells: losses in nats per byte, excess in percent with 95% intervals.
    plot
        Picture of excess against bits per parameter, and one of the loss curves beside it with
        -curves in its name (needs the extra `bench`).
    full
        Run the whole catalogue with 1000 steps per run.
    short
        Only the modes, with 150 steps per run: two minutes.
    workers
        Processes, one run each at a time; 0: one per core.
    groups
        Only these groups of cells, separated by commas, such as "modes,codec" (default: all).
    collected
        Run nothing: report all that is in `rows`, whichever selections and labels it came from.
    """
    need_torch()
    from narrows.bench.quality.bench import report_collected, run_quality_bench

    if collected:
        report_collected(rows, json, plot)
        return
    names = [name.strip() for name in groups.split(",") if name.strip()]
    run_quality_bench(rows, json, plot, full=full, short=short, workers=workers, groups=names)
