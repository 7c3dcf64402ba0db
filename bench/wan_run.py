"""Narrows on a line of the lab: broker at the hub, a learner that only exchanges at each site."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from narrows.bench import wan_cells
from narrows.bench.lab import Lab, Site
from narrows.bench.loop import cpu_s_of
from narrows.bench.processes import Processes
from narrows.bench.wan_cells import SETTINGS, WARM_UP, Cell
from narrows.proto.errors import ErrorCode, NarrowsError

PORT: Final = 7070

START_S: Final = 240.0
"""Beyond what is measured a cell may take so long: processes start, version 0 travels."""


@contextmanager
def laboratory(lab: Lab, limit_s: float) -> Generator[Processes]:
    """Builds the lab and ends its processes after `limit_s` seconds and START_S, so that whoever
    waits for one of them hears of its end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="narrows-wan-")))
        stack.enter_context(lab)
        processes = stack.enter_context(Processes(folder))
        watch = threading.Timer(START_S + limit_s, processes.stop_all)
        watch.start()
        stack.callback(watch.cancel)
        yield processes


class NarrowsRun:
    """Broker at the hub, an exchanger per learner, a probe beside the first one."""

    def __init__(self, cell: Cell, lab: Lab, processes: Processes) -> None:
        self.cell, self.lab, self.processes = cell, lab, processes

    def start(self, *settings: str, endless: bool = False) -> None:
        """Returns when every learner has joined and sees all rounds open."""
        cell, hub = self.cell, self.lab.hub
        broker = self.processes.start_broker(
            "--listen", f"tcp://{hub.address}:{PORT}", "--insecure",
            "--state-dir", str(self.processes.folder / "state"),
            *_set({
                "run.learners_at_start": str(cell.learners),
                "merge.quorum": str(cell.learners),
                "merge.rounds_in_flight": str(wan_cells.FRAGMENTS),
                "fragments.count": str(wan_cells.FRAGMENTS),
                # No floor between launches, and no slack that a grace window could fill.
                "fragments.sync_period_steps": "1",
                "fragments.overlap_steps": "0",
                "broker.checkpoint_versions": "1000000",
                "wan.streams": str(cell.streams),
                **SETTINGS[cell.variant],
            }),
            *settings,
            under=hub.under,
        )  # fmt: skip
        mode = ["endless"] if endless else []
        for site in self.lab.learners:
            address = self._dial(site, broker)
            arguments = [address, site.name, str(cell.params), *mode]
            self._launch(site, site.name, "exchanger", *arguments)
        for site in self.lab.learners:
            self._hear(site)
        first = self.lab.learners[0]
        self._launch(first, "probe", "probe", self._dial(first, broker), talks=False)

    def measure(self) -> list[dict[str, Any]]:
        """All exchanges after the first few, with times and processor seconds."""
        self.start()
        told: list[dict[str, Any]] = []
        for _ in range(WARM_UP + self.cell.exchanges):
            broker_s = cpu_s_of(self.processes.running["broker"].pid)
            for site in self.lab.learners:
                self._say(site)
            each = [self._hear(site) for site in self.lab.learners]
            started_s = min(row["started_s"] for row in each)
            ended_s = max(row["ended_s"] for row in each)
            broker_s = cpu_s_of(self.processes.running["broker"].pid) - broker_s
            told.append(
                {
                    "seconds": ended_s - started_s,
                    "started_s": started_s,
                    "ended_s": ended_s,
                    "cpu_s": sum(row["cpu_s"] for row in each) + broker_s,
                    "probes": self.probes(),
                }
            )
        return told[WARM_UP:]

    def probes(self) -> list[float]:
        """Round trips of control messages so far, in seconds."""
        path = self.processes.folder / "probe.log"
        return [float(line) for line in path.read_text().splitlines() if line]

    def _dial(self, site: Site, broker: str) -> str:
        """The address at which this site finds the broker: behind a proxy of its own if the line
        is long or has a window."""
        cell = self.cell
        if not (cell.round_trip_ms or cell.window_bytes):
            return broker
        name = f"proxy-{site.name}"
        if name not in self.processes.running:
            self._launch(
                site, name, "proxy", "127.0.0.1", self.lab.hub.address, str(PORT),
                str(cell.round_trip_ms / 1000), str(cell.window_bytes), talks=False,
            )  # fmt: skip
        return f"tcp://127.0.0.1:{PORT}"

    def _launch(
        self, site: Site, name: str, module: str, *arguments: str, talks: bool = True
    ) -> None:
        command = [*site.under, *self.processes.python(f"narrows.bench.{module}"), *arguments]
        self.processes.launch(name, command, talks=talks)

    def _say(self, site: Site) -> None:
        stdin = self.processes.running[site.name].stdin
        assert stdin is not None
        try:
            stdin.write(b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died(site) from None

    def _hear(self, site: Site) -> dict[str, Any]:
        stdout = self.processes.running[site.name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._died(site)
        told: dict[str, Any] = json.loads(line)
        return told

    def _died(self, site: Site) -> NarrowsError:
        said = self.processes.tail(site.name, 1)
        return NarrowsError(ErrorCode.MISUSE, f"{site.name} ended or took too long", got=said)


def _set(settings: dict[str, str]) -> list[str]:
    return [word for item in settings.items() for word in ("--set", "=".join(item))]
