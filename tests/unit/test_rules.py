"""Rules of the house that a machine can hold: imports, purity, size, first lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT
PACKAGE = "narrows."

LAYERS = {
    "proto": {"proto"},
    "broker": {"broker", "proto"},
    "learner": {"learner", "proto"},
    "bench": {"bench", "broker", "learner", "proto"},
}
"""Folders that each folder may import from."""

PURE = (
    "broker/syncer", "broker/merging", "broker/rounds.py", "broker/process/host.py",
    "broker/process/pipeline.py", "broker/process/downlink.py", "learner/session.py",
    "learner/fragment.py", "learner/host.py", "proto/flow", "proto/layout.py",
    "proto/messages.py", "proto/ports.py", "proto/codec",
)  # fmt: skip
"""State machines and arithmetic: time and chance are arguments, so the simulator runs them."""

IMPURE = {"zmq", "time", "threading", "socket", "random", "secrets", "torch"}

LINES_MAX = {"proto": 3750, "broker": 7250, "learner": 3500}
"""Lines of a folder with docstrings and blanks: an addition pays with a deletion."""

RIDDLES = re.compile(r'"""(Of|What|Who) .*')
"""Openings that say nothing until the end of the sentence."""

SLEEPS = re.compile(r"\b(time|asyncio)\.sleep\(")


def modules(folder: str = "") -> Iterator[Path]:
    """Every module of the house below a folder or file."""
    places = [HOUSE / folder] if folder else [HOUSE / each for each in LAYERS]
    for place in places:
        yield from [place] if place.suffix else sorted(place.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that a module imports while it runs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_run_one_way(folder: str) -> None:
    for path in modules(folder):
        inside = [name.removeprefix(PACKAGE) for name in imports(path) if name.startswith(PACKAGE)]
        wrong = [name for name in inside if name.split(".")[0] not in LAYERS[folder]]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("place", PURE)
def test_pure_places_have_no_clock_socket_or_thread(place: str) -> None:
    paths = list(modules(place))
    assert paths, place
    for path in paths:
        wrong = sorted(IMPURE & {name.split(".")[0] for name in imports(path)})
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("folder", ["proto", "broker"])
def test_only_learners_and_benches_know_torch(folder: str) -> None:
    for path in modules(folder):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


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
