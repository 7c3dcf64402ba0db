"""`narrows bench`: the commands; each loads what it needs only when it runs."""

from __future__ import annotations

from pathlib import Path

import cyclopts

bench = cyclopts.App(name="bench", help="Measure what the system costs and what others do.")


@bench.command(name="codec")
def bench_codec(
    *, recording: Path | None = None, json: Path | None = None, plot: Path | None = None
) -> None:
    """Measure bits, error and speed of the codecs, beside what others do.

    Parameters
    ----------
    recording
        Outer gradients that `narrows demo --record FILE` wrote (default: some that come along).
    json
        File for the rows.
    plot
        Picture of bits against error (needs the extra `bench`).
    """
    from narrows.bench.codec import run_codec_bench

    run_codec_bench(recording, json, plot)


@bench.command(name="merge")
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
    from narrows.bench.merge import run_merge_bench

    run_merge_bench(json, plot, large=large)


@bench.command(name="loop")
def bench_loop(
    *,
    learners: int = 2,
    params: int = 1 << 24,
    seconds: float = 20.0,
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
    json
        File for the result.
    """
    from narrows.bench.loop import run_loop_bench

    run_loop_bench(learners=learners, params=params, seconds=seconds, json_file=json)


@bench.command(name="journal")
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
    from narrows.bench.journal import run_journal_bench

    run_journal_bench(folder, json, params=params, learners=learners, rounds=rounds)
