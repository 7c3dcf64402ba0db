"""`narrows bench all`: every bench in its own process, one after the other, then the report.

A line of parts.jsonl says how each part ended. A part that ended well is not run again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from narrows.bench.kit import machine
from narrows.bench.kit.lab import check_able
from narrows.bench.kit.processes import environment
from narrows.bench.kit.rows import append_row, end_last_line, read_rows
from narrows.bench.report.bench import run_report
from narrows.broker.cli.tables import terminal
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError

ROWS: Final = "{rows}"
"""Stands in the arguments of a part for its rows file."""


@dataclass(frozen=True)
class BenchPart:
    """One bench, and the way it is called."""

    name: str
    """Name of its results: NAME.json, and NAME.jsonl for the rows."""
    minutes: float
    """Estimated minutes on two quiet cores, without building the environments of other systems."""
    arguments: tuple[str, ...]
    """Arguments after `narrows`, without --json."""
    root: bool = False

    def command(self, folder: Path) -> list[str]:
        """The command line of its process."""
        rows = str(folder / f"{self.name}.jsonl")
        arguments = [rows if word == ROWS else word for word in self.arguments]
        result = str(folder / f"{self.name}.json")
        return [sys.executable, "-m", "narrows", *arguments, "--json", result]


def small() -> list[BenchPart]:
    """A look at every bench in 20 minutes; the demo is a command of its own."""
    return [
        _part("bandwidth", 1),
        _part("codec", 1.5),
        _part("merge", 2),
        _part("loop", 0.5),
        _part("journal", 0.5, "--params", str(1 << 24), "--rounds", "20"),
        _part("goodput", 1, "--rows", ROWS, "--short"),
        _part("chaos", 2, "--learners", "8", "--seconds", "60", "--fault-every", "10s",
              "--down-max", "10s"),
        _part("quality", 2, "--rows", ROWS, "--short"),
        _part("peers", 4, "--rows", ROWS, "--steps", "200"),
        *_lines(2, 1, 2, "--short"),
    ]  # fmt: skip


def long() -> list[BenchPart]:
    """The long selections: half a day."""
    demo = BenchPart("demo", 6, ("demo", "--baselines", "--plain"))
    return [
        demo,
        _part("bandwidth", 1),
        _part("codec", 1.5),
        _part("merge", 6, "--large"),
        _part("loop", 0.5),
        _part("journal", 1.5),
        _part("goodput", 60, "--rows", ROWS, "--full"),
        _part("chaos", 38, "--seconds", "1800", "--broker-kills", "3"),
        _part("peers", 12, "--rows", ROWS),
        *_lines(10, 30, 20),
        _part("quality", 600, "--rows", ROWS, "--full"),
    ]


def _part(name: str, minutes: float, *arguments: str) -> BenchPart:
    return BenchPart(name, minutes, ("bench", name, *arguments))


def _lines(wan: float, budget: float, training: float, *arguments: str) -> list[BenchPart]:
    """The parts that need a shaped line. Arguments: their minutes."""
    kinds = (("wan", wan, ()), ("wan-budget", budget, ("--budget",)),
             ("wan-training", training, ("--training",)))  # fmt: skip
    return [
        BenchPart(name, minutes, ("bench", "wan", "--rows", ROWS, *flags, *arguments), root=True)
        for name, minutes, flags in kinds
    ]


def run_everything(folder: Path, *, full: bool) -> None:
    """Runs what is missing in `folder`, then writes report.html there.

    Raises NarrowsError at the end, with their names, if parts failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = run_parts(long() if full else small(), folder, terminal())
    run_report(folder, folder / "report.html")
    if failed:
        raise NarrowsError(
            ErrorCode.MISUSE,
            f"these benches failed: {', '.join(failed)}",
            remedy="see above; the same command runs them again and leaves alone what is done",
        )


def run_parts(parts: Sequence[BenchPart], folder: Path, console: Console) -> list[str]:
    """Runs the parts that have not ended well yet; returns the names of those that fail."""
    record = folder / "parts.jsonl"
    finished = {row["part"]: row for row in read_rows(record) if row["exit_code"] == 0}
    end_last_line(record)
    failed: list[str] = []
    for number, part in enumerate(parts):
        left = sum(each.minutes for each in parts[number:] if _open(each, folder, finished))
        head = f"[{number + 1}/{len(parts)}] {part.name}"
        if not _open(part, folder, finished):
            console.print(f"{head}: done, {finished[part.name]['commit']}", markup=False)
        elif reason := why_not(part):
            console.print(f"{head}: skipped: {reason}", markup=False)
        else:
            estimate = f"about {part.minutes:g} min; {left:g} min left with all that follow"
            console.print(f"{head}: {estimate}", markup=False)
            row = _run(part, folder)
            append_row(record, row)
            if row["exit_code"]:
                failed.append(part.name)
            console.print(f"{head}: {_outcome(row)}", markup=False)
    return failed


def why_not(part: BenchPart) -> str:
    """Reason why a part cannot run here; "" if it can."""
    if part.root:
        try:
            check_able()
        except ConfigError as error:
            return str(error)
    return ""


def _open(part: BenchPart, folder: Path, finished: Mapping[str, Mapping[str, object]]) -> bool:
    row = finished.get(part.name)
    same = row is not None and row["arguments"] == list(part.arguments)
    return not same or not (folder / f"{part.name}.json").exists()


def _run(part: BenchPart, folder: Path) -> dict[str, object]:
    # An earlier result would stand in the report as if this run had written it.
    (folder / f"{part.name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    with subprocess.Popen(part.command(folder), env=environment()) as child:
        try:
            child.wait()
        except KeyboardInterrupt:
            child.terminate()  # It ends the processes that it has started.
            child.wait()
            raise
    return {
        "part": part.name,
        "arguments": list(part.arguments),
        "commit": machine.describe()["commit"],
        "exit_code": child.returncode,
        "seconds": time.monotonic() - began,
    }


def _outcome(row: Mapping[str, object]) -> str:
    took = f"{row['seconds']:.0f} s"
    return f"FAILED after {took}, exit code {row['exit_code']}" if row["exit_code"] else took
