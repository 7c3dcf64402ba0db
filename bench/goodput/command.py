"""`narrows bench goodput`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


def bench_goodput(
    *,
    rows: Path = Path("runs/goodput.jsonl"),
    json: Path | None = None,
    plot: Path | None = None,
    full: bool = False,
    short: bool = False,
    workers: int = 0,
) -> None:
    """Simulate the useful share of up to 2.4 million chips, each interrupted once a year.

    Failure tapes of two days on the real state machines in a simulation, and of three months on a
    model of what stalls whom, whose four constants are fitted to published figures: some ten
    minutes on two cores. What was interrupted goes on where it stopped.

    Parameters
    ----------
    rows
        File that gets one JSON line per cell; what is in it is not run again.
    json
        File for the cells: goodput and uptime in percent with 95% intervals.
    plot
        Picture of goodput by chips, and one of half an hour of failures beside it with
        -time-lines in its name (needs the extra `bench`).
    full
        Tapes of ten days on the state machines; takes five times as long.
    short
        Tapes of 20,000 s and no sweep: a minute; too short for their intervals to be trusted.
    workers
        Processes, one cell each at a time; 0: one per core.
    """
    from narrows.bench.goodput.bench import run_goodput_bench

    run_goodput_bench(rows, json, plot, full=full, short=short, workers=workers)
