"""A broker and learners as processes of the reference worker, and what they wrote down."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from running import HANG_S

from narrows.bench.kit.processes import Processes, free_ports
from narrows.broker.cli.status import ask_status
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.messages import LearnerStatus, Status


class Run:
    """A broker and learners of one run."""

    def __init__(self, folder: Path, data: Path, processes: Processes) -> None:
        self.folder, self.data, self.processes = folder, data, processes
        port = free_ports()
        self.address = f"tcp://127.0.0.1:{port}"
        self.ports = (port, port + 1, port + 2)
        """Control, uplink and downlink port of the broker."""

    def broker(self, *arguments: str) -> None:
        """Starts the broker, or starts it again."""
        self.processes.start_broker(
            "--listen", self.address,
            "--state-dir", str(self.folder / "state"),
            "--events", str(self.folder / "broker.jsonl"),
            "--set", "broker.beat=200ms",
            *arguments,
        )  # fmt: skip

    def learner(self, name: str, *arguments: str, host: str = "127.0.0.1") -> None:
        """Starts a learner, which looks for the broker at `host`."""
        broker = f"tcp://{host}:{self.ports[0]}"
        self.processes.start(
            name, "learner", "--broker", broker, "--name", name,
            "--data", str(self.data), "--json", str(self.folder / f"{name}.json"),
            "--events", str(self.folder / f"{name}.jsonl"), *arguments,
        )  # fmt: skip

    def status(self) -> Status | None:
        try:
            return ask_status(self.address, timeout_s=HANG_S)
        except BrokerUnreachable:
            return None

    def of(self, name: str) -> LearnerStatus | None:
        status = self.status()
        found = [s for s in status.learners if s.name == name] if status else []
        return found[0] if found else None

    def contributions(self, name: str) -> int:
        learner = self.of(name)
        return learner.contributions if learner else 0

    def merges(self) -> int:
        status = self.status()
        return status.merges if status else 0

    def finish(self, *names: str) -> None:
        """Everybody ends by itself, with exit code 0."""
        for name in (*names, "broker"):
            assert self.processes.wait(name, HANG_S) == 0, self.processes.tail(name, 20)

    def leave(self, *names: str) -> None:
        """Ends an endless run: the learners leave in order, then the broker stops."""
        for name in names:
            self.processes.kill(name, signal.SIGTERM)
        for name in names:
            assert self.processes.wait(name, HANG_S) == 0, self.processes.tail(name, 20)
        self.processes.kill("broker", signal.SIGTERM)
        assert self.processes.wait("broker", HANG_S) == 0, self.processes.tail("broker", 20)

    def summary(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}.json").read_text()))

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def check_digests(self, *names: str) -> None:
        """Every version that a learner installed is, bit for bit, one that the broker made."""
        made: dict[tuple[int, int], set[str]] = {}
        for line in (self.folder / "broker.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["event"] == "merged":
                key = (record["fragment"], record["version"])
                made.setdefault(key, set()).add(record["digest"])
        compared = 0
        for name in names:
            for line in (self.folder / f"{name}.jsonl").read_text().splitlines():
                record = json.loads(line)
                digests = made.get((record["fragment"], record["version"]))
                if digests is not None:
                    assert record["digest"] in digests, record
                    compared += 1
        assert compared > 0
