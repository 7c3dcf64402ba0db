"""Test files that can meet a module: those that import it, directly or through others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "narrows"


def reaching(root: Path, paths: tuple[str, ...], module: str) -> list[str]:
    """The test files in these files and folders whose imports lead to `module`, as paths below
    `root`. Benches come last, because they take longest. Processes that a test starts are not
    seen."""
    tests = [file for path in paths for file in _tests(root / path)]
    known: dict[Path, list[Path]] = {}
    found = [test for test in tests if root / module in _closure(root, test, known)]
    names = [test.relative_to(root).as_posix() for test in found]
    return sorted(names, key=lambda name: ("test_bench" in name, name))


def _tests(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def _closure(root: Path, test: Path, known: dict[Path, list[Path]]) -> set[Path]:
    seen: set[Path] = set()
    todo = [test]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            if file not in known:
                known[file] = list(_imported(root, file))
            todo += known[file]
    return seen


def _imported(root: Path, file: Path) -> Iterator[Path]:
    """Files of the project that a file imports; a package counts by its door."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            place = (
                root.joinpath(*parts[1:]) if parts[0] == PACKAGE else root / "tests" / Path(*parts)
            )
            yield from (f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file())
