"""The script that plants errors: each operator does what it says, a seed repeats its list."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mutation.imports import reaching
from mutation.operators import OPERATORS, mutants
from mutation.run import Drawn, draw, flat, known_equivalent, stages
from mutation.targets import FAST, TARGETS
from mutation.tree import ROOT, Outcome, Tree, end_all, outcome
from running import HANG_S

SAMPLES: list[tuple[str, str, list[str]]] = [
    ("negated_condition", "if a:\n    b = c", ["if not (a):"]),
    ("negated_condition", "x = a if b or c else d", ["x = a if not (b or c) else d"]),
    ("negated_condition", "while a < b:\n    a.pop()", ["while not (a < b):"]),
    ("negated_condition", "x = [a for a in b if a]", ["x = [a for a in b if not (a)]"]),
    ("off_by_one", "x = a < b", ["x = a <= b"]),
    ("off_by_one", "x = (a) >= (b)", ["x = (a) > (b)"]),
    ("off_by_one", "x = a[-1]", ["x = a[-2]"]),
    ("off_by_one", "x = a == b or a is True or 1.0", []),
    ("dropped_call", "f(a)", ["pass"]),
    ("dropped_call", "a += f(b)", ["pass"]),
    ("dropped_call", "a = f(b)", []),
    ("dropped_call", "x = [a, f(b), *g(c)]", ["x = [a, *g(c)]", "x = [a, f(b)]"]),
    ("swapped_argument", "x = f(a, b.c, d=e)", ["x = f(b.c, a, d=e)"]),
    ("swapped_argument", "x = f(a, (b or c))", ["x = f(b or c, (a))"]),
    ("swapped_argument", "x = max(a, b) + f(a, a) + f(a, *b)", []),
    ("removed_check", "if a:\n    b()\n    return", ["pass"]),
    ("removed_check", "if a:\n    b()", []),
    ("removed_check", "if a:\n    return\nelse:\n    b()", []),
    ("removed_check", "if a:\n    b()\nelif c:\n    return", []),
    ("removed_check", "x = a and (b or c)", ["x = (b or c)", "x = (a)", "x = a and ((c))"]),
    ("removed_check", "x = a < b < c", ["x = (a < b)", "x = (b < c)"]),
]  # fmt: skip


def function(body: str) -> str:
    return "def f():\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(("operator", "body", "expected"), SAMPLES)
def test_an_operator_makes_the_error_that_it_names(
    operator: str, body: str, expected: list[str]
) -> None:
    text = function(body)
    diffs = [mutant.diff(text) for mutant in mutants(text) if mutant.operator == operator]
    added = [line[1:].strip() for diff in diffs for line in diff.splitlines() if line[0] == "+"]
    assert set(expected) <= set(added)
    assert bool(expected) == bool(added)
    assert all("-" in diff for diff in diffs)
    for mutant in mutants(text):
        ast.parse(mutant.applied(text))


def test_every_operator_has_a_sample_and_finds_places_in_the_modules() -> None:
    names = {operator.__name__ for operator in OPERATORS}
    assert {name for name, _, expected in SAMPLES if expected} == names
    for target in TARGETS.values():
        assert {m.operator for m in mutants((ROOT / target.path).read_text())} == names


def test_what_only_tests_the_code_or_speaks_to_people_is_left_alone() -> None:
    text = """LIMIT = 1 << 30
@wrapped(1, 2)
def f(a: Literal[1, 2]) -> None:
    assert a < 3, f"{a + 4}"
class C:
    def check(self):
        if self.a:
            return
