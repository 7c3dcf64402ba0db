"""`narrows bench loop`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


def bench_loop(
    *,
    learners: int = 2,
    params: int = 1 << 24,
    seconds: float = 20.0,
    keys: bool = False,
    json: Path | None = None,
) -> None:
    """Measure the whole exchange on loopback without a budget: broker and learner processes.

    Parameters
    ----------
    learners
        Number of learner processes.
    params
        Parameters of the model; a multiple of 16,384.
    seconds
        How long to run.
    keys
        Encrypt and authenticate every connection.
    json
        File for the result.
    """
    from narrows.bench.loop.bench import run_loop_bench

    run_loop_bench(learners=learners, params=params, seconds=seconds, keys=keys, json_file=json)
