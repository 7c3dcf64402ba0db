"""`narrows journal`: the commands around a run's journal."""

from __future__ import annotations

from pathlib import Path

import cyclopts

journal = cyclopts.App(name="journal", help="Read, check and replay the journal of a run.")


@journal.command
def show(state_dir: Path) -> None:
    """Print the journal of a run, a line per record.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    """
    from narrows.broker.cli.journal_report import show

    show(state_dir)


@journal.command
def audit(state_dir: Path) -> None:
    """Check that versions follow each other, no push is merged twice, and weights sum to one.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    """
    from narrows.broker.cli.journal_report import audit

    audit(state_dir)


@journal.command
def replay(
    state_dir: Path,
    *,
    merge: str | None = None,
    outer: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    to: Path | None = None,
) -> None:
    """Make the versions of a run again: bit for bit, or the same history under other rules.

    It begins at the oldest checkpoint: with `broker.journal_keep` that is version 0.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    merge
        mean: weighted mean; rda: radial-directional averaging, as by default.
    outer
        Another outer optimizer: nesterov or sgd.
    outer_lr
        Another outer learning rate.
    outer_momentum
        Another outer momentum.
    to
        Safetensors file for the model that comes out.
    """
    from narrows.broker.cli.journal_report import replay
    from narrows.broker.storage import Changes

    replay(state_dir, Changes(merge, outer, outer_lr, outer_momentum), to)
