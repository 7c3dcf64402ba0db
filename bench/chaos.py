"""`narrows bench chaos`: a broker is killed under load; nothing that a learner saw may be lost.

Half of the kills come at places in the life of a round where a power cut would hurt most; the
broker itself names these places. The other kills come at any moment. Then the bench compares the
state directory with what the learners saw: every published copy must be that of a durable round,
bit for bit; no push may be merged twice; and the rounds, merged again, must give the same digests.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import HURRY, TENSORS, Deployment, Toy
from narrows.broker.process.pipeline import CRASH_PLACES
from narrows.broker.store import History
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError
from narrows.proto.units import counted

LEARNERS: Final = 3
PARAMS: Final = 1 << 12
SETTINGS: Final = {
    "run.learners_at_start": LEARNERS,
    "run.max_offline": 0,
    "fragments.count": 2,
    "broker.keep_history": "true",
    **HURRY,
}
VISITS_MAX: Final = 40
"""The broker passes a place at most so many times before it ends itself there."""
LIFE_S_MAX: Final = 0.5
"""A broker that is killed from outside lives at most so long after its first version."""
ANY: Final = "any"
"""The place of a kill from outside."""

COLUMNS: Final = (
    Column("kills", "kills"),
    Column("at places", "kills_at_places"),
    Column("rounds", "rounds"),
    Column("copies seen", "copies_seen"),
    Column("lost", "copies_lost"),
    Column("merged twice", "pushes_merged_twice"),
    Column("merged again", "rounds_replayed"),
    Column("problems", "problem_count"),
    Column("start to version s", "start_to_version_s", "{:.2f}"),
    Column("steps/s", "steps_per_s", "{:.0f}"),
)


@dataclass(frozen=True)
class ChaosCell:
    """One run."""

    kills: int
    seed: int
    """Draws the places and times of the kills."""


def chaos(*, short: Short = False, json: Json = None, kills: int = 0, seed: int = 1) -> None:
    """Kill a broker under load, and look whether anything was lost. Exit code 1: it was.

    Parameters
    ----------
    kills
        Number of kills; 0: 100, or 10 in the short form.
    seed
        Draws the places and times of the kills.
    """
    if kills < 0:
        raise ConfigError("--kills", expected=">= 0", got=str(kills))
    if kills == 0:
        kills = 10 if short else 100
    rows = bench(
        "chaos", [ChaosCell(kills, seed)], measure, COLUMNS, headline, json=json, seed=seed
    )
    problems = [problem for row in rows for problem in row["problems"]]
    if problems:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED,
            f"{counted(len(problems), 'thing')} went wrong",
            expected="nothing",
            got=problems[0],
        )


def measure(cell: ChaosCell) -> Row:
    """One run, and what is found afterwards.

    Raises NarrowsError if a process does not do as it should.
    """
    rng = random.Random(cell.seed)
    waits_s = list[float]()
    places = Counter({ANY: 1})
    with Deployment() as run:
        run.broker(SETTINGS)
        names = run.toys(Toy("learner", PARAMS, moved=TENSORS), LEARNERS)
        run.wait_merges(2 * LEARNERS)
        began_s = time.monotonic()
        steps = sum(map(run.steps, names))

        # The first kill, and every second one after it, comes from outside.
        run.kill("broker")
        for number in range(1, cell.kills):
            if number % 2 == 0:
                places[ANY] += 1
                waits_s.append(_serve(run))
                run.wait(rng.uniform(0.0, LIFE_S_MAX))
                run.kill("broker")
            else:
                place = rng.choice(CRASH_PLACES)
                places[place] += 1
                run.broker(SETTINGS, crash_at=f"{place}:{rng.randint(1, VISITS_MAX)}")
                run.running["broker"].ends(-signal.SIGKILL)

        waits_s.append(_serve(run))
        steps = sum(map(run.steps, names)) - steps
        steps_per_s = steps / (time.monotonic() - began_s)
        run.running["broker"].stop()
        found = compare(run.state, {name: run.installed(name) for name in names})
    return {
        "kills_at_places": cell.kills - places[ANY],
        "kills_by_place": dict(sorted(places.items())),
        **found,
        "start_to_version_s": median(waits_s),
        "steps_per_s": steps_per_s,
    }


def compare(state: Path, seen: Mapping[str, Sequence[Mapping[str, Any]]]) -> Row:
    """Looks for whatever a kill may have spoilt: `problems` are lines for people.

    `seen` are the versions that each learner says it has installed. Version 0 is never merged.
    """
    with closing(History(state)) as history:
        rows = list(history.rounds())
        audit = history.audit()
    durable = {
        (row.round_.fragment, row.round_.version, f"{row.digests.published:016x}")
        for row in rows
        if row.round_.version > 0
    }
    copies = {
        name: {
            (each["fragment"], each["version"], each["digest"])
            for each in events
            if each["version"] > 0
        }
        for name, events in seen.items()
    }
    pushes = Counter(
        (push.incarnation, row.round_.fragment, push.push_id)
        for row in rows
        for push in row.round_.contributions
    )

    lost = sorted((name, *copy) for name, mine in copies.items() for copy in mine - durable)
    twice = sorted(push for push, times in pushes.items() if times > 1)
    problems = [
        *audit.problems,
        *(f"{name} saw version {v} of fragment {f} ({d})" for name, f, v, d in lost),
        *(f"push {i} of {who}, fragment {f}, was merged twice" for who, f, i in twice),
        *(f"{name} has seen no version" for name, mine in copies.items() if not mine),
    ]
    if audit.replayed != len(durable):  # The rows lack a version, or hold one too many.
        problems.append(f"{audit.replayed} of {len(durable)} rounds could be merged again")
    return {
        "rounds": len(durable),
        "copies_seen": sum(len(mine) for mine in copies.values()),
        "copies_lost": len(lost),
        "pushes_merged_twice": len(twice),
        "rounds_replayed": audit.replayed,
        "problem_count": len(problems),
        "problems": problems,
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """One line per run."""
    return [
        f"{row['kills']} kills, {row['rounds']:,} rounds, {row['copies_seen']:,} published copies "
        f"compared: {next(iter(row['problems']), 'nothing was lost')}"
        for row in rows
    ]


def _serve(run: Deployment) -> float:
    """Starts the broker; returns the seconds until it has made a version."""
    versions = len(run.merges())
    started_s = time.monotonic()
    run.broker(SETTINGS)
    run.wait_merges(versions + 1)
    return time.monotonic() - started_s
