"""One run of real processes: a broker, and learners that train or only act as if they did.

All are forks of one server that has loaded numpy and torch already, so a process starts in a
fraction of a second. A bench sees what a user sees: commands, events files, exit codes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from narrows.bench.kit.line import HUB_ADDRESS, Line, end_with_bench, enter
from narrows.bench.reference.worker import need_torch
from narrows.broker.store import History
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.keys import AllowList, SiteKey, create_broker_key, new_pair, write_site_key

PATIENCE_S: Final = 120.0
"""Longest wait for anything; first copies at the lowest rates take tens of seconds."""
LOOK_S: Final = 0.02

TENSORS: Final = 16
WIDTH: Final = 64
TOKENS: Final = 1000
"""Tokens of a toy's step."""
TELL_S: Final = 0.01
"""Time between two looks at a toy that its facts show."""
FACTS_BYTES: Final = 256

HURRY: Final = {"fragments.sync_period_steps": 4, "fragments.overlap_steps": 1}
"""Settings with a period far shorter than a round takes, so that a toy always has to push."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["narrows.bench.kit.server"])


@dataclass(frozen=True)
class Toy:
    """A learner whose step is a timed wait, after which a few of its TENSORS move a little.

    It costs next to nothing, so that the exchange has the machine to itself.
    """

    name: str
    params: int
    """A multiple of TENSORS * WIDTH."""
    step_s: float = 0.004
    moved: int = 1
    """Tensors that a step moves, in turn."""
    seed: int = 0


def numbered(name: str, count: int) -> list[str]:
    """NAME-0, NAME-1 and so on."""
    return [f"{name}-{index}" for index in range(count)]


class Run:
    """The folder and the processes of one run; leaving the block ends them all.

    With a `line` the broker runs at its hub and the learners at its site. `folder` stays when the
    block is left; without one a temporary folder serves. Raises ConfigError without PyTorch.
    """

    def __init__(self, *, line: Line | None = None, folder: Path | None = None) -> None:
        need_torch()
        # The server of forks takes its environment from here, once.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        self._line, self._stack = line, ExitStack()
        if folder is None:
            temporary = TemporaryDirectory(prefix="narrows-bench-")
            folder = Path(self._stack.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state, self._keys = folder, folder / "state", folder / "keys"
        self.running: dict[str, BaseProcess] = {}
        if line is None:
            self.address = f"tcp://127.0.0.1:{self._stack.enter_context(_three_ports())}"
        else:
            self.address = f"tcp://{HUB_ADDRESS}:7070"
        self.environment: dict[str, dict[str, str]] = {}
        """Variables that processes get when they start, by their name."""
        self._fragments: object = None
        self.remedy = ""
        """The advice to a user whose run has failed; "" if there is none."""
        self._events: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        """By process: bytes of its events file that were read, and their events."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
        self._stack.close()

    # Processes.

    def make_keys(self, names: Iterable[str]) -> Path:
        """Makes keys of the broker, and NAME.key of these learners, who use them; the broker's
        folder of keys."""
        server = create_broker_key(self._keys).public
        for name in names:
            pair, file = new_pair(), self.folder / f"{name}.key"
            write_site_key(file, SiteKey(name, pair, (server,)))
            AllowList.allow(self._keys, name, pair.public)
            self.environment[name] = {"NARROWS_KEY": str(file)}
        return self._keys

    def broker(self, settings: Mapping[str, object], *, crash_at: str = "") -> None:
        """Starts the broker, or its next life at the same address; returns once it serves.

        `crash_at` is PLACE:VISIT, where it ends itself; then this returns at once.
        """
        ready = self.folder / "broker.ready"
        ready.unlink(missing_ok=True)
        self._fragments = settings.get("fragments.count")
        if self._keys.exists():
            settings = {**settings, "broker.keys": self._keys}
        elif self._line is not None:
            settings = {**settings, "broker.insecure": "true"}
        self.environment["broker"] = {"NARROWS_CRASH_AT": crash_at}
        self.command(
            "broker", "broker", "--listen", self.address, "--state-dir", str(self.state),
            "--events", str(self._log("broker")), "--ready-file", str(ready),
            *itertools.chain(*(("--set", f"{key}={value}") for key, value in settings.items())),
        )  # fmt: skip
        if not crash_at:
            self.wait_until(ready.exists, "the broker to serve", "broker")

    def learner(self, name: str, preset: str) -> None:
        """Starts a learner that trains the reference model; `summary` reads what it leaves."""
        self.command(
            name, "learner", "--broker", self.address, "--name", name, "--preset", preset,
            "--events", str(self._log(name)), "--json", str(self.folder / f"{name}.json"),
        )  # fmt: skip

    def toy(self, toy: Toy) -> None:
        """Starts a toy; `facts` tells what it does."""
        self._fork(toy.name, _train, self.address, self.folder, toy)

    def toys(self, like: Toy, count: int) -> list[str]:
        """Starts toys with seeds of their own; their names, as `numbered` makes them."""
        names = numbered(like.name, count)
        for seed, name in enumerate(names):
            self.toy(replace(like, name=name, seed=seed))
        return names

    def command(self, name: str, *arguments: str) -> None:
        """Starts `narrows ARGUMENTS`; the output goes to NAME.log in the folder."""
        self._fork(name, _command, list(arguments))

    def ask(self, *arguments: str) -> Any:
        """Runs a `narrows` command that prints JSON, where the broker is, and reads that."""
        log = self.folder / "ask.log"
        log.unlink(missing_ok=True)
        self.command("ask", *arguments)
        self.ends("ask", 0)
        del self.running["ask"]
        return json.loads(log.read_text())

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process."""
        pid = self.running[name].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, name: str) -> None:
        """Ends a process without a chance to say anything."""
        self.signal(name, signal.SIGKILL)
        self.ends(name, -signal.SIGKILL)
        del self.running[name]

    def ends(self, name: str, code: int) -> None:
        """Waits for the end of a process with this exit code; a signal is a negative number."""
        process = self.running[name]
        process.join(PATIENCE_S)
        if process.exitcode != code:
            got = "no end" if process.exitcode is None else f"code {process.exitcode}"
            raise self._failure(name, f"its end with code {code}", got)

    def stop_broker(self) -> None:
        """Ends the broker in order."""
        self.signal("broker", signal.SIGTERM)
        self.ends("broker", 0)

    # What they tell.

    def final(self) -> dict[str, Any]:
        """The last status of a broker that has ended in order."""
        return dict(self.events("broker", "final")[-1]["status"])

    def merges(self) -> list[dict[str, Any]]:
        """The broker's `merged` events of all its lives, oldest first."""
        return self.events("broker", "merged")

    def installed(self, name: str) -> list[dict[str, Any]]:
        """A learner's events of versions that it has received; `time_s` is the system's."""
        return self.events(name, "installed")

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The events of this kind that a process, or one of this name before it, has written. A
        line that a killed process left half is passed over."""
        path, (offset, events) = self._log(name), self._events.get(name, (0, []))
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            for line in whole.splitlines():
                with suppress(ValueError):
                    events.append(json.loads(line))
            self._events[name] = (offset + len(whole), events)
        return [each for each in events if each["event"] == kind]

    def summary(self, name: str) -> dict[str, Any]:
        """The summary that a learner leaves at its end; empty if it was killed."""
        return self._json(f"{name}.json")

    def facts(self, name: str) -> dict[str, Any]:
        """`steps` of a toy, and `boundary_cpu_s`: CPU seconds that the exchange took from its
        training thread. Empty before it has joined."""
        return self._json(f"{name}.facts")

    def steps(self, name: str) -> int:
        """Steps that a toy has made."""
        return int(self.facts(name).get("steps", 0))

    def account(self, toys: Sequence[str]) -> tuple[dict[str, int], Counter[tuple[str, int]]]:
        """Tokens that each of these toys has logged, and those in durable rounds by learner and
        fragment; the toys stand still from now on, and the broker has ended."""
        for name in toys:  # At one moment, else they would log what nobody can merge any more.
            self.signal(name, signal.SIGSTOP)
        logged = {name: TOKENS * self.steps(name) for name in toys}
        self.stop_broker()
        merged: Counter[tuple[str, int]] = Counter()
        with closing(History(self.state)) as history:
            for row in history.rounds():
                for push in row.round_.contributions:
                    merged[push.learner, row.round_.fragment] += push.tokens
        return logged, merged

    def wait(self, seconds: float) -> None:
        """Lets the run go on for a while; raises NarrowsError at once if a process has ended."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > until, "time to pass", *self.running)

    def wait_merges(self, count: int) -> None:
        """Waits until so many rounds have been merged, in all lives of the broker."""
        self.wait_until(lambda: len(self.merges()) >= count, f"round {count}", *self.running)

    def wait_joined(self, names: Sequence[str]) -> None:
        """Waits until all of them hold every fragment: no first copy is on its way any more."""

        def all_hold_all() -> bool:
            held = ({each["fragment"] for each in self.installed(name)} for name in names)
            return all(len(each) == self._fragments for each in held)

        self.wait_until(all_hold_all, "all to join", *self.running)

    def wait_until(self, condition: Callable[[], object], what: str, *names: str) -> None:
        """Raises NarrowsError at once if one of the named processes has ended meanwhile."""
        until = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while not condition():
            for name in names:
                process = self.running[name]
                if process.exitcode is not None and not condition():
                    raise self._failure(name, what, f"its end with code {process.exitcode}")
            if time.monotonic() > until:
                raise self._failure(names[0], what, f"nothing in {PATIENCE_S:.0f} s")
            pause.wait(LOOK_S)

    def _fork(self, name: str, target: Callable[..., None], *given: object) -> None:
        at_hub = target is _command and name in ("broker", "ask")
        namespace = "" if self._line is None else self._line.hub if at_hub else self._line.site
        environment = self.environment.get(name, {})
        child = (name, self.folder, namespace, environment, target, given)
        process = _forks.Process(target=_begin, args=child, daemon=True)
        process.start()
        self.running[name] = process

    def _json(self, file: str) -> dict[str, Any]:
        path = self.folder / file
        text = path.read_text() if path.exists() else ""
        return dict(json.loads(text or "{}"))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _failure(self, name: str, expected: str, got: str) -> NarrowsError:
        log = self.folder / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        said = f" and said {lines[-1][:300]!r}" if lines else ""
        given = {"expected": expected, "got": got + said, "remedy": self.remedy}
        return NarrowsError(ErrorCode.UNFINISHED, name, **given)


