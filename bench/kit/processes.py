"""Child processes of a bench: broker and learners as a user would start them."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from narrows.bench.kit.failures import ProcessFailed, ended, logs_kept, reason_of
from narrows.proto.errors import ConfigError

START_TIMEOUT_S = 120.0
"""A broker that does not serve after so long has failed to start."""

STOP_TIMEOUT_S = 30.0
"""Time to end in order after SIGTERM, before SIGKILL."""

ABORT_TIMEOUT_S = 3.0
"""The same after an error or Ctrl-C: what the children still measure, nobody will read."""

NOT_GIVEN_AWAY = (10_000, 32_000)
"""Ports below those that Linux, macOS and Windows take for outgoing connections, unless they are
told otherwise."""

_RANDOM = random.SystemRandom()


def environment() -> dict[str, str]:
    """One thread per process: five processes with a pool each are slow on two cores."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(threads, "1"), "PYTHONUNBUFFERED": "1"}


@contextmanager
def work_folder(keep: Path | None, name: str) -> Generator[Path]:
    """`keep`, which must be empty, or a temporary folder, of which only the logs of a failure
    stay. Raises ConfigError."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise ConfigError(f"{keep} is not empty", remedy="name a new folder with --keep")
        with logs_kept(keep, stays=True):
            yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"narrows-{name}-") as folder, logs_kept(Path(folder)):
        yield Path(folder)


def free_ports() -> int:
    """A port of 127.0.0.1 with two free ones after it: where a broker can come back.

    Not one that the system gives away: while nobody listens there, it would become the near end
    of some connection.
    """
    while True:
        port = _RANDOM.randrange(*NOT_GIVEN_AWAY)
        try:
            for number in (port, port + 1, port + 2):
                with socket.socket() as each:
                    each.bind(("127.0.0.1", number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return port


@dataclass
class Processes:
    """Children by name, their output in `folder`; leaving the block ends them all."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, subprocess.Popen[bytes]]
    )
    prefix: tuple[str, ...] = ()
    """Before every command; it must become that command, as `ip netns exec NAME` does."""
    groups: bool = False
    """A signal goes to a child's own children as well: some systems fork their members' parts."""
    stop_timeout_s: float = STOP_TIMEOUT_S

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop_timeout_s = ABORT_TIMEOUT_S
        self.stop_all()

    def start(self, name: str, *arguments: str, module: str = "narrows") -> None:
        """Starts `python -m module arguments...`; output goes to NAME.log, appended."""
        self.start_command(name, sys.executable, "-m", module, *arguments)

    def start_command(self, name: str, *command: str) -> None:
        """Starts any command; output goes to NAME.log, appended."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.prefix, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=self.groups,
            )

    def start_broker(self, *arguments: str, name: str = "broker") -> str:
        """Starts a broker and returns its address once it serves."""
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        self.start(name, "broker", "--ready-file", str(ready), *arguments)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if self.running[name].poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed(name, f"the broker did not start: {self.reason(name)}")
            time.sleep(0.02)
        return ready.read_text().strip()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal; after SIGKILL the process is waited for."""
        process = self.running[name]
        self._send(process, number)
        if number == signal.SIGKILL:
            process.wait()

    def wait(self, name: str, timeout_s: float) -> int:
        """Exit code of a child that ends by itself. Raises NarrowsError if it does not."""
        try:
            return self.running[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(name, f"{name} is still running after {timeout_s:.0f} s") from None

    def check(self, *names: str, but: str = "") -> None:
        """Raises NarrowsError if one of these, `but` one, has ended with a failure."""
        for name in names:
            code = self.running[name].poll()
            if name != but and code:
                raise ended(name, code, self.log(name))

    def reason(self, name: str) -> str:
        """Why a child has failed, in one line of its own."""
        return reason_of(self.log(name))

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a child's output, for tests."""
        return " | ".join(self.log(name).splitlines()[-lines:])

    def log(self, name: str) -> str:
        """All that a child has said."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _send(self, process: subprocess.Popen[bytes], number: int) -> None:
        if not self.groups:
            process.send_signal(number)
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def stop_all(self) -> None:
        alive = [process for process in self.running.values() if process.poll() is None]
        for process in alive:
            self._send(process, signal.SIGCONT)
            self._send(process, signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout_s
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.groups:
            # What outlived its parent; the group of an ended one that has no members is gone.
            for process in self.running.values():
                self._send(process, signal.SIGKILL)
