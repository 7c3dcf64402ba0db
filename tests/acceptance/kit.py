"""A broker and learners as real processes, for tests that look at public surfaces only.

The surfaces are the command line with its exit codes, `narrows.learner.Learner`,
`narrows status --json`, and the files that a run leaves. Nothing is imported from inside the
broker or the learner, so the same tests judge any implementation. Where an implementation spells a
flag, a setting or a field differently, the tables in this module change, and no test does.

A test starts things with `site.broker`, `site.learner`, `site.narrows` and `site.shell`; waits with
`wait_until`, `site.contribute` and `site.steps_on`; looks with `site.view`, `site.merged`,
`site.adopted` and `site.journal`; and judges with `site.check_...`.

Processes are forked from a server that has imported torch and Narrows once: a start takes tenths
of a second instead of three. They are processes of their own, and signals reach them as usual.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psutil
from acceptance import toy

WAIT_S: Final = 30.0
"""Nothing in these tests takes so long, unless it hangs."""

TAIL_LINES: Final = 25

PRELOADED: Final = [
    "torch",
    "torch._dynamo",
    "narrows.__main__",
    "narrows.learner.learner",
    "narrows.broker.cli.broker",
    "narrows.broker.cli.status",
]
"""Modules that the server of forks imports; one that does not exist is passed over."""

SETTINGS: Final = {
    "learners_at_start": "run.learners_at_start",
    "fragments": "fragments.count",
    "sync_period": "fragments.sync_period_steps",
    "overlap": "fragments.overlap_steps",
    "quorum": "merge.quorum",
    "outer_lr": "merge.outer_lr",
    "outer_momentum": "merge.outer_momentum",
    "push_codec": "codec.push",
    "publish_codec": "codec.publish",
    "up": "wan.up",
    "down": "wan.down",
    "journal_keep": "broker.keep_history",
}
"""Names that the broker gives to what the tests set."""

FLAGS: Final = {
    "goal_tokens": "--goal-tokens",
    "mode": "--mode",
    "keys": "--keys",
    "seeder": "--seeder",
}
"""The same for what has a flag of its own."""

CODECS: Final = {"lossless": "f32-blosc2"}
"""Codecs that a test wants for a property of theirs, not for their name."""

DEFAULTS: Final[dict[str, object]] = {"sync_period": 4}

HISTORY_LOST: Final = "is an older copy"
"""Words in the broker's note that learners hold versions which its state directory lacks."""

DISK_REMEDY: Final = "cannot be written"
"""Words in the broker's log when the disk takes no more."""

NOT_FINAL: Final = "without the final model:"
"""Words before the names of those that lack the final model, each with its fragments."""

CRASH_POINTS: Final = ("merged", "appended", "durable", "installed", "published")
"""Places of a round at which `NARROWS_CRASH_AT=NAME:N` ends a broker at the Nth visit."""

SILENT_S: Final = 3.0
"""Seconds after which rounds do not wait for a learner of which nothing is heard."""

GIVEN_UP_S: Final = 30.0
"""Seconds without anything moving after which the end of a run does not wait for a learner."""

LOST: Final = "lost"
"""State of a learner in the status, of which nothing has been heard for long."""

