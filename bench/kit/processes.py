"""Real processes of one run, for benches and acceptance tests: how they start, speak and end.

All are forks of one server that has loaded torch and Narrows already, so that a start takes tenths
of a second instead of three. This module itself imports the public face of a learner alone: what
a test or a bench learns here, a user can see too (commands, files of events, logs, exit codes).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from narrows.learner import ErrorCode, NarrowsError

WAIT_S: Final = 30.0
"""Longest wait, unless a caller allows more."""
LOOK_S: Final = 0.02
LOOPBACK: Final = "127.0.0.1"

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["narrows.bench.kit.server"])


@dataclass(frozen=True)
class Child:
    """A process, and the file that it prints into."""

    name: str
    process: BaseProcess
    log_file: Path
    log_start: int
    """Bytes that earlier processes of this name have printed into it."""
    wait_s: float
    """Longest wait for its end."""
    remedy: str
    """The advice to a user whom it has failed; "" if there is none."""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it lives; a negative signal number if a signal ended it."""
        return self.process.exitcode

    @property
    def log(self) -> str:
        """Its output so far."""
        return self.log_file.read_bytes()[self.log_start :].decode(errors="replace")

    def signal(self, number: int) -> None:
        """Sends a signal to it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it without a chance to say anything. Raises NarrowsError if it had ended before."""
        self.signal(signal.SIGKILL)
        self.ends(-signal.SIGKILL)

    def stop(self) -> None:
        """Ends it in order, and expects that it says so."""
        self.signal(signal.SIGTERM)
        self.ends(0)

    def ends(self, *codes: int) -> None:
        """Waits for its end with one of these exit codes. Raises NarrowsError."""
        self.process.join(self.wait_s)
        if self.exitcode not in codes:
            expected = " or ".join(map(str, codes))
            got = "no end" if self.exitcode is None else f"code {self.exitcode}"
            raise self.failure(f"its end with code {expected}", got)

    def failure(self, expected: str, got: str) -> NarrowsError:
        """The error of a caller who has waited for it in vain."""
        lines = self.log.splitlines()
        said = f" and said {lines[-1][:300]!r}" if lines else ""
        given = {"expected": expected, "got": got + said, "remedy": self.remedy}
        return NarrowsError(ErrorCode.UNFINISHED, self.name, **given)


def wait_until(
    condition: Callable[[], object], what: str, *children: Child, timeout_s: float = WAIT_S
) -> None:
    """Returns once `condition` holds. Raises NarrowsError at once when one of `children` has ended
    meanwhile, and after `timeout_s` otherwise."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        for child in children:
            if child.exitcode is not None and not condition():
                raise child.failure(what, f"its end with code {child.exitcode}")
        if time.monotonic() > deadline:
            got = f"nothing in {timeout_s:.0f} s"
            if children:
                raise children[0].failure(what, got)
            raise NarrowsError(ErrorCode.UNFINISHED, "the wait", expected=what, got=got)
        pause.wait(LOOK_S)


class EventReader:
    """The events that the processes of one name have written, one JSON object on each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0
        self._events: list[dict[str, Any]] = []

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind so far. A line that a killed process left half is passed over."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError):
                    self._events.append(json.loads(line))
        return [each for each in self._events if each["event"] == kind]


