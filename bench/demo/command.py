"""`narrows demo`: its options. What it needs is loaded when it runs."""

from __future__ import annotations

from pathlib import Path

from narrows.bench.kit.torch_needed import need_torch


def demo(
    *,
    learners: int = 4,
    steps: int = 0,
    baselines: bool = False,
    keep: Path | None = None,
    json: Path | None = None,
    picture: Path | None = None,
    plain: bool = False,
    record: Path | None = None,
    keys: bool = False,
) -> None:
    """Train one model with several learners on this machine, one of them killed on the way.

    Parameters
    ----------
    learners
        Number of learner processes.
    steps
        Inner steps per learner; 0: the default, about three minutes on two cores.
    baselines
        Also train with plain data parallelism, as many steps (takes a few minutes more).
    keep
        Folder for logs, events and the final model (default: a temporary one).
    json
        File for the results.
    picture
        SVG file for the display while a learner was dead, and the last table.
    plain
        Print lines instead of a live display.
    record
        File for one learner's outer gradients, one of each fragment.
    keys
        Give the broker and each learner a key of its own, so that all connections are encrypted.
    """
    need_torch()
    from narrows.bench.demo.bench import run_demo
    from narrows.bench.demo.story import DemoOptions

    options = DemoOptions(learners, steps, baselines, keep, json, picture, plain, record, keys)
    run_demo(options)
