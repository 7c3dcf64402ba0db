"""Child processes of a bench: broker and learners as a user would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from narrows.proto.errors import ErrorCode, NarrowsError

START_TIMEOUT_S = 120.0
"""A broker that does not serve after so long has failed to start."""

STOP_TIMEOUT_S = 30.0
"""Time to end in order after SIGTERM, before SIGKILL."""


def environment() -> dict[str, str]:
    """One thread per process: five processes with a pool each are slow on two cores."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(threads, "1"), "PYTHONUNBUFFERED": "1"}


@dataclass
class Processes:
    """Children by name, their output in `folder`; leaving the block ends them all."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, subprocess.Popen[bytes]]
    )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start(
        self, name: str, *arguments: str, module: str = "narrows", under: Sequence[str] = ()
    ) -> None:
        """Starts `python -m module arguments...`, `under` a command such as `ip netns exec SITE`;
        output goes to NAME.log, appended."""
        self.launch(name, [*under, *self.python(module), *arguments])

    @staticmethod
    def python(module: str) -> list[str]:
        """The command that runs a module of ours."""
        return [sys.executable, "-m", module]

    def launch(self, name: str, command: Sequence[str], *, talks: bool = False) -> None:
        """Starts any command; if it `talks`, its stdin and stdout are pipes, else as `start`."""
        pipe = subprocess.PIPE if talks else None
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe or log,
                stderr=log,
                env=environment(),
            )

    def start_broker(self, *arguments: str, name: str = "broker", under: Sequence[str] = ()) -> str:
        """Starts a broker and returns its address once it serves."""
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        self.start(name, "broker", "--ready-file", str(ready), *arguments, under=under)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if self.running[name].poll() is not None or time.monotonic() > deadline:
                raise NarrowsError(
                    ErrorCode.BROKER_UNREACHABLE, f"the broker did not start: {self.tail(name)}"
                )
            time.sleep(0.02)
        return ready.read_text().strip()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal; after SIGKILL the process is waited for."""
        process = self.running[name]
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()

    def wait(self, name: str, timeout_s: float) -> int:
        """Exit code of a child that ends by itself. Raises NarrowsError if it does not."""
        try:
            return self.running[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NarrowsError(
                ErrorCode.MISUSE,
                f"{name} is still running after {timeout_s:.0f} s",
                got=self.tail(name),
            ) from None

    def check(self, *names: str, but: str = "") -> None:
        """Raises NarrowsError if one of these, `but` one, has ended with a failure."""
        for name in names:
            code = self.running[name].poll()
            if name != but and code:
                raise NarrowsError(
                    ErrorCode.MISUSE, f"{name} ended with code {code}", got=self.tail(name)
                )

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a child's output."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return " | ".join(text.splitlines()[-lines:])

    def stop_all(self) -> None:
        alive = [process for process in self.running.values() if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self.running.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
