"""PROTOCOL.md and its tables, for the tests that compare them with the code."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from narrows.proto import frames

DOCUMENT = Path(frames.__file__).with_name("PROTOCOL.md").read_text(encoding="utf-8")


def tables(text: str) -> Iterator[list[list[str]]]:
    """Every table: its rows of cells, the head first."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("|"):
            rows = [line, *takewhile(lambda each: each.startswith("|"), lines)]
            yield [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def table(*head: str) -> list[list[str]]:
    """The rows of the only table whose head begins so."""
    found = [rows[2:] for rows in tables(DOCUMENT) if tuple(rows[0][: len(head)]) == head]
    assert len(found) == 1, f"{len(found)} tables with the head {head}"
    assert all(len(row) == len(found[0][0]) for row in found[0])
    return found[0]


def number(text: str) -> float:
    """`4096`, `2^48`, `2^-100`, `0.25 s`."""
    base, _, exponent = text.removesuffix(" s").partition("^")
    return int(base) ** int(exponent) if exponent else float(base)
