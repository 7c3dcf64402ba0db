"""Children that start in milliseconds: forked from one process that has imported everything.

A learner imports PyTorch, which takes seconds of a core and 200 MB. Forks share both. The forking
process has a single thread and no socket, so that a fork never interrupts another action.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

from narrows.bench.kit.processes import environment
from narrows.proto.errors import ErrorCode, NarrowsError

READY_TIMEOUT_S = 120.0
REAP_S = 0.05
"""Interval at which the forking process looks for dead children."""

READ_BYTES = 1 << 16
SINGLE_THREAD = {"BLOSC_NTHREADS": "1", "NUMEXPR_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Settings of libraries that start threads when they are imported."""

Work = Callable[[str, str], None]
"""The work of a child, given its name and an argument."""


class Nursery:
    """The parent's side; leaving the block kills every child."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        """`python -m module arguments...` calls `serve`; its children log to NAME.log."""
        self._folder, self._command = folder, [sys.executable, "-m", module, *arguments]
        self._rest = b""
        #: Names of the children that run, stopped ones too.
        self.running: set[str] = set()
        #: Exit codes of children, negative for a signal, in the order of their ends.
        self.ended: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        """Returns once children can be started. Raises NarrowsError if it cannot be."""
        with (self._folder / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment() | SINGLE_THREAD,
                # Ctrl-C is for the parent, which ends the children in order.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Process id of the parent of the children."""
        return self._process.pid

    def start(self, name: str, argument: str) -> None:
        """Forks a child that does its work under this name."""
        self.running.add(name)
        self._tell({"start": name, "argument": argument})

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a child; nothing if it has ended."""
        self._tell({"signal": name, "number": number})

    def look(self, timeout_s: float = 0.0) -> None:
        """Reads which children have ended; waits at most so long for news."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return
        data = os.read(self._process.stdout.fileno(), READ_BYTES)
        if not data:
            raise self._has_ended()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ended" in message:
                self.running.discard(message["ended"])
                self.ended.append((message["ended"], message["code"]))

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
        if not ready:
            raise NarrowsError(ErrorCode.MISUSE, "the process that starts learners hangs")
        self.look()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            raise self._has_ended() from None

    def _has_ended(self) -> NarrowsError:
        return NarrowsError(
            ErrorCode.MISUSE,
            "the process that starts learners has ended",
            remedy=f"see {self._folder / 'nursery.log'}",
        )

    def _end(self) -> None:
        """Closes the input of the process; it then kills its children and leaves."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(folder: Path, work: Work) -> None:
    """Forks and signals children as the parent asks on standard input, until the input ends."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads cannot be forked"
    gc.collect()
    gc.freeze()  # The collector would write to pages that all children share.
    children, rest = dict[str, int](), b""
    _say({"ready": True})
    while True:
        if select.select([0], [], [], REAP_S)[0]:
            data = os.read(0, READ_BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), children, folder, work)
        _reap(children)
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)
    for pid in children.values():
        os.waitpid(pid, 0)


def _obey(command: dict[str, Any], children: dict[str, int], folder: Path, work: Work) -> None:
    if "start" in command:
        name = command["start"]
        assert name not in children, name
        pid = os.fork()
        if pid == 0:
            _be_child(folder / f"{name}.log", lambda: work(name, command["argument"]))
        children[name] = pid
    elif command["signal"] in children:
        os.kill(children[command["signal"]], command["number"])


def _reap(children: dict[str, int]) -> None:
    for name, pid in list(children.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[name]
            _say({"ended": name, "code": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _be_child(log: Path, work: Callable[[], None]) -> NoReturn:
    """The life of a child. It shares no pipe with its parent, and never returns into the parent's
    loop."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