def payload_bits(merges: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Bits per parameter that a learner pushed, and that each received, in these merges."""
    pushed = sum(each["elements"] * len(each["contributors"]) for each in merges)
    published = sum(each["elements"] for each in merges)
    return (
        8 * sum(each["pushed_bytes"] for each in merges) / pushed,
        8 * sum(each["published_bytes"] for each in merges) / published,
    )


def thread_cpu_s(pid: int | None) -> dict[str, float]:
    """CPU seconds of a process so far: its `main` thread, those of `zeromq`, the `others`."""
    found = dict.fromkeys(("main", "zeromq", "others"), 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        head, _, tail = (task / "stat").read_text().rpartition(")")
        fields = tail.split()
        group = "main" if task.name == str(pid) else "zeromq" if "(ZMQ" in head else "others"
        found[group] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


@contextmanager
def _three_ports() -> Generator[int]:
    """The first of three ports in a row that nobody else gets while the block lasts.

    A bound socket that does not listen keeps them from the kernel's free choice, and a broker may
    bind them all the same: both set SO_REUSEADDR. So its next life finds them free.
    """
    while True:
        with ExitStack() as held:
            first = 0
            try:
                for offset in range(3):
                    one = held.enter_context(socket.socket())
                    one.bind(("127.0.0.1", first + offset if first else 0))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    first = first or int(one.getsockname()[1])
            except (OSError, OverflowError):
                continue  # The second or third is somebody's.
            yield first
            return


# In the children.


def _begin(
    name: str,
    folder: Path,
    namespace: str,
    environment: dict[str, str],
    target: Callable[..., None],
    given: Any,
) -> None:
    threading.Thread(target=end_with_bench, daemon=True).start()
    with suppress(OSError):  # `ps` and `top` show the name, where the system is a Linux.
        Path("/proc/self/comm").write_text(name)
    file = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    if namespace:
        enter(namespace)
    target(*given)


def _command(arguments: list[str]) -> None:
    from narrows.__main__ import main

    sys.argv = ["narrows", *arguments]
    main()


def _train(address: str, folder: Path, toy: Toy) -> None:
    """The loop of a user, with a model that needs no data."""
    import torch
    from torch import nn

    from narrows.learner import Learner

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(toy.seed)
    shape = (toy.params // TENSORS // WIDTH, WIDTH)
    first = [0.02 * torch.randn(shape, generator=generator) for _ in range(TENSORS)]
    moves = [torch.randn(shape, generator=generator) for _ in range(TENSORS)]
    model = nn.ParameterList(nn.Parameter(each) for each in first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    facts = os.open(folder / f"{toy.name}.facts", os.O_WRONLY | os.O_CREAT)
    pace, told_s, spent_s = threading.Event(), 0.0, 0.0
    own_s = [0.0, 0.0]
    """Thread's CPU time before and after the optimizer's own work in a step."""
    optimizer.register_step_post_hook(lambda *_: own_s.__setitem__(1, time.thread_time()))
    learner = Learner(
        model, optimizer, broker=address, name=toy.name,
        events=folder / f"{toy.name}.jsonl", join_timeout_s=PATIENCE_S,
    )  # fmt: skip
    with learner:
        # The learner's hooks run before the first of these two and after the second.
        optimizer.register_step_pre_hook(lambda *_: own_s.__setitem__(0, time.thread_time()))
        for step in learner.until_end(itertools.count()):
            pace.wait(toy.step_s)
            for index, parameter in enumerate(model):
                in_turn = (index - step * toy.moved) % TENSORS < toy.moved
                parameter.grad = moves[index] if in_turn else None
            learner.log(tokens=TOKENS, loss=1.0)
            began_s = time.thread_time()
            optimizer.step()
            spent_s += time.thread_time() - began_s - (own_s[1] - own_s[0])
            if (now_s := time.monotonic()) > told_s + TELL_S:
                told_s = now_s
                said = {"steps": step + 1, "boundary_cpu_s": spent_s}
                os.pwrite(facts, json.dumps(said).ljust(FACTS_BYTES).encode(), 0)
