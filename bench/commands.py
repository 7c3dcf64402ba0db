"""`narrows bench`: the commands; each loads what it needs only when it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cyclopts

from narrows.proto.errors import ConfigError

bench = cyclopts.App(name="bench", help="Measure what the system costs and what others do.")


def need_torch() -> None:
    """Raises ConfigError without it: the package can be installed for a broker alone."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this command needs PyTorch",
            remedy="pip install '.[learner]' in the checkout"
            " (the broker and `narrows status` do without)",
        )


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


@bench.command(name="quality")
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
    from narrows.bench.quality import report_collected, run_quality_bench

    if collected:
        report_collected(rows, json, plot)
        return
    names = [name.strip() for name in groups.split(",") if name.strip()]
    run_quality_bench(rows, json, plot, full=full, short=short, workers=workers, groups=names)


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
