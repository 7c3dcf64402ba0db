"""The processes of `narrows bench chaos`: started, broken by the tape, brought back, ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from narrows.bench.chaos.results import ChaosStory, Outage, Window
from narrows.bench.chaos.tape import BROKER, Fault, Kind, draw
from narrows.bench.kit.nursery import Nursery
from narrows.bench.kit.processes import Processes
from narrows.bench.kit.proxy import Proxy
from narrows.bench.kit.rows import rows_in
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.units import counted

LINE_S: Final = 5.0
"""Interval of the lines on the console."""

JOIN_TIMEOUT_S: Final = 180.0
HEAL_TIMEOUT_S: Final = 120.0
LEAVE_TIMEOUT_S: Final = 90.0

FRAGMENTS: Final = 4
HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class ChaosOptions:
    """Options of a run. `step_s`: length of an inner step, which is a timed wait."""

    learners: int = 32
    seconds: float = 600.0
    fault_every_s: float = 29.0
    down_max_s: float = 60.0
    broker_kills: int = 0
    step_s: float = 0.5
    params: int = 1 << 17
    seed: int = 0
    keep: Path | None = None
    json: Path | None = None


class Run:
    """The processes of a run, and a record of its faults."""

    def __init__(
        self,
        options: ChaosOptions,
        folder: Path,
        console: Console,
        processes: Processes,
        lines: Mapping[str, Proxy],
        nursery: Nursery,
        port: int,
    ) -> None:
        self._options, self._folder, self._console = options, folder, console
        self._processes, self._lines, self._nursery = processes, lines, nursery
        self._port = port
        self.story = ChaosStory(tuple(lines))
        #: Faults that have not ended, by victim.
        self._down: dict[str, Outage] = {}
        self._merges = _Merges(folder / "broker.jsonl")
        self._ended_seen = 0
        self._line_at = 0.0

    # Acts.

    def join(self) -> None:
        """Starts broker and learners; returns once all have adopted the model and contribute."""
        self._processes.start_broker(*self._broker_arguments())
        for name in self._lines:
            self._start(name)
        self._wait(
            lambda: len(self._merges.newest) == len(self._lines),
            JOIN_TIMEOUT_S,
            lambda: f"{sorted(self._lines.keys() - self._merges.newest.keys())} did not join",
        )

    def watch(
        self, phase: str, seconds: float, tape: list[tuple[float, Callable[[], None]]] | None = None
    ) -> Window:
        """Lets `seconds` pass while the tape plays; returns the span of time."""
        began, begin = time.monotonic(), time.time()
        actions = sorted(tape or [], key=lambda action: -action[0])
        while (now_s := time.monotonic() - began) < seconds:
            while actions and actions[-1][0] <= now_s:
                actions.pop()[1]()
            self._tick(phase, now_s)
        return Window(begin, time.time())

    def tape(self) -> list[tuple[float, Callable[[], None]]]:
        """Beginnings and ends of the faults, with their seconds."""
        options = self._options
        faults = draw(
            options.seed,
            self.story.names,
            seconds=options.seconds,
            every_s=options.fault_every_s,
            down_max_s=options.down_max_s,
            broker_kills=options.broker_kills,
        )
        begins = [(fault.at_s, _later(self._begin, fault)) for fault in faults]
        return begins + [(fault.ends_s, _later(self._finish, fault)) for fault in faults]

    def heal(self) -> None:
        """Ends every fault; returns once all learners have contributed again."""
        for outage in list(self._down.values()):
            self._finish(outage.fault)
        since = time.time()

        def missing() -> list[str]:
            return [n for n in self._lines if self._merges.newest.get(n, 0.0) < since]

        try:
            self._wait(
                lambda: not missing(), HEAL_TIMEOUT_S, lambda: f"{missing()} did not come back"
            )
        except NarrowsError as error:
            self.story.problems.append(error.message)

    def end(self) -> None:
        """Learners leave in order, then the broker."""
        for name in self._lines:
            self._nursery.signal(name, signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while self._nursery.running and time.monotonic() < deadline:
            self._nursery.look(0.1)
        late = sorted(self._nursery.running)
        failed = [f"{n} left with code {c}" for n, c in self._news() if c]
        self.story.problems += failed + [f"{name} did not leave" for name in late]
        self._processes.kill(BROKER, signal.SIGTERM)
        if code := self._processes.wait(BROKER, LEAVE_TIMEOUT_S):
            self.story.problems.append(f"the broker left with code {code}")

    # Faults.

    def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                self._nursery.signal(fault.victim, signal.SIGKILL)
            case Kind.STOP:
                self._nursery.signal(fault.victim, signal.SIGSTOP)
            case Kind.CUT:
                self._lines[fault.victim].hold("up", "down")
            case Kind.RESET:
                self._lines[fault.victim].refuse()
            case Kind.BROKER:
                self._processes.kill(BROKER)
        outage = self._down[fault.victim] = Outage(fault, time.time())
        self.story.outages.append(outage)
        self._say(f"{fault.victim}: {fault.kind}, for {fault.down_s:.1f} s")

    def _finish(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                while fault.victim in self._nursery.running:
                    self._nursery.look(0.1)
                # Before the fault is over. Otherwise its end would look like one without a cause.
                self._take_ends()
                self._start(fault.victim)
            case Kind.STOP:
                self._nursery.signal(fault.victim, signal.SIGCONT)
            case Kind.CUT | Kind.RESET:
                self._lines[fault.victim].release()
            case Kind.BROKER:
                self._processes.start(BROKER, BROKER, *self._broker_arguments())
        outage = self._down.pop(fault.victim)
        outage.ended = time.time()
        self._say(f"{fault.victim}: back ({fault.kind})")

    # What goes on.

    def _start(self, name: str) -> None:
        self._nursery.start(name, f"tcp://{self._lines[name].host}:{self._port}")

    def _broker_arguments(self) -> tuple[str, ...]:
        return (
            "--listen", f"tcp://{HOST}:{self._port}",
            "--state-dir", str(self._folder / "state"),
            "--events", str(self._folder / "broker.jsonl"),
            "--set", f"run.learners_at_start={self._options.learners}",
            "--set", f"fragments.count={FRAGMENTS}",
            "--set", "broker.journal_keep=true",
        )  # fmt: skip

    def _wait(
        self, condition: Callable[[], bool], timeout_s: float, why: Callable[[], str]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise NarrowsError(ErrorCode.MISUSE, f"{why()} within {timeout_s:.0f} s")
            self._tick("waiting", timeout_s - (deadline - time.monotonic()))

    def _tick(self, phase: str, now_s: float) -> None:
        self._nursery.look(0.05)
        if BROKER not in self._down:
            self._processes.check(BROKER)
        self._take_ends()
        self._merges.look()
        if time.monotonic() - self._line_at >= LINE_S:
            self._line_at = time.monotonic()
            self._say(self._line(phase, now_s))

    def _take_ends(self) -> None:
        """Starts every process again that ended without being killed, and notes it as a problem."""
        for name, code in self._news():
            outage = self._down.get(name)
            if outage is None or outage.fault.kind is not Kind.KILL:
                self.story.problems.append(f"{name} ended by itself with code {code}")
                self._start(name)

    def _news(self) -> list[tuple[str, int]]:
        """Children that have ended since the last call."""
        news = self._nursery.ended[self._ended_seen :]
        self._ended_seen += len(news)
        return news

    def _line(self, phase: str, now_s: float) -> str:
        down = ", ".join(
            f"{name} ({outage.fault.kind})" for name, outage in sorted(self._down.items())
        )
        rate_per_s, contributors = self._merges.since_last_asked()
        return (
            f"{phase} {now_s:4.0f} s  {rate_per_s:.2f} merges/s of {contributors:.1f} learners  "
            f"{counted(len(self.story.outages), 'fault')}  down: {down or 'nobody'}"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _later(action: Callable[[Fault], None], fault: Fault) -> Callable[[], None]:
    return lambda: action(fault)


class _Merges:
    """Reads the broker's events file while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        #: System's time of the newest merge with each learner.
        self.newest: dict[str, float] = {}
        self._count = self._contributors = 0
        self._asked_at = time.monotonic()

    def look(self) -> None:
        """Reads new lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for record in rows_in(whole):
            if record["event"] == "merged":
                self._count += 1
                self._contributors += len(record["contributors"])
                self.newest |= dict.fromkeys(record["contributors"], record["time_s"])

    def since_last_asked(self) -> tuple[float, float]:
        """Merges per second and contributors per merge."""
        span_s = time.monotonic() - self._asked_at
        rates = self._count / span_s, self._contributors / max(1, self._count)
        self._count = self._contributors = 0
        self._asked_at = time.monotonic()
        return rates
