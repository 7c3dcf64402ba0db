"""The main job with real processes: train, kill, return, restart, join late, unequal speeds.

Where something is waited for the run has no goal: learners train on while a disk stands still, and
would be done before the broker has published what the test waits for.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from process_run import Run
from running import HANG_S, wait_until

from narrows.bench.kit.processes import Processes
from narrows.proto.messages import LearnerStatus, Phase

pytestmark = pytest.mark.slow

STEP_TOKENS = 256
"""Tokens of one inner step of the tiny preset."""


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Generator[Run]:
    with Processes(tmp_path) as processes:
        yield Run(tmp_path, data, processes)


def test_a_killed_learner_returns_under_its_name_and_contributes(run: Run) -> None:
    run.broker("--set", "run.learners_at_start=2")
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.contributions("b") >= 2, "contributions of both")
    first = run.of("b")
    assert first is not None
    run.processes.kill("b")
    run.learner("b")
    wait_until(lambda: _is_newer(run.of("b"), first), "b to return and contribute")
    merges = run.merges()
    wait_until(lambda: run.merges() >= merges + 20, "some more merges")
    run.leave("a", "b")
    run.check_digests("a", "b")
    assert run.summary("a")["train_loss"] < 4.0  # Uniform bytes are ln 256 = 5.5.
    ledger = run.summary("a")["stats"]["ledger"]
    fates = ("pending", "merged", "overwritten", "refused", "rolled_back", "skipped")
    assert sum(ledger[fate] for fate in fates) == ledger["logged"] * 4
    assert ledger["merged"] > ledger["overwritten"]


def _is_newer(now: LearnerStatus | None, before: LearnerStatus) -> bool:
    """True if another process has the name and has contributed."""
    return now is not None and now.incarnation != before.incarnation and now.contributions > 0


def test_a_killed_broker_resumes_and_the_learners_come_back(run: Run) -> None:
    often = ("--set", "broker.checkpoint_versions=4")
    run.broker(*often)
    run.learner("a")
    run.learner("b")
    wait_until(lambda: run.merges() >= 10, "some merges")
    before = run.status()
    run.processes.kill("broker")
    run.broker(*often)
    after = run.status()
    assert before is not None and after is not None
    assert after.run_id == before.run_id
    assert after.epoch[:2] > before.epoch[:2]
    assert sum(after.versions) >= sum(before.versions) - 8
    wait_until(lambda: run.contributions("a") and run.contributions("b"), "both to come back")
    run.leave("a", "b")
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
    run.broker()
    run.learner("fast")
    wait_until(lambda: run.merges() >= 6, "some merges")
    run.learner("slow", "--step-wait-s", "0.05")
    wait_until(lambda: run.contributions("slow") >= 2, "the slow one's contributions")
    run.leave("fast", "slow")
    run.check_digests("fast", "slow")
    assert run.summary("slow")["steps"] < run.summary("fast")["steps"]


def test_a_frozen_learner_holds_nobody_up_and_comes_back(run: Run) -> None:
    run.broker("--set", "liveness.late=0.5s", "--set", "liveness.lost=2s")
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
    run.leave("a", "b")
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
