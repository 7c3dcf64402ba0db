"""A bench as a process that a signal ends, and all of its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from running import HANG_S, wait_until

INTERRUPTED = 130


class BenchProcess:
    """A running command with its own folder for temporary files.

    The name of that folder is in the environment of all descendants, whatever their command lines,
    parents and sessions are. So they are found by it. Leaving the block kills those that are left.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        self.temporary, self._log = folder / "temporary", folder / "output"
        self.temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.pid = self._process.pid

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    @property
    def output(self) -> str:
        """The output so far, in one line."""
        return " ".join(self._log.read_text().split())

    def running(self) -> dict[int, list[str]]:
        """Command lines of the command itself and its descendants, without zombies."""
        mark = f"TMPDIR={self.temporary}".encode()
        found: dict[int, list[str]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It has ended.
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_text().split("\0")
        return found

    def interrupt(self, number: int) -> None:
        """Sends the signal; fails unless it says so, and no process stays behind."""
        self._process.send_signal(number)
        assert self._process.wait(HANG_S) == INTERRUPTED, self.output
        assert self.output.endswith("narrows: interrupted"), self.output
        wait_until(lambda: not self.running(), "the end of its processes")
