"""`narrows journal`: what a state directory holds, whether it is whole, and a way back."""

from __future__ import annotations

import json as json_module
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import cyclopts
from cyclopts import Parameter

from narrows.broker.config import load_broker
from narrows.broker.rounds import Policy
from narrows.broker.store import History, RoundRow
from narrows.proto.errors import ConfigError, ErrorCode, StateError, printable

Directory: TypeAlias = Annotated[Path, Parameter(help="State directory of a broker.")]

journal = cyclopts.App(name="journal", help="Show, check, replay or roll back a state directory.")


@journal.command
def show(directory: Directory, *, last: int = 0, json: bool = False) -> None:
    """List the rounds that are durable, oldest first; also while the broker runs.

    Parameters
    ----------
    last
        Number of rounds, the newest ones; 0: all.
    json
        One JSON object per round.
    """
    with opened(directory) as history:
        rows = [row for row in history.rounds() if row.round_.version > 0]
        if not json:
            run = history.run
            tokens = run.clock // max(1, run.fragments)
            print(f"run {run.run_id}  {run.phase.value}  {tokens:,} tokens")
        for row in rows[-last:] if last > 0 else rows:
            print(json_module.dumps(_facts(row)) if json else _line(row))


def _facts(row: RoundRow) -> dict[str, object]:
    return {
        "round": row.seq,
        "fragment": row.round_.fragment,
        "version": row.round_.version,
        "at_unix": row.at_unix,
        "reason": row.round_.reason,
        "contributors": [each.learner for each in row.round_.contributions],
        "tokens": sum(each.tokens for each in row.round_.contributions),
        "published": f"{row.digests.published:016x}",
    }


def _line(row: RoundRow) -> str:
    at = datetime.fromtimestamp(row.at_unix, UTC)
    who = printable(", ".join(each.learner for each in row.round_.contributions))
    tokens = sum(each.tokens for each in row.round_.contributions)
    return (
        f"round {row.seq} fragment {row.round_.fragment} version {row.round_.version}"
        f" {at:%Y-%m-%d %H:%M:%S}Z {row.round_.reason} tokens {tokens:,} of {who}"
        f" published {row.digests.published:016x}"
    )


@journal.command
def audit(directory: Directory) -> None:
    """Check every byte that a start, a replay or a rollback relies on."""
    with opened(directory) as history:
        found = history.audit()
    print(f"{found.rounds:,} rounds are in order, {found.replayed:,} were merged again")
    if found.problems:
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{len(found.problems)} problems",
            got=found.problems[0],
            remedy="put a backup back, or `narrows journal rollback`",
        )


@journal.command
def replay(
    directory: Directory,
    *,
    without: list[str] | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    weights: Literal["tokens", "equal"] | None = None,
) -> None:
    """Merge the kept rounds again: as they were, or by other rules, or without some learners.

    With broker.keep_history a broker keeps all of its rounds.

    Parameters
    ----------
    without
        Learner whose pushes are left out; repeatable.
    outer_lr
        Another outer learning rate.
    outer_momentum
        Another outer momentum.
    weights
        Another way to weigh pushes.
    """
    given = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "weights": weights}
    flags = {f"merge.{name}": str(value) for name, value in given.items() if value is not None}
    merge = load_broker(None, flags).merge  # Checks the values as the broker does.
    with opened(directory) as history:
        rounds = [row.round_ for row in history.rounds() if row.round_.version > 0]
        names = sorted({each.learner for round_ in rounds for each in round_.contributions})
        if unknown := [name for name in without or () if name not in names]:
            raise ConfigError("--without", expected=" or ".join(names), got=", ".join(unknown))
        policy = rounds[-1].policy if rounds else Policy()
        policy = replace(
            policy,
            outer_lr=policy.outer_lr if outer_lr is None else merge.outer_lr,
            momentum=policy.momentum if outer_momentum is None else merge.outer_momentum,
            weights=weights or policy.weights,
        )
        if flags or without:
            states = list(history.merged_otherwise(policy if flags else None, without or ()))
        else:
            states = list(history.states())
    for state in states:
        print(
            f"fragment {state.fragment} version {state.version}"
            f" global {state.digests.global_:016x} published {state.digests.published:016x}"
        )


@journal.command
def rollback(directory: Directory, target: Path, *, to: int) -> None:
    """Write the run as it was after a round into a new folder; the old one stays untouched.

    The broker must not be running.

    Parameters
    ----------
    target
        Folder that does not exist yet; start the broker with it.
    to
        Number of the round, as `narrows journal show` prints it.
    """
    with opened(directory) as history:
        history.rollback(to, target)
    print(f"{target} holds the run after round {to}: narrows broker --state-dir {target}")


@contextmanager
def opened(directory: Path) -> Generator[History]:
    """The history of a state directory, for reading. Raises ConfigError if it is none."""
    if not (directory / "run.db").exists():
        raise ConfigError(
            f"{directory} holds no run",
            expected="the state directory of a broker, with its run.db",
            got="no such folder" if not directory.is_dir() else "a folder without run.db",
        )
    history = History(directory)
    try:
        yield history
    finally:
        history.close()
