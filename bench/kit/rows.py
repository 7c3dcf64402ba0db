"""Rows files of long benches, one JSON line per run, so that a bench goes on after an
interruption."""

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
    """One row per line. Lines that an interruption or a SIGKILL cut off are left out, and so is
    everything else that is not a JSON object."""
    rows: list[object] = []
    for line in text.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)]


def rows_by_key(path: Path, key_of: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, Any]]:
    """The rows of a results file, by key. Rows of another bench or version have no key."""
    rows: dict[str, dict[str, Any]] = {}
    for row in read_rows(path):
        with suppress(KeyError):
            rows[key_of(row)] = row
    return rows


def end_last_line(path: Path) -> None:
    """Ends the last line, so that the next row does not continue one that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a row after the last whole line."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
