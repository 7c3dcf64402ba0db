"""A broker with keys, two honest learners and one insider's key, as real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from narrows.bench.attack.target import AttackTarget
from narrows.bench.kit.failures import ProcessFailed
from narrows.bench.kit.processes import Processes, free_ports
from narrows.bench.kit.site_keys import SiteKeys
from narrows.proto.address import parse_address
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.keys import edit_ring

HONEST: Final = ("site-a", "site-b")
INSIDER: Final = "site-x"
JOIN_S: Final = 120.0
END_S: Final = 20.0
SAMPLE_S: Final = 0.25


@dataclass(frozen=True)
class Scene:
    """Settings of the honest run."""

    params: int = 1 << 16
    step_s: float = 0.05
    settings: tuple[str, ...] = ()
    """Further settings of the broker, KEY=VALUE."""


@dataclass
class StageWindow:
    """Facts of one stretch of time."""

    seconds: float
    versions_per_s: float
    contributions_per_s: float
    """Merged pushes: each of them is journalled."""
    rss_peak_bytes: int
    log_bytes_per_s: float
    """Growth of the broker's log."""
    disk_bytes_per_s: float
    """Growth of the state directory, which is the journal's."""
    run_tokens_per_s: float


@dataclass
class Stage:
    """The running processes; made by `open`."""

    processes: Processes
    scene: Scene
    target: AttackTarget
    _folder: Path
    _attacker: str = ""
    _attackers: int = 0

    @classmethod
    def open(cls, processes: Processes, scene: Scene) -> Stage:
        """Makes the keys, starts the broker and the learners, returns when all have joined."""
        folder = processes.folder
        keys = SiteKeys.make(folder / "keys", (*HONEST, INSIDER))
        port = free_ports()
        address = processes.start_broker(
            "--listen", f"tcp://127.0.0.1:{port}",
            "--keys", str(folder / "keys"), "--founder", HONEST[0],
            "--state-dir", str(folder / "state"),
            "--events", str(folder / "events.jsonl"),
            "--set", f"run.learners_at_start={len(HONEST)}",
            "--set", "fragments.count=4",
            # The disk's growth is the journal's, to within a small segment.
            "--set", "broker.checkpoint_versions=1000000",
            "--set", "broker.journal_segment=64KiB",
            *(word for each in scene.settings for word in ("--set", each)),
        )  # fmt: skip
        for name in keys.pairs:
            keys.write(name, address)
        own = keys.pairs[INSIDER]
        control = parse_address(address).port
        target = AttackTarget(
            address, control + 1, control + 2, keys.server, own.public, own.secret,
            INSIDER, HONEST[0], scene.params,
        )  # fmt: skip
        stage = cls(processes, scene, target, folder)
        for name in HONEST:
            stage._start_honest(name)
        for name in HONEST:
            stage._wait_for(folder / f"{name}.joined", name)
        target.write(folder / "target.json")
        return stage

    def attack(self, name: str) -> None:
        """Starts an attacker in a process of its own, with less right to the CPU than others.
        Returns when the attack begins."""
        self._attackers += 1
        self._attacker = f"attacker-{self._attackers}-{name}"
        self.processes.start_command(
            self._attacker,
            "nice", "-n", "10", sys.executable, "-m", "narrows.bench.attack.attacker",
            name, str(self._folder / "target.json"),
        )  # fmt: skip
        deadline = time.monotonic() + JOIN_S
        while "attempts" not in self.processes.log(self._attacker):
            self.processes.check(self._attacker)
            if time.monotonic() > deadline:
                raise ProcessFailed(self._attacker, f"{name} does not begin")
            time.sleep(0.05)

    def end_attack(self) -> tuple[int, str]:
        """Ends the attacker; returns how often it tried, and the breach that it found, if any."""
        name = self._attacker
        if self.processes.running[name].poll() is not None:
            return 0, self.processes.reason(name)
        self.processes.kill(name, signal.SIGTERM)
        self.processes.wait(name, END_S)
        lines = self.processes.log(name).splitlines()
        counts = [json.loads(line)["attempts"] for line in lines if line.startswith('{"attempts"')]
        return int(counts[-1]), ""

    def watch(self, seconds: float) -> StageWindow:
        """Watches the run for some time. Raises NarrowsError if a process of it has ended."""
        began, before = time.time(), self._sizes()
        rss = 0
        while time.time() < began + seconds:
            self.processes.check("broker", *HONEST)
            rss = max(rss, self.rss_bytes())
            time.sleep(SAMPLE_S)
        ended, after = time.time(), self._sizes()
        merges = [each for each in self.merges() if began <= each["time_s"] < ended]
        span_s = ended - began
        tokens = merges[-1]["run_tokens"] - merges[0]["run_tokens"] if merges else 0
        return StageWindow(
            span_s,
            len(merges) / span_s,
            sum(len(each["contributors"]) for each in merges) / span_s,
            rss,
            max(0, after[0] - before[0]) / span_s,
            max(0, after[1] - before[1]) / span_s,
            tokens / span_s,
        )

    def rss_bytes(self) -> int:
        """Resident memory of the broker."""
        pid = self.processes.running["broker"].pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def start_insider_as_learner(self) -> None:
        """Has the insider's key train honestly; returns when it has joined."""
        self._start_honest(INSIDER)
        self._wait_for(self._folder / f"{INSIDER}.joined", INSIDER)

    def revoke(self, name: str) -> None:
        """Takes a name out of the ring and tells the broker."""
        with edit_ring(self._folder / "keys") as rings:
            rings[0] = rings[0].revoke(name)
        self.processes.kill("broker", signal.SIGHUP)

    def _start_honest(self, name: str) -> None:
        self.processes.start(
            name,
            str(self._folder / f"{name}.key"),
            str(self.scene.params),
            str(self.scene.step_s),
            str(self._folder / f"{name}.joined"),
            module="narrows.bench.attack.honest",
        )

    def _wait_for(self, path: Path, name: str) -> None:
        deadline = time.monotonic() + JOIN_S
        while not path.exists():
            self.processes.check("broker", name)
            if time.monotonic() > deadline:
                raise BrokerUnreachable(f"{name} has not joined within {JOIN_S:.0f} s")
            time.sleep(0.05)

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the broker's log, and of its state directory as far as written."""
        log = self._folder / "broker.log"
        state = [path for path in (self._folder / "state").rglob("*") if path.is_file()]
        return log.stat().st_size, sum(_written_bytes(path) for path in state)

    def merges(self) -> Iterator[dict[str, Any]]:
        """The `merged` events of the run so far."""
        with (self._folder / "events.jsonl").open() as file:
            for line in file:
                if line.endswith("\n") and '"merged"' in line:
                    event = json.loads(line)
                    if event["event"] == "merged":
                        yield event


def _written_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # A checkpoint was replaced meanwhile.
        return 0
