"""Reads the tables of PROTOCOL.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import narrows.proto

PAGE = (Path(narrows.proto.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")


def tables(header: str) -> Iterator[list[str]]:
    """The cells of every row under each table whose first column is called `header`."""
    inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            inside = False
        elif cells[0] == header:
            inside = True
        elif inside and set(cells[0]) - set("-"):
            yield cells
        elif inside and cells[0] == "":
            yield cells


def structures(header: str) -> dict[str, dict[str, str]]:
    """Name -> {field: type as the page writes it} of a table of messages or structures."""
    found: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for name, names, types, *_ in tables(header):
        if match := re.match(r"\*\*(\w+)\*\*", name):
            fields = found.setdefault(match[1], {})
        each = [part.strip() for part in names.split(",") if part.strip()]
        kinds = [part.strip() for part in types.partition(" = ")[0].split(",")]
        for index, field in enumerate(each):
            fields[field] = kinds[index] if len(kinds) == len(each) else kinds[0]
    return found
