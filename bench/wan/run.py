"""Narrows on a line of the lab: broker at the hub, a learner that only exchanges at each site."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from narrows.bench.kit.failures import ProcessFailed, ended, logs_kept
from narrows.bench.kit.lab import Lab, LabSite, Meter
from narrows.bench.kit.processes import Processes, environment
from narrows.bench.loop.bench import cpu_s_of
from narrows.bench.wan import cells as wan_cells
from narrows.bench.wan.cells import SETTINGS, WARM_UP, WanCell

PORT: Final = 7070

START_S: Final = 240.0
"""Time of a cell beyond its measurement: processes start, version 0 travels."""


@dataclass(frozen=True)
class ExchangeTimes:
    """One exchange of all learners: times and bytes."""

    seconds: float
    cpu_s: float
    """Processor seconds of all processes."""
    span_s: tuple[float, float] | None = None
    """Start and end on the machine's monotonic clock; None if the system does not report them."""
    probes: int | None = None
    """Number of control messages that had been answered at its end."""


class SiteProcesses(Processes):
    """The children at one site; the bench talks to some of them."""

    def talk(self, name: str, *command: str) -> None:
        """Starts a command with pipes for its input and output; errors go to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=self.groups,
            )

    def say(self, name: str) -> None:
        """Sends an empty line. Raises NarrowsError if the child has ended."""
        stdin = self.running[name].stdin
        assert stdin is not None
        try:
            stdin.write(b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended(name) from None

    def hear(self, name: str) -> dict[str, Any]:
        """Waits for a JSON line. Raises NarrowsError if the child ends instead."""
        stdout = self.running[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._ended(name)
        message: dict[str, Any] = json.loads(line)
        return message

    def stop_all(self) -> None:
        """Ends the children and closes their pipes."""
        super().stop_all()
        for process in self.running.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _ended(self, name: str) -> ProcessFailed:
        # Reads the rest of its output until the end; then it has ended.
        return ended(name, self.running[name].wait(), self.log(name))


@dataclass(frozen=True)
class ShapedLine:
    """A lab with the processes at its sites."""

    lab: Lab
    hub: SiteProcesses
    learners: list[tuple[LabSite, SiteProcesses]]


@contextmanager
def line(lab: Lab, limit_s: float) -> Generator[ShapedLine]:
    """Builds the lab, and ends its processes after `limit_s` seconds and START_S, so that nobody
    waits for them for ever."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="narrows-wan-")))
        stack.enter_context(logs_kept(folder))
        stack.enter_context(lab)
        sites = (lab.hub, *lab.learners)
        each = [SiteProcesses(folder, prefix=site.under, groups=True) for site in sites]
        for processes in each:
            stack.enter_context(processes)

        def stop() -> None:
            for processes in each:
                for process in processes.running.values():
                    process.kill()

        watch = threading.Timer(START_S + limit_s, stop)
        watch.start()
        stack.callback(watch.cancel)
        yield ShapedLine(lab, each[0], list(zip(lab.learners, each[1:], strict=True)))


class NarrowsRun:
    """Broker at the hub, an exchanger per learner, a probe beside the first one."""

    def __init__(self, cell: WanCell, line: ShapedLine) -> None:
        self.cell, self.line = cell, line

    def start(self, *settings: str, endless: bool = False) -> None:
        """Returns when every learner has joined and sees all rounds open."""
        cell, hub = self.cell, self.line.hub
        broker = hub.start_broker(
            "--listen", f"tcp://{self.line.lab.hub.address}:{PORT}", "--insecure",
            "--state-dir", str(hub.folder / "state"),
            *_set({
                "run.learners_at_start": str(cell.learners),
                "merge.quorum": str(cell.learners),
                "merge.rounds_in_flight": str(wan_cells.FRAGMENTS),
                "fragments.count": str(wan_cells.FRAGMENTS),
                # No floor between launches, and no slack for a grace window.
                "fragments.sync_period_steps": "1",
                "fragments.overlap_steps": "0",
                "broker.checkpoint_versions": "1000000",
                "wan.streams": str(cell.streams),
                **SETTINGS[cell.variant],
            }),
            *settings,
        )  # fmt: skip
        mode = ["endless"] if endless else []
        for site, processes in self.line.learners:
            address = self._dial(processes, broker)
            module = (sys.executable, "-m", "narrows.bench.wan.exchanger")
            processes.talk(site.name, *module, address, site.name, str(cell.params), *mode)
        for site, processes in self.line.learners:
            processes.hear(site.name)
        _, first = self.line.learners[0]
        first.start("probe", self._dial(first, broker), module="narrows.bench.kit.probe")

    def measure(self, meter: Meter) -> list[ExchangeTimes]:
        """All exchanges after the first few."""
        self.start()
        for _ in range(WARM_UP):
            self._exchange()
        meter.sample()
        exchanges = [self._exchange() for _ in range(self.cell.exchanges)]
        meter.sample()
        return exchanges

    def _exchange(self) -> ExchangeTimes:
        broker = self.line.hub.running["broker"].pid
        broker_s = cpu_s_of(broker)
        for site, processes in self.line.learners:
            processes.say(site.name)
        each = [processes.hear(site.name) for site, processes in self.line.learners]
        started_s = min(row["started_s"] for row in each)
        ended_s = max(row["ended_s"] for row in each)
        return ExchangeTimes(
            seconds=ended_s - started_s,
            cpu_s=sum(row["cpu_s"] for row in each) + cpu_s_of(broker) - broker_s,
            span_s=(started_s, ended_s),
            probes=len(self.probes()),
        )

    def check(self) -> None:
        """Raises NarrowsError if one of the processes has ended."""
        self.line.hub.check("broker")
        for site, processes in self.line.learners:
            if processes.running[site.name].poll() is not None:
                code = processes.running[site.name].wait()
                raise ended(site.name, code, processes.log(site.name))

    def probes(self) -> list[float]:
        """Round trips of control messages so far, in seconds."""
        path = self.line.hub.folder / "probe.log"
        return [float(line) for line in path.read_text().splitlines() if line]

    def _dial(self, processes: SiteProcesses, broker: str) -> str:
        """The address at which this site finds the broker: behind its own proxy if the line has a
        delay or a window."""
        cell = self.cell
        if not (cell.round_trip_ms or cell.window_bytes):
            return broker
        if "proxy" not in processes.running:
            hub, trip_s = self.line.lab.hub.address, str(cell.round_trip_ms / 1000)
            options = ("127.0.0.1", hub, str(PORT), trip_s, str(cell.window_bytes))
            processes.start("proxy", *options, module="narrows.bench.kit.proxy")
        return f"tcp://127.0.0.1:{PORT}"


def _set(settings: dict[str, str]) -> list[str]:
    return [word for item in settings.items() for word in ("--set", "=".join(item))]
