"""Copies of the working tree, in which one module at a time is another one while tests run."""

from __future__ import annotations

import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = (
    ".*_cache", ".git", ".hypothesis", ".venv*", "__pycache__", "*.egg-info", "build", "dist",
    "runs",
)  # fmt: skip

DATA_BYTES_MAX = 6 << 30
"""Memory limit of a process that a mutant has made endless: the machine belongs to others too."""

TEST_S = 120
"""A test that takes so long hangs; the longest fast one takes 7 s on an idle core."""

SLOW_TEST_S = 400

RUN_S = 3000
"""Limit for a hang outside of any test, such as a module that never ends while it is imported."""

OUTPUT_BYTES_MAX = 64 << 20

MARK = "NARROWS_MUTATION"

WHERE = "import narrows.broker.merging.model as m; m.warm_up(); print(m.__file__)"


@dataclass(frozen=True)
class Outcome:
    """Result of a run of pytest."""

    passed: bool
    test: str = ""
    """The test that failed or hung; where no test did, what ended the run."""
    hung: bool = False


class Tree:
    """A copy of the working tree, whose tests import the copy's modules."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        self._stamp_s = 1_000_000_000
        self._environment = os.environ | {
            MARK: self._mark.partition("=")[2],
            "PYTHONPATH": os.pathsep.join(str(self.root / name) for name in ("src", "tests")),
            # The compiled kernels are this copy's own: from a shared cache no mutant would be seen.
            "NUMBA_CACHE_DIR": str(folder / "numba"),
            "PYTHONDONTWRITEBYTECODE": "",  # Each run would else compile all modules again.
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
        }
        found = subprocess.run(
            [sys.executable, "-c", WHERE], env=self._environment, cwd=self.root,
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
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
            "--hypothesis-seed=1", "-o", f"faulthandler_timeout={test_s}",
            "-o", "faulthandler_exit_on_timeout=true", *arguments,
        ]  # fmt: skip
        # Into a file: what endless processes print would fill the memory of this one.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=self._environment, start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))
            try:
                code = process.wait(timeout=RUN_S)
            except subprocess.TimeoutExpired:
                return Outcome(False, "nothing: it never ended", hung=True)
            finally:
                process.kill()
                process.wait()
                end_all(self._mark)
            output.seek(0)
            return outcome(code, output.read(OUTPUT_BYTES_MAX).decode(errors="replace"))


def end_all(mark: str) -> None:
    """Ends every process that has inherited this environment variable: a test that hangs or is
    killed leaves what it has started, some of it in sessions of its own."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue


def outcome(code: int, output: str) -> Outcome:
    """The meaning of pytest's exit status and of its output with -v."""
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
