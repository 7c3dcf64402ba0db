"""Copies of the working tree, in which one module at a time is another one while tests run."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = (
    ".*_cache", ".git", ".hypothesis", ".venv*", "__pycache__", "*.egg-info", "build", "dist",
    "runs",
)  # fmt: skip

DATA_BYTES_MAX = 6 << 30
"""Of a process that a mutant has made endless: the machine belongs to others too."""

TEST_S = 120
"""A test that takes so long hangs; the longest fast one takes 7 s on an idle core."""

SLOW_TEST_S = 400

RUN_S = 3000
"""What the limit of a test does not see: a module that never ends while it is imported."""

WHERE = "import narrows.broker.model as m; m.warm_up(); print(m.__file__)"


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest said."""

    passed: bool
    test: str = ""
    """The test that failed or hung; where no test did, what ended the run."""
    hung: bool = False


class Tree:
    """A copy of the working tree, whose tests import the copy's modules."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        # Caches of compiled kernels are this copy's own: one that is shared would hide a mutant.
        path = os.pathsep.join([str(self.root / "src"), str(self.root / "tests")])
        own = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(folder / "numba")}
        one = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        one |= {"PYTHONDONTWRITEBYTECODE": ""}
        self._environment = os.environ | own | one
        self._stamp_s = 1_000_000_000
        command = [sys.executable, "-c", WHERE]
        found = subprocess.run(
            command,
            env=self._environment,
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
        )
        assert Path(found.stdout.strip()).resolve().is_relative_to(self.root.resolve()), found

    def text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        """Replaces a module. Each text gets a time of its own, in whole seconds, or Python and
        numba would take a text of equal length for the one that they have compiled."""
        file = self.root / path
        file.write_text(text, encoding="utf-8")
        self._stamp_s += 10
        os.utime(file, (self._stamp_s, self._stamp_s))

    def test(self, arguments: Sequence[str], *, test_s: int = TEST_S) -> Outcome:
        """Runs pytest until a test fails or hangs. Raises RuntimeError if it cannot run at all."""
        command = [
            sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider",
            "-o", f"faulthandler_timeout={test_s}", "-o", "faulthandler_exit_on_timeout=true",
            *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.root, env=self._environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return Outcome(False, "nothing: it never ended", hung=True)
        finally:
            _end(process)
        return outcome(process.returncode, output)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends pytest and what it has started: they are a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def outcome(code: int, output: str) -> Outcome:
    """What pytest's exit status and its output, with -v, mean."""
    if code in (0, 5):  # 5: none of the files has a test of this kind.
        return Outcome(True)
    if code in (3, 4):
        raise RuntimeError(f"pytest did not run:\n{output[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if failed:
        return Outcome(False, failed[0])
    begun = re.findall(r"^(tests/\S+::.+?)(?: (?:[A-Z]+|Timeout) .*)?$", output, re.MULTILINE)
    last = begun[-1].strip() if begun else "the import"
    return Outcome(False, last, hung="Timeout (" in output)
