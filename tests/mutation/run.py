"""How many small errors do the tests notice? `python tests/mutation/run.py` (make mutation).

Draws mutants by a seed, runs the tests against each in a copy of the tree, and writes what became
of them. Two may run side by side; the working tree is only read.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.imports import reaching
from mutation.operators import OPERATORS, Mutant, mutants
from mutation.targets import FAST, TARGETS, Target
from mutation.tree import ROOT, SLOW_TEST_S, TEST_S, Outcome, Tree

EQUIVALENT = Path(__file__).with_name("equivalent.toml")

SURVIVED, KILLED, TIMED_OUT, EQUAL = "survived", "killed", "timed out", "equivalent"


@dataclass(frozen=True)
class Drawn:
    """A mutant of one of the targets."""

    target: str
    mutant: Mutant
    diff: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The same wherever in the file the lines stand, and however they are indented."""
        return self.target, self.mutant.place, flat(self.diff)


@dataclass(frozen=True)
class Row:
    """Verdict on a mutant."""

    number: int
    operator: str
    file: str
    line: int
    place: str
    diff: str
    verdict: str
    by: str
    """The test that noticed it; for an equivalent mutant the reason."""
    seconds: float


@dataclass(frozen=True)
class Stage:
    """Tests that are run together."""

    arguments: tuple[str, ...]
    repeat: bool = False
    """With real sockets and clocks a failure counts only if it comes again."""
    test_s: int = TEST_S


def flat(diff: str) -> str:
    """A diff without indentation and empty lines."""
    lines = [line.strip() for line in diff.splitlines()]
    return "\n".join(f"{line[0]}{line[1:].strip()}" for line in lines if line)


def draw(texts: Mapping[str, str], seed: int, count: int) -> list[Drawn]:
    """`count` different mutants: of each the module, then the operator, then the place by chance,
    so that long modules and frequent operators get no more than others."""
    rng = random.Random(seed)
    of_kind: dict[tuple[str, str], list[Mutant]] = {}
    for name, text in texts.items():
        for mutant in mutants(text):
            of_kind.setdefault((name, mutant.operator), []).append(mutant)
    drawn: list[Drawn] = []
    while len(drawn) < count and of_kind:
        name, operator = rng.choice(sorted(texts)), rng.choice(OPERATORS).__name__
        left = of_kind.get((name, operator))
        if left:
            mutant = left.pop(rng.randrange(len(left)))
            drawn.append(Drawn(name, mutant, mutant.diff(texts[name])))
        else:
            of_kind.pop((name, operator), None)
    return drawn


def stages(target: Target) -> list[Stage]:
    """The fast tests first, those of the module before the others; real processes last."""
    others = [path for path in reaching(ROOT, FAST, target.path) if path not in target.near]
    all_stages = [
        Stage(target.near),
        Stage(target.sockets, repeat=True),
        Stage(tuple(others)),
        Stage(("-m", "slow", *target.slow), repeat=True, test_s=SLOW_TEST_S),
    ]
    return [stage for stage in all_stages if stage.arguments]


def examine(tree: Tree, drawn: Drawn) -> Outcome:
    """Runs stage after stage until one notices the mutant: a test that fails with it, and passes
    without it."""
    path = TARGETS[drawn.target].path
    original = tree.text(path)
    mutated = drawn.mutant.applied(original)
    tree.write(path, mutated)
    try:
        for stage in stages(TARGETS[drawn.target]):
            arguments = stage.arguments
            while not (outcome := tree.test(arguments, test_s=stage.test_s)).passed:
                named = outcome.test.startswith("tests/")
                # Where no test ran at all, the tests must at least be found without the mutant.
                alone = ("-m", "", outcome.test) if named else (*arguments, "--collect-only")
                repeats = stage.repeat and named
                if not repeats or not tree.test(alone, test_s=stage.test_s).passed:
                    tree.write(path, original)
                    without = tree.test(alone, test_s=stage.test_s)
                    tree.write(path, mutated)
                    if without.passed:
                        return outcome
                    if "::" not in outcome.test:
                        raise RuntimeError(f"{outcome.test} fails without any mutant")
                print(f"  {outcome.test} says nothing: it fails now and then", flush=True)
                arguments = (*arguments, "--deselect", outcome.test)
    finally:
        tree.write(path, original)
    return Outcome(True)


