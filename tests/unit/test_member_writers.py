"""Each object of a Member is written by one module of the syncer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrows.broker import syncer

DISTRICT = Path(syncer.__file__).parent
#: What is assigned, or changed in place, and the only module that does it.
WRITERS = {
    "presence": "roster",
    "copies": "serving",
    "uplink": "pushes",
    "credit": "credit",
    "silence": "data_path",
    "participation": "participation",
    "report": "machine",
    "up_bits_per_s": "rates",
    "given_up": "ending",
}
CHANGING = {"add", "append", "clear", "expect", "move", "pop", "settle", "update"}


def targets(tree: ast.AST) -> Iterator[ast.expr]:
    """Everything that a module assigns, or calls a changing method of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        elif isinstance(node, ast.AugAssign):
            yield node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGING:
                yield node.func.value


def names(target: ast.expr) -> Iterator[str]:
    """The attributes on the way to a target: `member.copies.held[0]` has copies and held."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        if isinstance(target, ast.Attribute):
            yield target.attr
        target = target.value


def written(text: str) -> set[str]:
    """The objects of a Member that a module writes."""
    return {name for target in targets(ast.parse(text)) for name in names(target)} & set(WRITERS)


@pytest.mark.parametrize("path", sorted(DISTRICT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_writes_only_what_is_its_own(path: Path) -> None:
    allowed = {name for name, writer in WRITERS.items() if writer == path.stem}
    assert written(path.read_text(encoding="utf-8")) <= allowed


def test_every_object_has_its_writer() -> None:
    own = {"participation"}  # Its methods write themselves.
    for name in WRITERS.keys() - own:
        text = (DISTRICT / f"{WRITERS[name]}.py").read_text(encoding="utf-8")
        assert name in written(text), f"{WRITERS[name]} no longer writes {name}"


@pytest.mark.parametrize(
    "text", ["m.copies.held[1] = 2", "m.given_up |= True", "m.uplink.flow.settle()"]
)
def test_a_planted_write_is_found(text: str) -> None:
    assert written(text)
