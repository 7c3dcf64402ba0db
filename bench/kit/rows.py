"""Rows files of long benches, one JSON line per run: what was interrupted goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; [] if it is not there."""
    return rows_in(path.read_bytes()) if path.exists() else []


def rows_in(text: bytes) -> list[dict[str, Any]]:
    """A row per line; one that was cut off, by an interruption or a SIGKILL, is left out, and so
    is what is no JSON object."""
    rows: list[object] = []
    for line in text.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)]


def rows_by_key(path: Path, key_of: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, Any]]:
    """The rows of a results file that have a key; those of another bench or version have none."""
    found: dict[str, dict[str, Any]] = {}
    for row in read_rows(path):
        with suppress(KeyError):
            found[key_of(row)] = row
    return found


def end_last_line(path: Path) -> None:
    """So that the next row does not continue one that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a row after the last whole line."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
