"""`narrows bench attack revoke`: how soon a revoked learner is cut, and what the others lose."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from narrows.bench.attack.stage import HONEST, INSIDER, Scene, Stage
from narrows.bench.kit import machine
from narrows.bench.kit.connections import established
from narrows.bench.kit.failures import ProcessFailed
from narrows.bench.kit.processes import Processes, work_folder
from narrows.broker.cli.tables import Facts, show, terminal

CUT_S_MAX: Final = 2.0
ROUNDS_LOST_MAX: Final = 1
REMEDY: Final = "narrows keys allow"
"""What the learner's log must name."""
LOOK_S: Final = 0.005
END_S: Final = 30.0


@dataclass(frozen=True)
class Revocation:
    """One revocation in a run of three learners; seconds count from SIGHUP on."""

    connections: int
    """Connections of the revoked learner."""
    cut_s: float
    """Until the last of them had ended."""
    remedy_s: float
    """Until the learner's log said what its operator has to do."""
    last_contribution_s: float
    """Until the last merge with a push of the revoked learner; negative: it was before."""
    rounds: int
    """Merges in the time that was watched from then on."""
    rounds_lost: dict[str, int]
    """Merges of that time without a push of each other learner."""
    longest_gap_s: float
    """Longest time between two merges then."""
    usual_gap_s: float
    """Median time between two merges before."""

    @property
    def holds(self) -> bool:
        return self.cut_s <= CUT_S_MAX and max(self.rounds_lost.values()) <= ROUNDS_LOST_MAX


def run_revocation(*, seconds: float, scene: Scene, json_file: Path | None) -> bool:
    """Revokes a learner's key in the middle of a run; watches for `seconds` before and after."""
    with work_folder(None, "revoke") as folder, Processes(folder) as processes:
        stage = Stage.open(processes, scene)
        stage.start_insider_as_learner()
        stage.watch(seconds)
        revocation = _revoke(stage, seconds)
    machine.write_result(json_file, "attack revoke", {"rows": [asdict(revocation)]})
    show(terminal(), _facts(revocation))
    return revocation.holds


def _revoke(stage: Stage, seconds: float) -> Revocation:
    learner = stage.processes.running[INSIDER].pid
    before, revoked_at = established(learner), time.time()
    if not before:
        raise ProcessFailed(INSIDER, "it has no connection")
    stage.revoke(INSIDER)
    _wait(lambda: not before & established(learner), "its connections stay open")
    cut_s = time.time() - revoked_at
    _wait(lambda: REMEDY in stage.processes.log(INSIDER), f"its log does not say {REMEDY!r}")
    remedy_s = time.time() - revoked_at
    stage.watch(seconds)
    merges = list(stage.merges())
    times = [each["time_s"] for each in merges]
    gaps = [(b, b - a) for a, b in pairwise(times)]
    since = [each for each in merges if each["time_s"] >= revoked_at]
    return Revocation(
        len(before),
        cut_s,
        remedy_s,
        max(at for at, each in zip(times, merges, strict=True) if _has(each, INSIDER)) - revoked_at,
        len(since),
        {name: sum(not _has(each, name) for each in since) for name in HONEST},
        max(gap for at, gap in gaps if at >= revoked_at),
        median(gap for at, gap in gaps if at < revoked_at),
    )


def _has(merge: dict[str, Any], name: str) -> bool:
    return name in merge["contributors"]


def _wait(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + END_S
    while not done():
        if time.monotonic() > deadline:
            raise ProcessFailed(INSIDER, otherwise)
        time.sleep(LOOK_S)


def _facts(found: Revocation) -> Facts:
    lost = ", ".join(f"{name} {count}" for name, count in found.rounds_lost.items())
    shown = Facts("A learner's key is revoked")
    shown.add("connections", f"{found.connections}")
    shown.add("all of them cut after", f"{found.cut_s:.2f} s")
    shown.add("the learner names the remedy after", f"{found.remedy_s:.2f} s")
    shown.add("its last push was merged after", f"{found.last_contribution_s:.2f} s")
    shown.add("rounds that others lost", f"{lost} of {found.rounds}")
    shown.add(
        "longest pause between merges",
        f"{found.longest_gap_s:.2f} s (median {found.usual_gap_s:.2f} s before)",
    )
    return shown
