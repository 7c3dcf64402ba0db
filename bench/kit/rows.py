"""A bench is data and one function: cells, `measure(cell)`, columns, a headline.

Cells are dataclasses. Their fields are what a bench varies, and the first keys of each row. The
JSON file has the rows, and the commit and the machine that they come from.
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
"""The checkout that has this file. An installed package has none, and names no commit."""

WIDTH: Final = 140
"""Characters of a line that a table may take; a narrower terminal folds its lines."""

Short: TypeAlias = Annotated[bool, Parameter(help="Fewer or shorter cells: minutes, not hours.")]
Json: TypeAlias = Annotated[Path | None, Parameter(name="--json", help="File for the rows.")]
Row: TypeAlias = dict[str, Any]
AnyCell = TypeVar("AnyCell")
"""The dataclass of a bench's cells."""


class Column(NamedTuple):
    """One column of the table; the JSON has every key of a row."""

    title: str
    key: str
    form: str = "{}"
    """Format of the value, as `shown` takes it."""


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

    An error is raised, but the rows before it are written first.
    """
    rows = list[Row]()
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    try:
        for number, cell in enumerate(cells, 1):
            started_s = time.monotonic()
            key = asdict(cell)  # type: ignore[call-overload]
            rows.append({**key, **measure(cell)})
            what = " ".join(f"{field}={value}" for field, value in key.items())
            took = f"{time.monotonic() - started_s:.1f} s"
            console.print(f"{number}/{len(cells)}  {what}  {took}", style="dim")
    finally:
        if json is not None:
            write(json, name, rows, seed)
    console.print(table(columns, rows))
    for line in headline(rows):
        console.print(line, style="bold", soft_wrap=True)
    return rows


def table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """The rows for people: text is justified to the left, numbers to the right."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        is_text = all(isinstance(row.get(column.key), str) for row in rows)
        made.add_column(column.title, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(shown(row.get(column.key), column.form) for column in columns))
    return made


def shown(value: object, form: str) -> str:
    """The value in this format; "-" for None."""
    return "-" if value is None else form.format(value)


def write(path: Path, name: str, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Writes {"bench", "commit", "machine", "seed", "rows"}, a row on each line.

    Keys of rows carry units. The folder is made, so that no long run is lost for the lack of one.
    """
    head = {"bench": name, "commit": commit(), "machine": machine(), "seed": seed}
    lines = ",\n".join(json_module.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json_module.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def commit() -> str:
    """The commit as `git describe --always --dirty` names it; "" outside a checkout."""
    # An installed package may lie inside another repository, whose commit would say nothing.
    if (CHECKOUT / ".git").exists():
        with suppress(OSError):
            done = subprocess.run(
                ["git", "describe", "--always", "--dirty"],
                cwd=CHECKOUT,
                capture_output=True,
                text=True,
            )
            return done.stdout.strip()
    return ""


def machine() -> dict[str, Any]:
    """Processor, cores and versions, on which figures depend."""
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.exists() else ""
    models = re.findall("^model name\\s*: (.*)$", text, re.MULTILINE)
    return {
        "processor": next(iter(models), platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
