"""`narrows journal` and `narrows export`: show, audit, replay, roll back, and write the model.

They only read, also while the broker runs.
"""

from __future__ import annotations

import csv as csv_module
import json as json_module
import sys
from collections.abc import Iterable
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import cyclopts
import msgspec
from cyclopts import Parameter

from narrows.broker.records import FragmentState
from narrows.broker.store import CurvePoint, History, export_model
from narrows.proto.config import check_output
from narrows.proto.errors import ConfigError, ErrorCode, StateError, printable
from narrows.proto.messages import Layout
from narrows.proto.units import counted

Directory: TypeAlias = Annotated[Path, Parameter(help="State directory of a broker.")]

journal = cyclopts.App(name="journal", help="Show, check, replay or roll back a state directory.")


@journal.command
def show(directory: Directory, *, last: int = 0, json: bool = False) -> None:
    """List the durable rounds, oldest first; also while the broker runs.

    Args:
        last: Number of rounds, the newest ones; 0: all.
        json: One JSON object per round.
    """
    if last < 0:
        raise ConfigError("--last", expected="a number of rounds, or 0 for all", got=str(last))
    with closing(History(directory)) as history:
        rows = [row for row in history.rounds() if row.round_.version > 0]
        if not json:
            run = history.run
            tokens = run.clock // max(1, run.fragments)
            print(f"run {run.run_id}  {run.phase.value}  {tokens:,} tokens")
    for row in rows[-last:]:  # All of them, if `last` is 0.
        made = row.round_
        names = [push.learner for push in made.contributions]
        facts = {
            "round": row.seq, "fragment": made.fragment, "version": made.version,
            "at_unix": row.at_unix, "reason": made.reason, "contributors": names,
            "tokens": sum(push.tokens for push in made.contributions),
            "published": f"{row.digests.published:016x}",
            "losses": {push.learner: push.loss for push in made.contributions},
        }  # fmt: skip
        if json:
            print(json_module.dumps(facts))
        else:
            print(
                f"round {row.seq} fragment {made.fragment} version {made.version}"
                f" {datetime.fromtimestamp(row.at_unix, UTC):%Y-%m-%d %H:%M:%S}Z {made.reason}"
                f" tokens {facts['tokens']:,} of {printable(', '.join(names))}"
                f" published {facts['published']}"
            )


@journal.command
def curve(directory: Directory, *, csv: Path | None = None) -> None:
    """Write the training curve of every learner since version 0: a row for each merged push.

    Args:
        csv: File to write it into, as CSV (default: standard output).
    """
    if csv is not None:
        check_output(csv, "--csv")
    with ExitStack() as stack:
        history = stack.enter_context(closing(History(directory)))
        to = stack.enter_context(csv.open("w", newline="")) if csv is not None else sys.stdout
        writer = csv_module.writer(to)
        writer.writerow(CurvePoint._fields)
        for point in history.curve():
            writer.writerow(point)


@journal.command
def audit(directory: Directory) -> None:
    """Check every byte that a start, a replay or a rollback relies on."""
    with closing(History(directory)) as history:
        found = history.audit()
    print(f"{found.rounds:,} rounds are in order, {found.replayed:,} were merged again")
    for problem in found.problems:
        print(printable(problem))
    if found.problems:
        print("what lies after the first damage of a fragment was not looked at")
        raise StateError(
            ErrorCode.STATE_DAMAGED,
            f"{counted(len(found.problems), 'problem')} above",
            remedy="put a backup back, or `narrows journal rollback`",
        )


@journal.command
def replay(directory: Directory, *, out: Path | None = None) -> None:
    """Merge the kept rounds again, and print the digests of what comes out.

    Args:
        out: Safetensors file to write the model that comes out into.
    """
    with closing(History(directory)) as history:
        states = list(history.states())
        for state in states:
            print(
                f"fragment {state.fragment} version {state.version}"
                f" global {state.digests.global_:016x} published {state.digests.published:016x}"
            )
        if out is not None:
            _write_model(out, history, states)


@journal.command
def rollback(directory: Directory, target: Path, *, to: int) -> None:
    """Write the run as it was after a round into a new folder; the old one stays untouched.

    The broker must not be running.

    Args:
        target: Folder that does not exist yet; start the broker with it.
        to: Number of the round, as `narrows journal show` prints it.
    """
    if not target.is_dir():  # A folder that exists is refused below, in better words.
        check_output(target, "TARGET")
    with closing(History(directory)) as history:
        history.rollback(to, target)
    print(f"{target} holds the run after round {to}: narrows broker --state-dir {target}")


def export(directory: Directory, *, to: Path | None = None, layout: bool = False) -> None:
    """Write the global model of a state directory into a safetensors file.

    Args:
        to: File to write; its metadata name the run and the version of each fragment.
        layout: Print the layout of the model as JSON instead, for learners in other languages.
    """
    with closing(History(directory)) as history:
        if layout:
            found = _layout(history)
            named = {"frozen_digest": found.frozen_digest, "entries": found.entries}
            print(msgspec.json.encode(named).decode())
        elif to is None:
            raise ConfigError("--to is missing", expected="a file to write", got="none")
        else:
            _write_model(to, history, history.states())


def _layout(history: History) -> Layout:
    if history.run.layout is None:
        raise ConfigError(f"{history.folder} holds no model yet", expected="a run with version 0")
    return history.run.layout


def _write_model(to: Path, history: History, states: Iterable[FragmentState]) -> None:
    check_output(to, "the model's file")
    layout = _layout(history)
    if to.resolve().is_relative_to(history.folder.resolve()):
        raise ConfigError(f"{to}", expected="a file outside of the state directory")
    states = list(states)  # Only now: a replay takes long, and a bad path is told before it.
    versions = json_module.dumps([state.version for state in states])
    metadata = {"narrows.run": history.run.run_id, "narrows.versions": versions}
    export_model(to, layout, history.table, [state.global_ for state in states], metadata)
    print(f"{to}: versions {versions}")
