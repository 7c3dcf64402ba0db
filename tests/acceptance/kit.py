"""A broker and learners as real processes, for tests that look at public surfaces only.

The surfaces are the command line with its exit codes, `narrows.learner.Learner`,
`narrows status --json`, and the files that a run leaves. Nothing is imported from inside the
broker or the learner, so the same tests judge any implementation.

A test starts things with `site.broker`, `site.learner` and `site.shell`; waits with `wait_until`,
`site.contribute`, `site.adopt` and `site.steps_on`; looks with `site.status`, `site.merged`,
`site.adopted` and `site.journal`; and judges with `site.check_...`.

Processes are forked from a server that has imported torch and Narrows once: a start takes tenths
of a second instead of three. They are processes of their own, and signals reach them as usual.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import psutil
from acceptance import toy
from safetensors.torch import load_file, save
from torch import Tensor

WAIT_S: Final = 30.0
"""Nothing in these tests takes so long, unless it hangs."""

LOSSLESS: Final = ("codec.push=f32-blosc2", "codec.publish=f32-blosc2")
"""Settings for a run whose messages have the same size whatever they say, and lose no bit."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "narrows.__main__", "narrows.learner.learner",
        "narrows.broker.cli.broker", "narrows.broker.cli.status",
    ]
)  # fmt: skip


@dataclass
class Child:
    """A process of a test, and the file that it prints into."""

    name: str
    log_file: Path
    process: ForkServerProcess

    @property
    def ps(self) -> psutil.Process:
        """It, to be looked at, suspended and resumed. Raises psutil.Error if it has ended."""
        return psutil.Process(self.process.pid)

    @property
    def exit_code(self) -> int | None:
        """None while it lives; a negative signal number if a signal ended it."""
        return self.process.exitcode

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tail(self) -> str:
        """Its name, its exit code, and what it printed last."""
        lines = self.log.splitlines()[-25:]
        return "\n".join([f"--- {self.name}, exit code {self.exit_code}", *lines])

    def kill(self) -> None:
        """Ends it as the kernel ends a process that is out of memory."""
        self.process.kill()
        self.process.join(WAIT_S)

    def stop(self) -> None:
        """Ends it in order, and expects that it says so."""
        self.ps.terminate()
        self.ends(0)

    def ends(self, *codes: int, timeout_s: float = WAIT_S) -> None:
        """Waits for its end with one of these exit codes."""
        self.process.join(timeout_s)
        got = self.exit_code
        expected = f"expected that it ends with {codes} in {timeout_s} s"
        assert got in codes, f"{expected}:\n{self.tail()}"

    def limit_files(self, size: int | None) -> None:
        """No file of it grows beyond `size` bytes from now on; None: all may grow. With 0 it
        writes nothing more, as on a full disk."""
        _, most = self.ps.rlimit(psutil.RLIMIT_FSIZE)
        self.ps.rlimit(psutil.RLIMIT_FSIZE, (most if size is None else size, most))

    def close(self) -> None:
        """Kills it and its children, if it lives. It prints where its threads stand before."""
        if self.exit_code is None:
            for each in (*self.ps.children(recursive=True), self.ps):
                with suppress(psutil.NoSuchProcess):
                    each.resume()
                    each.send_signal(signal.SIGABRT)
            self.process.join(5.0)
            self.kill()


