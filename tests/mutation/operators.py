"""Five kinds of small errors, planted in the text of a module: what tests ought to notice.

A mutant replaces one range of the source and leaves everything else as it stands, so that its diff
shows nothing but the error. Not touched are `assert` statements and methods called `check` (they
test the code, and no test tests them), annotations, decorators, f-strings (texts for people)
and the values of module constants (choices; the tables in proto/PROTOCOL.md hold them).
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import TypeAlias

SIGNS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
"""Text of a comparison, and the comparison that is off by one."""

SYMMETRIC = ("min", "max")
"""Functions to which the order of their arguments means nothing."""

GUARDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
"""An `if` without `else` that ends in one of these is a check."""


@dataclass(frozen=True)
class Mutant:
    """One error: `after` in place of the bytes from `start` to `end` of a module's text."""

    operator: str
    place: str
    """Dotted name of the function or class around it, "" at the top."""
    line: int
    start: int
    end: int
    after: str

    def applied(self, text: str) -> str:
        """The module's text with the error in it."""
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def diff(self, text: str) -> str:
        """The lines that it removes (-) and adds (+)."""
        lines = unified_diff(text.splitlines(), self.applied(text).splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


class Source:
    """A module's text, and where in it the nodes of its syntax tree stand."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte offsets of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = self._starts[node.lineno - 1] + node.col_offset
        return first, self._starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, start: int, end: int) -> str:
        return self._data[start:end].decode()

    def line(self, offset: int) -> int:
        return bisect_right(self._starts, offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.between(*self.span(node))


Edit: TypeAlias = tuple[int, int, str]
"""First byte, end, and the text in their place."""


def negated_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """if x: → if not (x):"""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    elif isinstance(node, ast.match_case) and node.guard is not None:
        tests = [node.guard]
    for test in tests:
        yield *source.span(test), f"not ({source.of(test)})"


def off_by_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    """< → <=, 1 → 2"""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield *source.span(node), str(node.value + 1)
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, sign, right in zip(operands, node.ops, operands[1:], strict=False):
            if type(sign) in SIGNS:
                start, end = source.span(left)[1], source.span(right)[0]
                yield start, end, source.between(start, end).replace(*SIGNS[type(sign)], 1)


def dropped_call(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f() and x += f() → pass; [a, f()] → [a]"""
    calls = isinstance(node, ast.Expr | ast.AugAssign) and isinstance(node.value, ast.Call)
    if calls and isinstance(node, ast.stmt):
        yield *source.span(node), "pass"
    if isinstance(node, ast.List):
        for index, element in enumerate(node.elts):
            called = element.value if isinstance(element, ast.Starred) else element
            if isinstance(called, ast.Call):
                rest = [source.of(e) for i, e in enumerate(node.elts) if i != index]
                yield *source.span(node), f"[{', '.join(rest)}]"


def swapped_argument(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(a, b) → f(b, a)"""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) in SYMMETRIC:
        return
    for one, other in zip(node.args, node.args[1:], strict=False):
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if not starred and source.of(one) != source.of(other):
            (start, before_end), (after_start, end) = source.span(one), source.span(other)
            gap = source.between(before_end, after_start)
            yield start, end, source.of(other) + gap + source.of(one)


def removed_check(node: ast.AST, source: Source) -> Iterator[Edit]:
    """if x: return → pass; a and b → a; a < b < c → a < b"""
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], GUARDS):
        if source.of(node).startswith("if"):  # Not elif, which cannot stand for itself.
            yield *source.span(node), "pass"
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            rest = [value for i, value in enumerate(node.values) if i != index]
            whole = ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
            yield *source.span(node), f"({ast.unparse(whole)})"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        first = ast.Compare(node.left, node.ops[:-1], node.comparators[:-1])
        last = ast.Compare(node.comparators[0], node.ops[1:], node.comparators[1:])
        for part in (first, last):
            yield *source.span(node), f"({ast.unparse(part)})"


OPERATORS: tuple[Callable[[ast.AST, Source], Iterator[Edit]], ...] = (
    negated_condition,
    off_by_one,
    dropped_call,
    swapped_argument,
    removed_check,
)


def mutants(text: str) -> list[Mutant]:
    """Every mutant of a module, operator by operator, in the order of the text."""
    source = Source(text)
    found: list[Mutant] = []
    for operator in OPERATORS:
        of_this = [
            Mutant(operator.__name__, place, source.line(edit[0]), *edit)
            for node, place in _nodes(source.tree, "")
            for edit in operator(node, source)
        ]
        found += sorted(of_this, key=lambda mutant: (mutant.start, mutant.end, mutant.after))
    return found


def _nodes(node: ast.AST, place: str) -> Iterator[tuple[ast.AST, str]]:
    """All nodes that may be changed, each with the dotted name of where it is."""
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if node.name == "check":
            return
        place = f"{place}.{node.name}" if place else node.name
    yield node, place
    passed_over = _passed_over(node)
    for child in ast.iter_child_nodes(node):
        if child not in passed_over:
            yield from _nodes(child, place)


def _passed_over(node: ast.AST) -> Sequence[ast.AST | None]:
    """Annotations, decorators, and the constants of a module."""
    match node:
        case ast.Module():
            return [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
        case ast.FunctionDef():
            return [*node.decorator_list, node.returns]
        case ast.ClassDef():
            return node.decorator_list
        case ast.arg() | ast.AnnAssign():
            return [node.annotation]
        case _:
            return []