class Processes:
    """The folder, the ports and the processes of one run; leaving the block ends them all.

    Without a `folder` a temporary one serves.
    """

    wait_s = WAIT_S
    """Longest wait for a process of this run."""
    hosts: tuple[str, ...] = (LOOPBACK,)
    """Addresses of this machine at which the three ports are kept for this run."""
    remedy = ""
    """The advice to a user whose run has failed; "" if there is none."""

    def __init__(self, folder: Path | None = None) -> None:
        # The server of forks takes its environment from here, once.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        self.stack = ExitStack()
        """Resources that end with the run."""
        if folder is None:
            temporary = TemporaryDirectory(prefix="narrows-")
            folder = Path(self.stack.enter_context(temporary))
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state = self.folder / "state"
        self.port = self.stack.enter_context(three_ports(*self.hosts))
        """The first of the three; the broker's data ports follow it."""
        self.address = f"tcp://{LOOPBACK}:{self.port}"
        self.children: list[Child] = []
        """All that were started."""
        self.running: dict[str, Child] = {}
        """The last that was started under each name."""
        self.environment: dict[str, dict[str, str]] = {}
        """Variables that processes get when they start, by their name."""
        self._event_readers: dict[str, EventReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what still runs."""
        for child in self.children:
            child.process.kill()
            child.process.join()
        self.stack.close()

    def fork(self, name: str, target: Callable[..., None], *given: Any, **more: Any) -> Child:
        """Starts a process that calls `target`; the output goes to NAME.log in the folder."""
        log_file = self.folder / f"{name}.log"
        log_file.touch()
        log_start = log_file.stat().st_size
        begin = (name, log_file, self.environment.get(name, {}), target, given, more)
        process = _forks.Process(target=_begin, args=begin, daemon=True)
        process.start()
        child = Child(name, process, log_file, log_start, self.wait_s, self.remedy)
        self.children.append(child)
        self.running[name] = child
        return child

    def command(self, name: str, *arguments: str, folder: Path | None = None) -> Child:
        """Starts `narrows ARGUMENTS` in a folder; in that of the run unless another is given."""
        return self.fork(name, _command, folder or self.folder, arguments)

    def serve(self, settings: Iterable[str], *flags: str, crash_at: str = "") -> Child:
        """Starts the broker, or its next life at the same address; returns once it serves.

        settings: KEY=VALUE each. flags: those of `narrows broker`. `crash_at` is PLACE:VISIT, where
        it ends itself; then this returns at once.
        """
        ready = self.folder / "broker.ready"
        ready.unlink(missing_ok=True)
        self.environment["broker"] = {"NARROWS_CRASH_AT": crash_at}
        command = [
            "broker", "--listen", self.address, "--state-dir", str(self.state),
            "--events", str(self.event_reader("broker").path), "--ready-file", str(ready), *flags,
        ]  # fmt: skip
        for setting in settings:
            command += ["--set", setting]
        broker = self.command("broker", *command)
        if not crash_at:
            wait_until(ready.exists, "the broker to serve", broker, timeout_s=self.wait_s)
        return broker

    def page(self, *flags: str) -> str:
        """Starts `narrows page` of this run on any free port; its address."""
        page = self.command(
            "page", "page", "--broker", self.address, "--listen", f"tcp://{LOOPBACK}:0", *flags
        )
        wait_until(lambda: "http://" in page.log, "the page's address", page)
        return page.log.partition("is at ")[2].partition(";")[0]

    def tell(self, *arguments: str) -> str:
        """The output of a `narrows` command, which must succeed."""
        child = self.command("tell", *arguments)
        child.ends(0)
        del self.running["tell"]
        return child.log

    def ask(self, *arguments: str) -> Any:
        """Runs a `narrows` command that prints JSON, and reads that."""
        return json.loads(self.tell(*arguments))

    def event_reader(self, name: str) -> EventReader:
        """The events of a broker or learner of this name, of all its lives."""
        return self._event_readers.setdefault(name, EventReader(self.folder / f"{name}.jsonl"))

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The events of this kind that a process, or one of this name before it, has written."""
        return self.event_reader(name).events(kind)

    def merges(self) -> list[dict[str, Any]]:
        """The broker's `merged` events of all its lives, oldest first."""
        return self.events("broker", "merged")

    def installed(self, name: str) -> list[dict[str, Any]]:
        """A learner's events of versions that it has received; `time_s` is the system's."""
        return self.events(name, "installed")

    def final(self) -> dict[str, Any]:
        """The last status of a broker that has ended in order."""
        return dict(self.events("broker", "final")[-1]["status"])


@contextmanager
def three_ports(*hosts: str) -> Generator[int]:
    """The first of three ports in a row that nobody else gets while the block lasts.

    A bound socket that does not listen keeps the kernel from giving a port to anybody who asks for
    any, and a broker may bind it all the same: both set SO_REUSEADDR. So its next life finds its
    ports free.
    """
    while True:
        with ExitStack() as held:
            first = 0
            try:
                for offset in range(3):
                    for host in hosts:
                        one = held.enter_context(socket.socket())
                        one.bind((host, first + offset if first else 0))
                        # Only now: another run is refused; a broker, which sets it too, is not.
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        if not first:
                            first = int(one.getsockname()[1])
            except (OSError, OverflowError):
                continue  # One of the others is somebody's.
            yield first
            return


# In the children.


def end_with_parent() -> None:
    """Kills this process when the one that started it has ended, however it did."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _begin(
    name: str,
    log_file: Path,
    environment: dict[str, str],
    target: Callable[..., None],
    given: tuple[Any, ...],
    more: dict[str, Any],
) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(OSError):  # `ps` and `top` show the name, where the system is a Linux.
        Path("/proc/self/comm").write_text(name)
    file = os.open(log_file, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()  # A process that gets SIGABRT prints where its threads stand.
    os.environ.update(environment)
    target(*given, **more)


def _command(folder: Path, arguments: tuple[str, ...]) -> None:
    from narrows.__main__ import main

    os.chdir(folder)
    sys.argv = ["narrows", *arguments]
    main()
