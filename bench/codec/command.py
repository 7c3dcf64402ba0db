"""`narrows bench codec`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path


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
    from narrows.bench.codec.bench import run_codec_bench

    run_codec_bench(recording, json, plot)
