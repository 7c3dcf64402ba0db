"""`narrows journal`: the commands around a run's journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

journal = cyclopts.App(name="journal", help="Read, check and replay the journal of a run.")


@journal.command
def show(state_dir: Path, *, seal_key: Path | None = None) -> None:
    """Print the journal of a run, a line per record.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    seal_key
        File with the seal key of the run: all seals are compared first.
    """
    from narrows.broker.cli.journal_report import show

    show(state_dir, seal_key=seal_key)


@journal.command
def audit(state_dir: Path, *, seal_key: Path | None = None, holds: str = "") -> None:
    """Check that versions follow each other, no push is merged twice, and weights sum to one.

    With the seal key it also names the first file or record that was altered without that key.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    seal_key
        File with the seal key of the run.
    holds
        NUMBER:SEAL of a record, as the broker's log tells them: it must be in the journal, or a
        checkpoint must hold it. So it shows that no older copy was put back.
    """
    from narrows.broker.cli.journal_report import audit

    audit(state_dir, seal_key, holds)


@journal.command
def new_seal_key(file: Path) -> None:
    """Make a key for `security.seal_key`, readable by its owner only.

    Parameters
    ----------
    file
        A new file, outside the state directory. Keep a copy elsewhere: a lost key cannot be made
        again.
    """
    from narrows.broker.storage import new_seal_key

    key = new_seal_key(file)
    print(f"{file}: seal key {key.name}; set security.seal_key to this file")


@journal.command
def seal(state_dir: Path, *, seal_key: Path) -> None:
    """Seal a state directory that was written without a seal, as it is now.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    seal_key
        File with the seal key.
    """
    from narrows.broker.storage import read_seal_key, seal_run

    key = read_seal_key(seal_key, state_dir)
    seal_run(state_dir, key)
    print(f"{state_dir}: sealed as it is with the key {key.name}")


@journal.command
def replay(
    state_dir: Path,
    *,
    merge: str | None = None,
    outer: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    without: Annotated[list[str], Parameter(negative="")] | None = None,
    to: Path | None = None,
    seal_key: Path | None = None,
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
    without
        Learner whose contributions are left out, as after a compromise; repeatable. The others'
        weights keep their proportions. Needs `broker.journal = "full"`.
    to
        Safetensors file for the model that comes out.
    seal_key
        File with the seal key of the run: all seals are compared first.
    """
    from narrows.broker.cli.journal_report import replay
    from narrows.broker.storage import Changes

    changes = Changes(merge, outer, outer_lr, outer_momentum, tuple(without or ()))
    replay(state_dir, changes, to, seal_key=seal_key)
