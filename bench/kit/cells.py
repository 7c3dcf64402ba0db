"""Cells of a bench whose rows are kept in a file, so that the bench goes on after an
interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from narrows.bench.kit import machine
from narrows.bench.kit.rows import append_row, end_last_line, read_rows

Row: TypeAlias = dict[str, Any]


class Cell(Protocol):
    """A frozen dataclass; its fields describe the measurement."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def line(self) -> str: ...


C = TypeVar("C", bound=Cell)


def run_missing(
    cells: Sequence[C], path: Path, run: Callable[[C], Row], say: Callable[[str], None]
) -> list[Row]:
    """The rows of all cells in their order. A cell whose row in `path` failed or was skipped is run
    again.

    `run` returns only the result. This function adds the machine and the labels of the cell.
    """
    kept = [row for row in read_rows(path) if "kind" in row]
    known = {_key(row): row for row in kept if not {"failed", "skipped"} & row.keys()}
    end_last_line(path)
    rows: list[Row] = []
    for number, cell in enumerate(cells, 1):
        identity = {"kind": type(cell).__name__, "cell": asdict(cell)}
        if (key := _key(identity)) not in known:
            say(f"{number}/{len(cells)} {cell.line}: {cell.name} ...")
            labels = {"name": cell.name, "line": cell.line}
            try:
                known[key] = machine.describe() | identity | labels | run(cell)
            except KeyboardInterrupt:
                say(f"{path} keeps what is done; the same command goes on")
                raise
            append_row(path, known[key])
            say(f"{number}/{len(cells)} {cell.line}: {cell.name}: {outcome(known[key])}")
        rows.append(known[key])
    return rows


def outcome(row: Mapping[str, Any]) -> str:
    """The figure of a row that matters most, or the reason why it has none."""
    for word in ("failed", "skipped"):
        if word in row:
            return f"{word}: {row[word]}"
    return str(row.get("summary", "measured"))


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row["kind"], row["cell"]], sort_keys=True)
