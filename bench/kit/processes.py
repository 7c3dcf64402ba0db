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
"""Longest start of a broker, until it serves."""

STOP_TIMEOUT_S = 30.0
"""Time to end in order after SIGTERM, before SIGKILL."""

ABORT_TIMEOUT_S = 3.0
"""The same after an error or Ctrl-C: nobody will read what the children still measure."""

NOT_GIVEN_AWAY = (10_000, 32_000)
"""Ports below those that Linux, macOS and Windows give to outgoing connections by default."""

_RANDOM = random.SystemRandom()


def environment() -> dict[str, str]:
    """Environment of a child: one thread per process. Five processes with a pool each are slow on
    two cores."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(threads, "1"), "PYTHONUNBUFFERED": "1"}


@contextmanager
def work_folder(keep: Path | None, name: str) -> Generator[Path]:
    """`keep`, which must be empty, or a temporary folder, of which only the logs of a failure stay.

    Raises ConfigError.
    """
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
    """A port of 127.0.0.1 with two free ports after it, where a broker can come back.

    The port is not one that the system gives to outgoing connections: while nobody listens there,
    it could become the near end of such a connection.
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
    """Words before every command. They must become that command, as `ip netns exec NAME` does."""
    groups: bool = False
    """True: a signal goes to a child's own children as well. Some systems fork parts of their
    members."""
    stop_timeout_s: float = STOP_TIMEOUT_S

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop_timeout_s = ABORT_TIMEOUT_S
        self.stop_all()

    def start(self, name: str, *arguments: str, module: str = "narrows") -> None:
        """Starts `python -m module arguments...`; appends the output to NAME.log."""
        self.start_command(name, sys.executable, "-m", module, *arguments)

    def start_command(self, name: str, *command: str) -> None:
        """Starts any command; appends the output to NAME.log."""
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
        """Exit code of a child that ends by itself. Raises NarrowsError if it does not end."""
        try:
            return self.running[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(name, f"{name} is still running after {timeout_s:.0f} s") from None

    def check(self, *names: str, but: str = "") -> None:
        """Raises NarrowsError if one of these children, except `but`, has ended with a failure."""
        for name in names:
            code = self.running[name].poll()
            if name != but and code:
                raise ended(name, code, self.log(name))

    def reason(self, name: str) -> str:
        """Reason why a child has failed, in one line."""
        return reason_of(self.log(name))

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a child's output, for tests."""
        return " | ".join(self.log(name).splitlines()[-lines:])

    def log(self, name: str) -> str:
        """The whole output of a child."""
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
            # Processes that outlived their parent. An ended group without members is gone.
            for process in self.running.values():
                self._send(process, signal.SIGKILL)
