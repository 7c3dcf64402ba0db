"""`narrows bench journal`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


def bench_journal(
    *,
    folder: Path | None = None,
    params: int = 1 << 26,
    learners: int = 8,
    rounds: int = 40,
    json: Path | None = None,
) -> None:
    """Measure what the journal costs: rounds per second, bytes, delay of the publications.

    Parameters
    ----------
    folder
        Folder on the disk to measure (default: the one for temporary files).
    params
        Parameters of the model.
    learners
        Contributions per round.
    rounds
        Rounds per mode (off, merged, full).
    json
        File for the rows.
    """
    from narrows.bench.journal.bench import run_journal_bench

    run_journal_bench(folder, json, params=params, learners=learners, rounds=rounds)
