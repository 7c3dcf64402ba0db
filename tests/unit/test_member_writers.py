"""Each object of a Member is written by one module of the syncer."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
CHANGING = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "expect", "extend",
    "extendleft", "insert", "intersection_update", "move", "pop", "popitem", "popleft", "remove",
    "reverse", "rotate", "setdefault", "settle", "sort", "update",
}  # fmt: skip


def targets(tree: ast.AST) -> Iterator[ast.expr]:
    """Everything that a module assigns or deletes, or calls a changing method of."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=found) | ast.Delete(targets=found):
                for target in found:
                    yield from flat(target)
            case ast.AugAssign(target=target) | ast.For(target=target):
                yield from flat(target)
            case ast.AnnAssign(target=target, value=ast.expr()) | ast.comprehension(target=target):
                yield from flat(target)
            case ast.withitem(optional_vars=ast.expr() as target):
                yield from flat(target)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in CHANGING:
                yield ast.Attribute(value, attr)
            case ast.Call(func=ast.Name("setattr" | "delattr"), args=[owner, name, *_]):
                # A name that is not spelt out might be any.
                spelt = str(name.value) if isinstance(name, ast.Constant) else "*"
                yield ast.Attribute(owner, spelt)
            case _:
                pass


def flat(target: ast.expr) -> Iterator[ast.expr]:
    """The targets in `a, (b, *c) = ...`."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from flat(part)
        case ast.Starred(value=value):
            yield from flat(value)
        case _:
            yield target


def names(target: ast.expr, aliases: Mapping[str, set[str]]) -> Iterator[str]:
    """The attributes on the way to a target: `member.copies.held[0]` has copies and held. What a
    local name stands for is on the way too, unless it is only bound anew."""
    is_part = isinstance(target, ast.Attribute | ast.Subscript)
    while isinstance(target, ast.Attribute | ast.Subscript):
        if isinstance(target, ast.Attribute):
            yield from WRITERS if target.attr == "*" else [target.attr]
        target = target.value
    if is_part and isinstance(target, ast.Name):
        yield from aliases.get(target.id, ())


def aliases_in(function: ast.AST) -> dict[str, set[str]]:
    """The objects of a Member that a local name may stand for: `held = member.copies.held`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[target], value=value):
                for name, part in bound(target, value):
                    found.setdefault(name, set()).update(set(names(part, {})) & set(WRITERS))
            case ast.NamedExpr(target=ast.Name(name), value=value):
                found.setdefault(name, set()).update(set(names(value, {})) & set(WRITERS))
            case _:
                pass
    return found


def bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are bound to: two of each in `a, b = c, d`."""
    match target, value:
        case ast.Name(name), _:
            yield name, value
        case ast.Tuple(elts=left), ast.Tuple(elts=right):
            for each, part in zip(left, right, strict=False):
                yield from bound(each, part)
        case _:
            pass


def written(text: str) -> set[str]:
    """The objects of a Member that a module writes."""
    tree, found = ast.parse(text), set[str]()
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in (tree, *functions):
        aliases = aliases_in(scope) if scope is not tree else {}
        for target in targets(scope):
            found |= set(names(target, aliases)) & set(WRITERS)
    return found


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
    "text",
    [
        "m.copies.held[1] = 2", "m.given_up |= True", "m.uplink.flow.settle()",
        "m.copies.held.extend([1])", "m.credit.waiting.popleft()", "m.given_up: bool = True",
        "for m.given_up in x: pass", "[0 for m.report in x]", "with f() as m.report: pass",
        "setattr(m, 'report', 1)", "setattr(m, name, 1)", "setattr(m.copies, 'held', 1)",
        "del m.copies.held[0]", "(a, (m.report, *b)) = x", "[a, m.report] = x",
        "def f():\n    held = m.copies.held\n    held[0] = 1",
        "def f():\n    held = m.copies.held\n    held.append(1)",
        "def f():\n    a, credit = 1, m.credit\n    credit.due_at = 2",
        "def f():\n    if report := m.report:\n        report.step = 2",
    ],
)  # fmt: skip
def test_a_planted_write_is_found(text: str) -> None:
    assert written(text)


@pytest.mark.parametrize(
    "text",
    [
        "held = m.copies.held", "x = m.report", "def f():\n    report = m.report\n    report = 2",
        "m.copies.count(1)", "def f():\n    a = m.credit.due_at\n    a += 1", "other.report: int",
    ],
)  # fmt: skip
def test_what_is_only_read_is_no_write(text: str) -> None:
    assert written(text) == set()
