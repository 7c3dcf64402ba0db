"""Rules that no linter holds: size, first lines, no sleep. Imports are held by import-linter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "broker", "learner", "bench")

LINES_MAX = {"proto": 3410, "broker": 6300, "learner": 3060, "bench": 4960}
"""Lines of a folder with docstrings and blanks: an addition pays with a deletion."""

RIDDLES = re.compile(r'"""(Of|What|Who) .*')
"""Openings that say nothing until the end of the sentence."""

SLEEPS = re.compile(r"\b(time|asyncio)\.sleep\(")


def modules(*folders: str) -> Iterator[Path]:
    """Every module of the house below these folders; without any, of all."""
    for folder in folders or FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LINES_MAX)
def test_a_folder_stays_within_its_lines(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in modules(folder))
    assert lines <= LINES_MAX[folder], f"{folder}: {lines} lines"


def test_every_module_says_first_what_it_is_for() -> None:
    for path in modules():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)) or not text.strip(), f"{path} has no docstring"


def test_every_docstring_opens_with_its_subject() -> None:
    for path in [*modules(), *sorted((ROOT / "tests").rglob("*.py"))]:
        found = RIDDLES.search(path.read_text())
        assert path == Path(__file__) or found is None, f"{path}: {found}"


def test_no_test_sleeps() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert path == Path(__file__) or not SLEEPS.search(path.read_text()), path
