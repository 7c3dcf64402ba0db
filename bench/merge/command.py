"""`narrows bench merge`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


def bench_merge(*, json: Path | None = None, plot: Path | None = None, large: bool = False) -> None:
    """Measure what a merge costs by number of learners and size, in time and memory.

    Parameters
    ----------
    json
        File for the rows.
    plot
        Picture of the cost by number of learners (needs the extra `bench`).
    large
        Also 256 M parameters with 8 learners; takes minutes and 5 GiB.
    """
    from narrows.bench.merge.bench import run_merge_bench

    run_merge_bench(json, plot, large=large)