def known_equivalent() -> dict[tuple[str, str, str], str]:
    """Reasons by the key of a mutant that changes nothing which anybody could notice."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])
    return {(e["module"], e["place"], flat(e["diff"])): e["reason"] for e in entries}


class Report:
    """The verdicts so far, written to a file after each."""

    def __init__(self, file: Path, head: Mapping[str, object]) -> None:
        self._file, self._head = file, head
        self._lock = threading.Lock()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows = sorted([*self.rows, row], key=lambda row: row.number)
            totals = dict(Counter(row.verdict for row in self.rows))
            whole = {**self._head, "totals": totals, "mutants": [asdict(row) for row in self.rows]}
            self._file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            text = "\n".join([f"{self._head} {totals}", "", *map(_lines, self.rows)])
            self._file.with_suffix(".txt").write_text(text, encoding="utf-8")
        print(f"{row.number:3d} {row.seconds:5.0f} s  {_first_line(row)}", flush=True)


def _first_line(row: Row) -> str:
    by = f" by {row.by}" if row.verdict in (KILLED, TIMED_OUT) else ""
    return f"{row.verdict}{by}: {row.operator} {row.file}:{row.line} {row.place}"


def _lines(row: Row) -> str:
    reason = f"\n  {row.by}" if row.verdict == EQUAL else ""
    return f"{row.number} {_first_line(row)}{reason}\n{row.diff}\n"


def verdict_on(
    tree: Tree, drawn: Drawn, equal: Mapping[tuple[str, str, str], str]
) -> tuple[str, str]:
    """The verdict, and the test or the reason."""
    if drawn.key in equal:
        return EQUAL, equal[drawn.key]
    outcome = examine(tree, drawn)
    if outcome.passed:
        return SURVIVED, ""
    return (TIMED_OUT if outcome.hung else KILLED), outcome.test


def work(tree: Tree, todo: queue.SimpleQueue[tuple[int, Drawn] | None], report: Report) -> None:
    """Examines one mutant after another in its own copy of the tree."""
    equal = known_equivalent()
    while (job := todo.get()) is not None:
        number, drawn = job
        begun = time.monotonic()
        verdict, by = verdict_on(tree, drawn, equal)
        mutant, path = drawn.mutant, TARGETS[drawn.target].path
        seconds = round(time.monotonic() - begun, 1)
        report.add(
            Row(
                number, mutant.operator, path, mutant.line, mutant.place, drawn.diff,
                verdict, by, seconds,
            )
        )  # fmt: skip


def commit() -> str:
    """The working tree's commit, "" outside a repository; "+" at its end: with changes."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def run(seed: int, count: int, jobs: int, file: Path, only: Sequence[int] = ()) -> Report:
    """Examines the mutants of this seed, or those of these numbers only."""
    texts = {name: (ROOT / target.path).read_text() for name, target in TARGETS.items()}
    report = Report(file, {"seed": seed, "count": count, "commit": commit()})
    todo: queue.SimpleQueue[tuple[int, Drawn] | None] = queue.SimpleQueue()
    for number, drawn in enumerate(draw(texts, seed, count), 1):
        if not only or number in only:
            todo.put((number, drawn))
    with tempfile.TemporaryDirectory(prefix="narrows-mutation-") as scratch:
        folders = [Path(scratch) / str(job) for job in range(jobs)]
        for folder in folders:
            folder.mkdir()
        trees = [Tree(folder) for folder in folders]
        for _ in trees:
            todo.put(None)
        threads = [threading.Thread(target=work, args=(tree, todo, report)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(report.rows) < len(only or range(count)):
        raise SystemExit("not all were examined: see the error above")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree, side by side")
    parser.add_argument("--report", type=Path, default=Path("runs/mutation.json"))
    parser.add_argument("--only", type=int, nargs="*", default=(), help="numbers of the list")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    if options.list:
        texts = {name: (ROOT / target.path).read_text() for name, target in TARGETS.items()}
        for number, drawn in enumerate(draw(texts, options.seed, options.count), 1):
            mutant = drawn.mutant
            print(f"{number} {mutant.operator} {drawn.target}:{mutant.line} {mutant.place}")
            print(drawn.diff)
        return
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report = run(options.seed, options.count, options.jobs, options.report, options.only)
    totals = Counter(row.verdict for row in report.rows)
    print(f"seed {options.seed}: {dict(totals)}, see {options.report.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
