"""The main job with real processes: train, kill, return, restart, join late, unequal speeds."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from running import HANG_S, wait_until

from narrows.bench.processes import Processes
from narrows.broker.show import ask_status
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.messages import LearnerStatus, Phase, Status

pytestmark = pytest.mark.slow

STEP_TOKENS = 256
"""Of one inner step of the tiny preset."""


class Run:
    """A broker and learners of one run."""

    def __init__(self, folder: Path, data: Path, processes: Processes) -> None:
        self.folder, self.data, self.processes = folder, data, processes
        self.address = ""

    def broker(self, *arguments: str) -> None:
        """Starts the broker, or starts it again on the ports that it had."""
        ports = re.findall(r"data ports (\d+) and (\d+)", self.log("broker"))
        if ports:
            up, down = ports[-1]
            arguments += ("-s", f"broker.uplink_port={up}", "-s", f"broker.downlink_port={down}")
        self.address = self.processes.start_broker(
            "--listen", self.address or "tcp://127.0.0.1:0",
            "--state-dir", str(self.folder / "state"),
            "--events", str(self.folder / "broker.jsonl"),
            "--set", "broker.beat_s=0.2",
            *arguments,
        )  # fmt: skip

    def learner(self, name: str, *arguments: str) -> None:
        self.processes.start(
            name, "learner", "--broker", self.address, "--name", name,
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


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Generator[Run]:
    with Processes(tmp_path) as processes:
        yield Run(tmp_path, data, processes)


def test_a_killed_learner_returns_under_its_name_and_contributes(run: Run) -> None:
    run.broker("--goal-tokens", str(600 * STEP_TOKENS), "--set", "run.learners_at_start=2")
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.contributions("b") >= 2, "contributions of both")
    first = run.of("b")
    assert first is not None
    run.processes.kill("b")
    run.learner("b")
    wait_until(lambda: _is_newer(run.of("b"), first), "b to return and contribute")
    run.finish("a", "b")
    run.check_digests("a", "b")
    assert run.summary("a")["train_loss"] < 4.0  # Uniform bytes are ln 256 = 5.5.
    ledger = run.summary("a")["stats"]["ledger"]
    fates = ("pending", "merged", "overwritten", "refused", "rolled_back", "skipped")
    assert sum(ledger[fate] for fate in fates) == ledger["logged"] * 4
    assert ledger["merged"] > ledger["overwritten"]


def _is_newer(now: LearnerStatus | None, before: LearnerStatus) -> bool:
    """Another process has the name and has contributed."""
    return now is not None and now.incarnation != before.incarnation and now.contributions > 0


def test_a_killed_broker_resumes_and_the_learners_come_back(run: Run) -> None:
    goal = ("--goal-tokens", str(800 * STEP_TOKENS), "--set", "broker.checkpoint_versions=4")
    run.broker(*goal)
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.merges() >= 10, "some merges")
    before = run.status()
    run.processes.kill("broker")
    run.broker(*goal)
    after = run.status()
    assert before is not None and after is not None
    assert after.run_id == before.run_id
    assert after.epoch > before.epoch
    assert sum(after.versions) >= sum(before.versions) - 8
    wait_until(lambda: run.contributions("a") and run.contributions("b"), "both to come back")
    run.finish("a", "b")
    run.check_digests("a", "b")


def test_sigterm_leaves_a_checkpoint_of_the_newest_versions(run: Run) -> None:
    run.broker("--set", "broker.checkpoint_versions=1000")
    run.learner("a")
    wait_until(lambda: run.merges() >= 6, "some merges")
    run.processes.kill("a", signal.SIGTERM)
    assert run.processes.wait("a", HANG_S) == 0
    before = run.status()
    run.processes.kill("broker", signal.SIGTERM)
    assert run.processes.wait("broker", HANG_S) == 0
    run.broker()
    after = run.status()
    assert before is not None and after is not None
    assert after.versions == before.versions


def test_a_late_and_a_slow_learner_contribute(run: Run) -> None:
    run.broker("--goal-tokens", str(700 * STEP_TOKENS))
    run.learner("fast")
    wait_until(lambda: run.merges() >= 6, "some merges")
    run.learner("slow", "--step-wait-s", "0.05")
    wait_until(lambda: run.contributions("slow") >= 2, "the slow one's contributions")
    run.finish("fast", "slow")
    run.check_digests("fast", "slow")
    assert run.summary("slow")["steps"] < run.summary("fast")["steps"]


def test_a_frozen_learner_holds_nobody_up_and_comes_back(run: Run) -> None:
    run.broker(
        "--goal-tokens", str(1500 * STEP_TOKENS),
        "--set", "liveness.late=0.5s", "--set", "liveness.lost=2s",
    )  # fmt: skip
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.contributions("a") and run.contributions("b"), "both to contribute")
    run.processes.kill("b", signal.SIGSTOP)
    wait_until(lambda: (s := run.of("b")) and s.state == "lost", "b to be lost")
    merges = run.merges()
    wait_until(lambda: run.merges() >= merges + 4, "merges without b")
    before = run.contributions("b")
    run.processes.kill("b", signal.SIGCONT)
    wait_until(lambda: run.contributions("b") > before, "b to contribute again")
    run.finish("a", "b")
    run.check_digests("a", "b")


@pytest.mark.parametrize("mode", ["streaming", "diloco"])
def test_a_dead_learner_shrinks_all_in_the_lockstep_modes(run: Run, mode: str) -> None:
    run.broker(
        "--mode", mode, "--goal-tokens", str(400 * STEP_TOKENS),
        "--set", "run.learners_at_start=2", "--set", "liveness.late=1s",
        "--set", "liveness.lost=3s",
    )  # fmt: skip
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.contributions("b") >= 2, "contributions of both")
    run.processes.kill("b")
    run.finish("a")
    assert run.log("broker").count("left: ") >= 1
    final = json.loads((run.folder / "broker.jsonl").read_text().splitlines()[-1])["status"]
    assert final["phase"] == Phase.ENDED
    assert final["run_tokens"] >= 400 * STEP_TOKENS