ROUND: Final = re.compile(r"fragment (\d+) version (\d+) .*published ([0-9a-f]{8,})")
"""A round in the output of `narrows journal show`."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(PRELOADED)


@dataclass
class Child:
    """A process of a test, and the file that it prints into."""

    name: str
    log_file: Path
    process: BaseProcess | subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; a negative signal number if a signal ended it."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return self.process.exitcode

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def tail(self) -> str:
        return "\n".join(self.log.splitlines()[-TAIL_LINES:])

    def send(self, number: int) -> None:
        """Sends a signal, if the process lives."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):  # Its exit code is on its way to us.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it as the kernel ends a process that is out of memory."""
        self.send(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def limit_files(self, size: int | None) -> None:
        """No file of it grows beyond `size` bytes from now on; None: all may grow. With 0 it
        writes nothing more, as on a full disk."""
        _, most = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Waits for its end and gives the exit code."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None:
            if isinstance(self.process, subprocess.Popen):
                _sleep(0.02)
            else:
                self.process.join(0.2)
            assert time.monotonic() < deadline, (
                f"{self.name} has not ended after {timeout_s:.0f} s:\n{self.tail()}"
            )
        code = self.exit_code
        assert code is not None
        return code

    def stop(self) -> None:
        """Ends it in order, and expects that it says so."""
        self.send(signal.SIGTERM)
        self.ends(0)

    def ends(self, code: int) -> None:
        """Waits for its end with this exit code."""
        got = self.wait()
        assert got == code, f"{self.name} ended with {got}, expected {code}:\n{self.tail()}"


def wait_until(
    condition: Callable[[], object], what: str, *processes: Child, timeout_s: float = WAIT_S
) -> None:
    """Returns once `condition` holds. Fails at once when one of `processes` has ended, with what
    it printed last, and after `timeout_s` otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        for child in processes:
            if child.exit_code is not None and not condition():
                raise AssertionError(
                    f"waiting for {what}, but {child.name} has ended with {child.exit_code}:\n"
                    f"{child.tail()}"
                )
        if time.monotonic() > deadline:
            tails = "\n".join(f"--- {child.name}\n{child.tail()}" for child in processes)
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}\n{tails}")
        _sleep(0.02)


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


class Ports:
    """Three ports in a row, kept for this test at 127.0.0.1 and 127.0.0.2.

    A bound socket that does not listen keeps the kernel from giving a port to anybody who asks for
    any, also to outgoing connections. A broker can bind it nevertheless, because both sides set
    SO_REUSEADDR. So a killed broker finds its ports free when it comes back.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        while not self._held:
            self.first = self._try()

    def _try(self) -> int:
        held: list[socket.socket] = []
        first = 0
        try:
            for offset in range(3):
                for host in ("127.0.0.1", "127.0.0.2"):
                    one = socket.socket()
                    held.append(one)
                    one.bind((host, first + offset if first else 0))
                    # Only now: another Ports is refused, and a broker, which sets it, too, is not.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    first = first or int(one.getsockname()[1])
        except (OSError, OverflowError):
            for one in held:
                one.close()
            return 0
        self._held = held
        return first

    def close(self) -> None:
        for one in self._held:
            one.close()


@dataclass(frozen=True)
class LearnerView:
    """A learner in `narrows status --json`."""

    name: str
    incarnation: str
    state: str
    contributions: int
    logged_tokens: int
    """Tokens that it says it has logged, in this life."""
    merged_tokens: int
    """Tokens of its merged pushes, in this life."""

    @property
    def is_lost(self) -> bool:
        """True if the broker counts on it no more."""
        return self.state == LOST


@dataclass(frozen=True)
class View:
    """The run in `narrows status --json`."""

    run_id: str
    life: int
    """Rises with each start of the broker."""
    versions: tuple[int, ...]
    run_tokens: float
    merges: int
    waiting_for: str
    learners: dict[str, LearnerView]

    @property
    def waits_for_disk(self) -> bool:
        """True if the disk does not take what the run must write."""
        return self.waiting_for.startswith("the disk")

    @classmethod
    def of(cls, said: dict[str, Any]) -> View:
        learners = {
            name: LearnerView(
                name, one["incarnation"], one["state"], one["contributions"],
                one["logged_tokens"], one["merged_tokens"],
            )
            for name, one in said["learners"].items()
        }  # fmt: skip
        return cls(
            said["run_id"], int(said["epoch"].split("-")[0]), tuple(said["versions"]),
            said["run_tokens"], said["merges"], "; ".join(said["waiting_for"]), learners,
        )  # fmt: skip


@dataclass
class Answer:
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str


@dataclass
class Site:
    """The folder, the ports and the processes of one test; its end kills what still runs."""

    folder: Path
    ports: Ports = field(default_factory=Ports)
    children: list[Child] = field(default_factory=list)
    current_broker: Child | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.first}"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def broker_child(self) -> Child:
        assert self.current_broker is not None
        return self.current_broker

    def broker(self, *arguments: str, crash_at: str = "", **settings: Any) -> Child:
        """Starts the broker, or starts it again at the same address, and waits until it serves.

        settings: the names of SETTINGS and FLAGS. crash_at: `PLACE:VISIT` of CRASH_POINTS; then
        it does not wait.
        """
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        command = ["broker", "--listen", self.address, "--state-dir", str(self.state)]
        command += ["--events", str(self.folder / "broker.jsonl"), "--ready-file", str(ready)]
        for name, value in {**DEFAULTS, **settings}.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if name in FLAGS:
                command += [FLAGS[name], text]
            else:
                command += ["--set", f"{SETTINGS[name]}={text}"]
        environment = {"NARROWS_CRASH_AT": crash_at} if crash_at else {}
        child = self.narrows("broker", *command, *arguments, environment=environment)
        self.current_broker = child
        if not crash_at:
            wait_until(lambda: ready.exists() and ready.read_text(), "the broker to serve", child)
        return child

    def learner(self, name: str, **options: Any) -> Child:
        """Starts a toy learner; `options` are those of toy.Toy."""
        spec = toy.Toy(
            name=name, broker=options.pop("broker", self.address), folder=self.folder, **options
        )
        return self._fork(name, toy.learn, (spec,))

    def narrows(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> Child:
        """Starts a command line of `narrows` as a process."""
        return self._fork(name, toy.command, (list(arguments), environment or {}, self.folder))

    def python(self, name: str, target: Callable[..., None], *arguments: Any) -> Child:
        """Runs a function of a module, such as a training loop of a test's own, as a process."""
        return self._fork(name, target, arguments)

    def _fork(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> Child:
        lives = sum(one.name.split("#")[0] == name for one in self.children)
        child_name = f"{name}#{lives}" if lives else name
        log = self.folder / f"{child_name}.log"
        log.touch()
        process = _forks.Process(target=toy.run_logged, args=(log, target, arguments))
        process.start()
        child = Child(child_name, log, process)
        self.children.append(child)
        return child

    def shell(self, *command: str, name: str = "", **options: Any) -> Child:
        """Starts a program that is no fork, such as `narrows` itself or an example."""
        name = name or Path(command[0]).name
        log = self.folder / f"{name}-{len(self.children)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=shell_environment(), **options,
            )  # fmt: skip
        child = Child(name, log, process)
        self.children.append(child)
        return child

    def ask(self, *arguments: str, environment: dict[str, str] | None = None) -> Answer:
        """Runs a command line of `narrows` to its end."""
        out = self.folder / f"ask-{len(self.children)}.out"
        child = self._fork(
            "ask", toy.command, (list(arguments), environment or {}, self.folder, out)
        )
        return Answer(child.wait(), out.read_text(), child.log)

    def status(self, *arguments: str) -> View | None:
        """The run as `narrows status --json` shows it; None if no broker answers."""
        answer = self.ask("status", self.address, "--json", *arguments)
        return View.of(json.loads(answer.out)) if answer.code == 0 else None

    def view(self) -> View:
        """The same where a broker must answer."""
        view = self.status()
        assert view is not None, self.broker_child.tail()
        return view

    def last_view(self) -> View:
        """The same as the broker wrote it down when it last ended in order."""
        return View.of(self.events("broker", "final")[-1]["status"])

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Lines of this kind in the event file of the broker or of a learner (all its lives)."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # A process was killed while it wrote this line, or is writing it.
            if record.get("event") == kind:
                found.append(record)
        return found

    def merged(self) -> list[dict[str, Any]]:
        """Rounds in the broker's event file: fragment, version, digest, the names of the
        contributors, their tokens together."""
        return self.events("broker", "merged")

    def contributions(self, name: str) -> int:
        """Merged pushes of a learner in all lives of the broker, by its event file."""
        return sum(event["contributors"].count(name) for event in self.merged())

    def steps_on(self, count: int, *names: str) -> None:
        """Returns once each of these toy learners has made `count` more steps."""
        goals = {name: toy.steps(self.folder, name)[0] + count for name in names}
        wait_until(
            lambda: all(toy.steps(self.folder, name)[0] >= goals[name] for name in names),
            f"{count} more steps of {', '.join(names)}",
            *self._newest(*names),
        )

    def _newest(self, *names: str) -> list[Child]:
        """The present life of each of these, if this test has started it."""
        newest = {one.name.split("#")[0]: one for one in self.children}
        return [newest[name] for name in names if name in newest]

    def traffic(self) -> tuple[int, int]:
        """Bytes of all learners up and down, as the broker said at its end."""
        said = self.events("broker", "final")[-1]["status"]
        return said["up_bytes"], said["down_bytes"]

    def contribute(self, *names: str, count: int = 1) -> None:
        """Returns once the broker has merged `count` more pushes of each of these learners."""
        goals = {name: self.contributions(name) + count for name in names}
        wait_until(
            lambda: all(self.contributions(name) >= goals[name] for name in names),
            f"{count} more contributions of {', '.join(names)}",
            *self._newest("broker", *names),
        )

    def adopted(self, name: str) -> dict[tuple[int, int], str]:
        """(fragment, version) -> digest of what a learner has adopted, in all its lives."""
        return {
            (one["fragment"], one["version"]): one["digest"]
            for one in self.events(name, "installed")
        }

    def journal(self, state: Path | None = None) -> dict[tuple[int, int], str]:
        """(fragment, version) -> digest of each durable round. The broker must not be running."""
        answer = self.ask("journal", "show", str(state or self.state))
        assert answer.code == 0, answer.err
        return {
            (int(m[1]), int(m[2])): m[3]
            for m in (ROUND.search(line) for line in answer.out.splitlines())
            if m
        }

    def check_durable(self, *names: str) -> None:
        """Every version that a learner ever adopted is in the journal, bit for bit, and the
        versions of each fragment have no gap. The broker must not be running."""
        durable = self.journal()
        for fragment in {fragment for fragment, _ in durable}:
            versions = sorted(version for own, version in durable if own == fragment)
            assert versions == list(range(1, len(versions) + 1))
        for name in names:
            # A version that was lost may have been made again, with other bits.
            seen = {
                (one["fragment"], one["version"], one["digest"])
                for one in self.events(name, "installed")
                if one["version"] > 0
            }
            assert seen, f"{name} has adopted nothing"
            lost = seen - {(*key, digest) for key, digest in durable.items()}
            assert not lost, f"{name} has adopted what the journal has not: {sorted(lost)}"

    def check_newest(self, *names: str) -> None:
        """Each of these learners has adopted the newest durable version of every fragment, bit for
        bit. The broker must not be running."""
        durable = self.journal()
        newest = {fragment: max(v for f, v in durable if f == fragment) for fragment, _ in durable}
        assert newest
        for name in names:
            adopted = self.adopted(name)
            assert all(adopted[last] == durable[last] for last in newest.items())

    def check_equal_copies(self, *names: str) -> None:
        """Every version that a learner adopted is, bit for bit, one that the broker made."""
        # First what was adopted: the run goes on, and a merge stands in its file before it is sent.
        copies = {name: self.adopted(name) for name in names}
        made: dict[tuple[int, int], set[str]] = {}
        for event in self.merged():
            made.setdefault((event["fragment"], event["version"]), set()).add(event["digest"])
        for name in names:
            adopted = {key: d for key, d in copies[name].items() if key[1] > 0}
            assert adopted, f"{name} has adopted nothing"
            wrong = [key for key, digest in adopted.items() if digest not in made.get(key, ())]
            assert not wrong, f"{name} holds other bits than the broker made: {wrong}"

    def check_replay(self, state: Path | None = None) -> None:
        """The journal is in order, and replaying it gives the model that the broker left."""
        place = str(state or self.state)
        for part in ("audit", "replay"):
            answer = self.ask("journal", part, place)
            assert answer.code == 0, f"journal {part}: {answer.out}{answer.err}"

    def layout(self) -> Path:
        """File with the run's layout as `narrows export` prints it, while the broker runs."""
        answer = self.ask("export", str(self.state), "--layout")
        assert answer.code == 0, answer.err
        path = self.folder / "layout.json"
        path.write_text(answer.out)
        return path

    def export(self) -> dict[str, Any]:
        """The tensors that `narrows export` writes, by name."""
        from safetensors.torch import load_file

        to = self.folder / "export.safetensors"
        answer = self.ask("export", str(self.state), "--to", str(to))
        assert answer.code == 0, answer.err
        return load_file(to)

    def export_names(self) -> tuple[str, list[int]]:
        """Run and version of each fragment, as the file that `export` wrote last names them."""
        from safetensors import safe_open

        with safe_open(self.folder / "export.safetensors", "pt") as file:
            told = file.metadata()
        return told["narrows.run"], json.loads(told["narrows.versions"])

    def final(self, name: str) -> dict[str, Any]:
        """The tensors that a toy learner has saved at its end, by name."""
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")

    def told(self, name: str) -> dict[str, Any]:
        """Summary that a toy learner has written at its end."""
        return dict(json.loads((self.folder / f"{name}.json").read_text()))

    def not_final(self) -> set[str]:
        """Learners that took part in the end and have not adopted the final model, as the broker
        says with its last line."""
        _, _, names = self.broker_child.log.partition(NOT_FINAL)
        return set(re.findall(r"(\S+) \(fragment", names))

    def describe(self) -> str:
        """All processes with what they printed last; those that live tell where they stand."""
        shown = [c for c in self.children if not c.name.startswith("ask") or c.exit_code != 0]
        said = {child.pid: child.log for child in shown}
        for child in shown:
            child.thaw()
            if not isinstance(child.process, subprocess.Popen):
                child.send(signal.SIGUSR2)  # toy.run_logged: print the stacks of all threads.
        _sleep(0.3)
        parts = list[str]()
        for child in shown:
            parts.append(f"--- {child.name}, pid {child.pid}, exit code {child.exit_code}")
            parts.append("\n".join(said[child.pid].splitlines()[-TAIL_LINES:]))
            parts.append(child.log[len(said[child.pid]) :].strip())
        return "\n".join(part for part in parts if part)

    def close(self) -> None:
        """Kills what still runs, and its children."""
        try:
            for child in self.children:
                if child.exit_code is None:
                    offspring: list[psutil.Process] = []
                    with suppress(psutil.NoSuchProcess):
                        offspring = psutil.Process(child.pid).children(recursive=True)
                    child.kill()
                    for one in offspring:
                        with suppress(psutil.NoSuchProcess):
                            one.kill()
        finally:
            self.ports.close()


def shell_environment() -> dict[str, str]:
    """Environment in which a shell finds this installation of `narrows` and nothing of ours."""
    here = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "NARROWS_KEY": "",
        "PYTHONUNBUFFERED": "1",
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two models have the same names and the same bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and _bytes(one[name]) == _bytes(other[name])
        for name in one
    )


def _bytes(tensor: Any) -> bytes:
    """The bits of a tensor of any type; numpy knows no bfloat16."""
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def is_final(path: Path) -> bool:
    """True if `Learner.save` says in this file that it is the final model of its run."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return bool(file.metadata()["narrows.final"] == "true")


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest absolute difference of two models that have the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
