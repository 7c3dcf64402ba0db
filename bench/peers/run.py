"""One run of one system, undisturbed or with one process killed, and its results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from narrows.bench.kit.failures import ProcessFailed, log_of, logs_kept
from narrows.bench.kit.loopback import own_loopback
from narrows.bench.kit.processes import Processes
from narrows.bench.peers.systems import (
    COORDINATOR,
    PeerExchange,
    PeerPlan,
    System,
    member_name,
    system_of,
)

PeerEvent: TypeAlias = Literal["none", "member_killed", "coordinator_killed"]
EVENTS: Final[tuple[PeerEvent, ...]] = ("none", "member_killed", "coordinator_killed")

KILL_AT: Final = 1 / 3
"""Share of the steps at which a process gets SIGKILL."""

RETURN_AFTER_S: Final = 3.0
"""Time after which the killed process is started again."""

STALL_MAX_S: Final = 45.0
"""A run without any exchange for so long is given up."""

POLL_S: Final = 0.1


@dataclass
class PeerStory:
    """Times of the events of a run, in Unix time; 0: the event did not happen."""

    killed_s: float = 0.0
    returned_s: float = 0.0
    gave_up: str = ""
    """Reason why the run did not finish; "" if it did."""
    gave_up_s: float = 0.0

    witness: str = ""
    """Process whose log may say more."""

    def give_up(self, witness: str, why: str) -> None:
        self.witness, self.gave_up, self.gave_up_s = witness, why, time.time()


def run_event(name: str, plan: PeerPlan, event: PeerEvent) -> dict[str, Any]:
    """The row of one run. Raises PeerAbsent, or NarrowsError if the run did not even start."""
    with (
        tempfile.TemporaryDirectory(prefix="narrows-peers-") as folder,
        logs_kept(Path(folder)),
        own_loopback() as loopback,
        Processes(Path(folder), prefix=loopback.prefix, groups=True) as processes,
    ):
        system = system_of(name, plan, processes)
        before_bytes = loopback.carried_bytes()
        _start(system, plan, processes)
        story = _follow(system, plan, processes, event)
        exchanges = system.exchanges()
        loss = system.loss() if not story.gave_up else None
        note = ""
        if story.gave_up:
            note = f"{name}: {story.gave_up}; {log_of(Path(folder), story.witness)}"
        carried_bytes = loopback.carried_bytes() - before_bytes
    return {
        "loss": loss,
        "bytes": carried_bytes,
        "bytes_isolated": bool(loopback.namespace),
        **judged(exchanges, plan.members, event, story),
        "note": note,
    }


def _start(system: System, plan: PeerPlan, processes: Processes) -> None:
    """Returns with the first exchange. Raises NarrowsError if there is none."""
    system.start_coordinator(0)
    for rank in range(plan.members):
        system.start_member(rank, 0)
    deadline_s = time.monotonic() + 2 * STALL_MAX_S
    while not system.exchanges():
        system.release()
        for name in processes.running:
            if processes.running[name].poll() is not None:
                said = processes.reason(name)
                raise ProcessFailed(name, f"{name} ended before the run began: {said}")
        if time.monotonic() > deadline_s:
            name = next(iter(processes.running))
            raise ProcessFailed(name, f"no exchange at all; {name}: {processes.reason(name)}")
        time.sleep(POLL_S)


def _follow(system: System, plan: PeerPlan, processes: Processes, event: PeerEvent) -> PeerStory:
    """Watches a run to its end; kills the process that `event` names and starts it again."""
    story = PeerStory()
    victim = {"member_killed": member_name(plan.members - 1), "coordinator_killed": COORDINATOR}
    killed = victim.get(event, "")
    survivors = [rank for rank in range(plan.members) if member_name(rank) != killed]
    while not all(map(system.finished, survivors)):
        now_s, newest = time.time(), system.exchanges()[-1]
        dead = _dead(system, survivors, processes)
        if dead:
            story.give_up(dead, f"{dead} ended: {processes.reason(dead)}")
            break
        if now_s - max(newest.time_s, story.killed_s) > STALL_MAX_S:
            story.give_up(next(iter(processes.running)), f"no exchange for {STALL_MAX_S:.0f} s")
            break
        if killed and not story.killed_s and newest.step >= KILL_AT * plan.steps:
            processes.kill(killed)
            story.killed_s = time.time()
        if story.killed_s and not story.returned_s and now_s - story.killed_s > RETURN_AFTER_S:
            story.returned_s = now_s
            if killed == COORDINATOR:
                system.start_coordinator(newest.step)
            else:
                system.start_member(plan.members - 1, newest.step)
        time.sleep(POLL_S)
    return story


def _dead(system: System, survivors: Sequence[int], processes: Processes) -> str:
    """Name of a survivor that ended before it had finished; "" if there is none."""
    for rank in survivors:
        name = member_name(rank)
        if processes.running[name].poll() is not None and not system.finished(rank):
            return name
    return ""


def judged(
    exchanges: Sequence[PeerExchange], members: int, event: PeerEvent, story: PeerStory
) -> dict[str, Any]:
    """Figures from the exchanges; docs/benchmarks.md, "Other systems", has the definitions."""
    first, last = exchanges[0], exchanges[-1]
    row: dict[str, Any] = {
        "seconds": last.time_s - first.time_s,
        "exchanges": len(exchanges),
        "steps_done": last.step,
        "went_on": None,
        "recovered_after_s": None,
        "rejoined_after_s": None,
        "longest_pause_s": None,
    }
    if event == "none" or not story.killed_s:
        return row
    after = [each for each in exchanges if each.time_s > story.killed_s]
    if event == "member_killed":
        # An exchange with all members before the return was under way when the victim died.
        after = [
            each
            for each in after
            if each.members < members or (story.returned_s and each.time_s > story.returned_s)
        ]
    rejoined = [
        each
        for each in after
        if story.returned_s and each.time_s > story.returned_s and each.members == members
    ]
    times_s = [story.killed_s, *(each.time_s for each in after)]
    if story.gave_up:
        times_s.append(story.gave_up_s)
    pauses_s = [later - earlier for earlier, later in pairwise(times_s)]
    return row | {
        "went_on": bool(after),
        "recovered_after_s": after[0].time_s - story.killed_s if after else None,
        "rejoined_after_s": rejoined[0].time_s - story.killed_s if rejoined else None,
        "longest_pause_s": max(pauses_s, default=None),
    }
