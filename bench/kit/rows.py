"""A bench is data and one function: cells, `measure(cell)`, columns, a headline.

Cells are dataclasses: their fields are what is varied, and the first columns of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from narrows.bench.kit import result

WIDTH: Final = 140
"""Columns that a table may take; a narrower terminal folds its lines."""

Json: TypeAlias = Annotated[Path | None, Parameter(name="--json", help="File for the rows.")]
Row: TypeAlias = dict[str, Any]
Cell = TypeVar("Cell")


class Column(NamedTuple):
    """One column of the table; the JSON has every key of a row."""

    title: str
    key: str
    form: str = "{}"
    """Format of the value; None is shown as "-"."""


def bench(
    name: str,
    cells: Sequence[Cell],
    measure: Callable[[Cell], Mapping[str, Any]],
    columns: Sequence[Column],
    headline: Callable[[Sequence[Row]], Sequence[str]],
    *,
    json: Path | None,
    seed: int = 0,
) -> list[Row]:
    """Measures cell by cell, prints the table and the headline, and writes the JSON.

    What was measured before an error is written all the same, and the error raised.
    """
    console, rows = Console(highlight=False), list[Row]()
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
            result.write(json, name, rows, seed)
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