"""
    assert mutants(text) == []


def test_an_error_stands_where_its_line_says_and_nowhere_else() -> None:
    text = "# ä\n\n\nclass C:\n    def f(self):\n        return g('ö', self.x < 1)\n"
    found = {(m.operator, m.place, m.line, m.applied(text).splitlines()[5]) for m in mutants(text)}
    assert found == {
        ("off_by_one", "C.f", 6, "        return g('ö', self.x <= 1)"),
        ("off_by_one", "C.f", 6, "        return g('ö', self.x < 2)"),
        ("swapped_argument", "C.f", 6, "        return g(self.x < 1, 'ö')"),
    }
    assert {m.applied(text).splitlines()[0] for m in mutants(text)} == {"# ä"}


def small() -> dict[str, str]:
    return {
        "one": function("if a < 1:\n    return g(a, b)\nh()"),
        "two": function("x = [a, f(b), *g(c)]\nwhile not (a and b):\n    f(1, 2)"),
    }


def test_a_seed_gives_its_list_again_and_another_one_another() -> None:
    first, again, other = draw(small(), 1, 8), draw(small(), 1, 8), draw(small(), 2, 8)
    assert first == again != other
    assert len(set(first)) == 8
    assert draw(small(), 1, 4) == first[:4]


def test_a_list_ends_when_there_is_nothing_more_to_draw() -> None:
    every = sum(len(mutants(text)) for text in small().values())
    assert len(set(draw(small(), 1, 10_000))) == every


def test_a_mutant_is_known_again_after_its_lines_have_moved() -> None:
    before, after = function("if a < 1:\n    b()"), "\n\n" + function("c()\nif a < 1:\n    b()")
    keys = [{Drawn("x", m, m.diff(text)).key for m in mutants(text)} for text in (before, after)]
    assert keys[0] < keys[1]
    assert flat("-        a\n+  b\n") == "-a\n+b"


def test_what_is_listed_as_equivalent_exists() -> None:
    """An entry whose code has changed says nothing about the new code: remove it."""
    made = {
        Drawn(name, mutant, mutant.diff(text)).key
        for name, text in {n: (ROOT / t.path).read_text() for n, t in TARGETS.items()}.items()
        for mutant in mutants(text)
    }
    known = known_equivalent()
    assert [key for key in known if key not in made] == []
    assert all(len(reason) > 20 for reason in known.values())


def test_all_that_is_listed_is_there() -> None:
    for target in TARGETS.values():
        paths = [*FAST, target.path, *target.near, *target.sockets, *target.slow]
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tests_of_the_module_come_first_and_no_test_twice() -> None:
    near, sockets, rest, slow = stages(TARGETS["merge"])
    assert near.arguments == TARGETS["merge"].near
    assert not near.repeat and not rest.repeat and sockets.repeat and slow.repeat
    assert "tests/protocol/test_seeds.py" in rest.arguments
    assert not set(rest.arguments) & set(near.arguments)


def test_a_test_meets_what_its_imports_lead_to() -> None:
    near = ("tests/unit/test_fragment_session.py", "tests/unit/test_units.py")
    assert reaching(ROOT, near, TARGETS["fragment"].path) == ["tests/unit/test_fragment_session.py"]
    whole = reaching(ROOT, ("tests/unit",), TARGETS["downlink"].path)
    assert "tests/unit/test_downlink.py" in whole and "tests/unit/test_units.py" not in whole
    assert "test_bench" in whole[-1]


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (0, "tests/a.py::b PASSED [1%]", Outcome(True)),
        (1, "tests/a.py::b PASSED\ntests/a.py::c FAILED\nFAILED tests/a.py::c", "tests/a.py::c"),
        (1, "FAILED tests/a.py::c[1 (2)] - AssertionError: no - no", "tests/a.py::c[1 (2)]"),
        (2, "ERROR tests/a.py - SyntaxError: no\n!!! stopping", "tests/a.py"),
        (-9, "tests/a.py::b PASSED [1%]\ntests/a.py::c[1 2] ", "tests/a.py::c[1 2]"),
    ],
)
def test_what_pytest_says_is_read(code: int, output: str, expected: Outcome | str) -> None:
    wanted = Outcome(False, expected) if isinstance(expected, str) else expected
    assert outcome(code, output) == wanted


def test_a_test_that_hangs_is_named() -> None:
    output = "tests/a.py::b PASSED [1%]\ntests/a.py::c Timeout (0:02:00)!\nThread 0x0"
    assert outcome(1, output) == Outcome(False, "tests/a.py::c", hung=True)


def test_tests_that_cannot_run_at_all_are_no_verdict() -> None:
    with pytest.raises(RuntimeError, match="no such option"):
        outcome(4, "no such option")


def test_what_a_test_leaves_behind_is_ended_and_nothing_else() -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    marked = {**os.environ, "NARROWS_MUTATION": "of this test"}
    with (
        subprocess.Popen(command, env=marked, start_new_session=True) as left,
        subprocess.Popen(command) as other,
    ):
        end_all("NARROWS_MUTATION=of this test")
        assert left.wait(HANG_S) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


@pytest.mark.slow
def test_a_mutant_in_a_compiled_kernel_is_seen_and_leaves_no_trace(tmp_path: Path) -> None:
    """numba would take a kernel out of its cache, compiled from another text."""
    tree, path = Tree(tmp_path), "broker/merging/sums.py"
    original = tree.text(path)
    mutated = original.replace("part_mean[i] += factor", "part_mean[i] -= factor")
    assert len(mutated) == len(original) and mutated != original
    tests = ("tests/golden/test_merge.py",)
    assert tree.test(tests).passed
    tree.write(path, mutated)
    assert tree.test(tests).test.startswith(tests[0])
    tree.write(path, original)
    assert tree.test(tests).passed
    assert (ROOT / path).read_text() == original
