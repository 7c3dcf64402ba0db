"""A bench is data and one function: cells, `measure(cell)`, columns, a headline.

Cells are dataclasses: their fields are what is varied, and the first columns of the table. The
JSON has the rows, and the commit and the machine that they come from.
"""

from __future__ import annotations

import json as json_module
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

_ABOVE = Path(__file__).resolve().parents
CHECKOUT = next((each for each in _ABOVE if (each / "pyproject.toml").exists()), _ABOVE[0])
"""The checkout that this file lies in; an installed package has none, and names no commit."""

WIDTH: Final = 140
"""Columns that a table may take; a narrower terminal folds its lines."""

Short: TypeAlias = Annotated[bool, Parameter(help="Fewer or shorter cells: minutes, not hours.")]
Json: TypeAlias = Annotated[Path | None, Parameter(name="--json", help="File for the rows.")]
Row: TypeAlias = dict[str, Any]
AnyCell = TypeVar("AnyCell")


class Column(NamedTuple):
    """One column of the table; the JSON has every key of a row."""

    title: str
    key: str
    form: str = "{}"
    """Format of the value; None is shown as "-"."""


def bench(
    name: str,
    cells: Sequence[AnyCell],
    measure: Callable[[AnyCell], Mapping[str, Any]],
    columns: Sequence[Column],
    headline: Callable[[Sequence[Row]], Sequence[str]],
    *,
    json: Path | None,
    seed: int = 0,
) -> list[Row]:
    """Measures cell by cell, prints the table and the headline, and writes the JSON.

    What was measured before an error is written all the same, and the error raised.
    """
    console = Console(highlight=False)
    rows = list[Row]()
    console.width = max(console.width, WIDTH)
    try:
        for number, cell in enumerate(cells, 1):
            started = time.monotonic()
            key = asdict(cell)  # type: ignore[call-overload]
            rows.append({**key, **measure(cell)})
            what = " ".join(f"{field}={value}" for field, value in key.items())
            took_s = time.monotonic() - started
            console.print(f"{number}/{len(cells)}  {what}  {took_s:.1f} s", style="dim")
    finally:
        if json is not None:
            write(json, name, rows, seed)
    console.print(table(columns, rows))
    for line in headline(rows):
        console.print(line, style="bold", soft_wrap=True)
    return rows


def table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """The rows for people."""
    shown = Table(box=None, pad_edge=False)
    for column in columns:
        is_text = all(isinstance(row.get(column.key), str) for row in rows)
        shown.add_column(column.title, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        values = ((column.form, row.get(column.key)) for column in columns)
        shown.add_row(*("-" if value is None else form.format(value) for form, value in values))
    return shown


def write(path: Path, name: str, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Writes {"bench", "commit", "machine", "seed", "rows"}, a row on each line; makes the folder,
    so that no long run is lost for the lack of one. Keys of rows carry units."""
    head = {"bench": name, "commit": commit(), "machine": machine(), "seed": seed}
    lines = ",\n".join(json_module.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json_module.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def commit() -> str:
    """As `git describe --always --dirty` says it; "" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    if (CHECKOUT / ".git").exists():  # Else it is installed, perhaps inside another repository.
        with suppress(OSError):
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
            return done.stdout.strip()
    return ""


def machine() -> dict[str, Any]:
    """Processor, cores, versions: what figures depend on."""
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.exists() else ""
    name = re.search("^model name\\s*: (.*)$", text, re.MULTILINE)
    return {
        "processor": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