def wait_until(
    condition: Callable[[], object], what: str, *children: Child, timeout_s: float = WAIT_S
) -> None:
    """Returns once `condition` holds. Fails at once when one of `children` has ended, with what
    all of them printed last, and after `timeout_s` otherwise."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        ended = [child.name for child in children if child.exit_code is not None]
        if (ended and not condition()) or time.monotonic() > deadline:
            why = f"{' and '.join(ended)} ended" if ended else f"in vain for {timeout_s:.0f} s"
            tails = "\n".join(child.tail() for child in children)
            raise AssertionError(f"waited for {what}, but {why}\n{tails}")
        pause.wait(0.02)


class Ports:
    """Three ports in a row, kept for this test at 127.0.0.1 and 127.0.0.2.

    A bound socket that does not listen keeps the kernel from giving a port to anybody who asks for
    any, also to outgoing connections. A broker can bind it nevertheless, because both sides set
    SO_REUSEADDR. So a killed broker finds its ports free when it comes back.
    """

    def __init__(self) -> None:
        self.first = 0
        while not self.first:
            with ExitStack() as held, suppress(OSError, OverflowError):
                first = 0
                for offset in range(3):
                    for host in ("127.0.0.1", "127.0.0.2"):
                        one = held.enter_context(socket.socket())
                        one.bind((host, first + offset if first else 0))
                        # Only now: another Ports is refused; a broker, which sets it too, is not.
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        first = first or int(one.getsockname()[1])
                self.first, self._held = first, held.pop_all()

    def close(self) -> None:
        self._held.close()


@dataclass
class Site:
    """The folder, the ports and the processes of one test; its end kills what still runs."""

    folder: Path
    ports: Ports = field(default_factory=Ports)
    children: list[Child] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.first}"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def broker(self, *settings: str, crash_at: str = "", **flags: object) -> Child:
        """Starts the broker, or starts it again at the same address, and waits until it serves.

        settings: KEY=VALUE each. flags: those of `narrows broker`. crash_at: a place of a round
        and the visit at which the broker ends there, PLACE:VISIT; then nobody waits for it.
        """
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        paths = {"state_dir": self.state, "events": self.folder / "broker.jsonl"}
        command = ["broker", "--listen", self.address]
        for flag, value in (paths | {"ready_file": ready} | flags).items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        for setting in ("fragments.sync_period_steps=4", *settings):
            command += ["--set", setting]
        child = self._fork("broker", toy.command, self.folder, command, crash_at=crash_at)
        if not crash_at:
            wait_until(ready.exists, "the broker to serve", child)
        return child

    def learner(self, name: str, **options: Any) -> Child:
        """Starts a learner with these options of `toy.learn`."""
        return self._fork(name, toy.learn, self.folder, name, **{"broker": self.address, **options})

    def type(self, folder: Path, command: str) -> Child:
        """Runs a command line of `narrows` in this folder."""
        script, *arguments = shlex.split(command)
        assert script == "narrows", command
        return self._fork(arguments[0], toy.command, folder, arguments)

    def shell(self, name: str, *command: str) -> Child:
        """Starts a program, such as an example, or the script `narrows` as it is installed."""
        return self._fork(name, toy.execute, self.folder, command)

    def _fork(self, name: str, target: Callable[..., None], *arguments: Any, **more: Any) -> Child:
        lives = sum(one.name.split("#")[0] == name for one in self.children)
        child_name = f"{name}#{lives}" if lives else name
        log = self.folder / f"{child_name}.log"
        log.touch()
        process = _forks.Process(target=toy.run, args=(log, target, arguments, more))
        process.start()
        self.children.append(Child(child_name, log, process))
        return self.children[-1]

    def tell(self, *arguments: str) -> str:
        """The output of a command line of `narrows` that must succeed."""
        out = self.folder / f"tell-{len(self.children)}.out"
        child = self._fork("tell", toy.command, self.folder, arguments, out=out)
        child.process.join(WAIT_S)
        said = out.read_text() if out.exists() else ""
        assert child.exit_code == 0, f"narrows {' '.join(arguments)}: {said}{child.tail()}"
        return said

    def status(self, *flags: str) -> dict[str, Any]:
        """The run as `narrows status --json` shows it."""
        return dict(json.loads(self.tell("status", self.address, "--json", *flags)))

    def last_status(self) -> dict[str, Any]:
        """The same as the broker wrote it down when it last ended in order."""
        return dict(self.events("broker", "final")[-1]["status"])

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Lines of this kind in the event file of the broker or of a learner (all its lives)."""
        path = self.folder / f"{name}.jsonl"
        found: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(ValueError):  # A process was killed while it wrote, or is writing.
                record = json.loads(line)
                found += [record] if record.get("event") == kind else []
        return found

    def merged(self) -> list[dict[str, Any]]:
        """Rounds in the broker's event file: fragment, version, digest, the names of the
        contributors, their tokens together."""
        return self.events("broker", "merged")

    def contributions(self, name: str) -> int:
        """Merged pushes of a learner in all lives of the broker, by its event file."""
        return sum(event["contributors"].count(name) for event in self.merged())

    def adopted(self, name: str) -> set[tuple[int, int, str]]:
        """(fragment, version, digest) of what a learner has adopted, in all its lives."""
        installed = self.events(name, "installed")
        return {(one["fragment"], one["version"], one["digest"]) for one in installed}

    def steps_on(self, count: int, *names: str) -> None:
        """Returns once each of these toy learners has made `count` more steps."""
        self._rises(lambda name: toy.steps(self.folder, name), count, "steps", *names)

    def contribute(self, *names: str, count: int = 1) -> None:
        """Returns once the broker has merged `count` more pushes of each of these learners."""
        self._rises(self.contributions, count, "contributions", *names)

    def adopt(self, *names: str, count: int = 2) -> None:
        """Returns once each of these learners has adopted `count` more versions."""
        self._rises(lambda name: len(self.events(name, "installed")), count, "adoptions", *names)

    def merge(self, count: int) -> None:
        """Returns once the broker has made `count` more versions."""
        self._rises(lambda _: len(self.merged()), count, "versions", "broker")

    def _rises(self, get: Callable[[str], int], count: int, what: str, *names: str) -> None:
        goals = {name: get(name) + count for name in names}
        newest = {one.name.split("#")[0]: one for one in self.children}
        watched = [newest[name] for name in {"broker": 0} | goals if name in newest]
        wait_until(
            lambda: all(get(name) >= goals[name] for name in names),
            f"{count} more {what} of {', '.join(names)}",
            *watched,
        )

    def journal(self) -> dict[tuple[int, int], str]:
        """(fragment, version) -> digest of each durable round. The broker must not be running."""
        lines = self.tell("journal", "show", str(self.state), "--json").splitlines()
        rows = [json.loads(line) for line in lines]
        return {(row["fragment"], row["version"]): row["published"] for row in rows}

    def check_durable(self, *names: str) -> None:
        """Every version that a learner ever adopted is in the journal, bit for bit: one that was
        lost may have been made again, with other bits. The broker must not be running."""
        self.check_copies(*names, made={(*key, digest) for key, digest in self.journal().items()})

    def check_copies(self, *names: str, made: set[tuple[int, int, str]] | None = None) -> None:
        """Every version that a learner adopted is, bit for bit, one of these, or else of those that
        the broker made."""
        # First what was adopted: the run goes on, and a merge stands in its file before it is sent.
        adopted = {name: {one for one in self.adopted(name) if one[1] > 0} for name in names}
        if made is None:
            made = {(one["fragment"], one["version"], one["digest"]) for one in self.merged()}
        for name, own in adopted.items():
            assert own, f"{name} has adopted nothing"
            assert own <= made, f"{name} has adopted what is not there: {sorted(own - made)}"

    def check_run(self, *names: str) -> None:
        """The copies of these learners are equal, the journal is in order, and replaying it gives
        the model that the broker left. The broker must not be running."""
        self.check_copies(*names)
        for part in ("audit", "replay"):
            self.tell("journal", part, str(self.state))

    def export(self) -> dict[str, Tensor]:
        """The tensors that `narrows export` writes, by name."""
        to = self.folder / "export.safetensors"
        self.tell("export", str(self.state), "--to", str(to))
        return load_file(to)

    def final(self, name: str) -> dict[str, Tensor]:
        """The tensors that a learner has saved at its end, by name."""
        return load_file(self.folder / f"{name}.safetensors")

    def close(self) -> None:
        """Kills what still runs. A test that fails shows what this prints."""
        for child in self.children:
            if not child.name.startswith("tell") or child.exit_code != 0:
                print(child.tail())
            said = len(child.log)
            child.close()
            print(child.log[said:], end="")
        self.ports.close()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """True if two models have the same names, types, shapes and bits."""
    return save(one) == save(other)
