"""`narrows bench fairness`: unequal learners share a run; the work of each must count.

A cell is a mix of step times, with two runs side by side, because learners whose step is a timed
wait leave the machine idle. The calm run goes on undisturbed. In the rough one the slowest learner
is away for a third of the time, at most a minute, and the broker is killed while it is.

A learner's share is the part of its own tokens that durable rounds hold. Nothing else than being
under way may be missing: about a period. The run's clock must be the sum of what was merged.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from narrows.bench.kit.rows import Column, Row, bench
from narrows.bench.kit.run import TOKENS, Run, Toy
from narrows.bench.reference.worker import need_torch
from narrows.broker.store import History
from narrows.proto.errors import ConfigError

PARAMS: Final = 1 << 12
FRAGMENTS: Final = 4
SYNC_PERIOD_STEPS: Final = 10

MIXES: Final = (
    (0.3, 0.3, 0.3, 0.3),
    (0.01, 0.3, 0.3, 0.3),
    (0.025, 0.5, 0.5),
    (0.05, 0.5),
    (0.005, 0.017, 0.5),
)
"""Seconds that a step of each learner takes; the first mix, of equals, is what others are held
against."""
SHORT: Final = ((0.1, 0.1), (0.02, 0.2))
ASKED: Final = 0.9
"""Part of the equals' share that every learner must have."""
AWAY_S_MAX: Final = 60.0

COLUMNS: Final = (
    Column("step s", "step_s"),
    Column("shares, calm", "calm_shares"),
    Column("behind", "calm_behind_periods", "{:.2f}"),
    Column("clock off", "calm_clock_off_tokens"),
    Column("shares, rough", "rough_shares"),
    Column("behind", "rough_behind_periods", "{:.2f}"),
    Column("clock off", "rough_clock_off_tokens"),
)
"""Shares in the order of the step times. Behind: tokens logged and not merged, in tokens that all
learners make in a period. Clock off: its distance from the sum of the merged tokens."""

STEP_TOKENS: Final = 4 * 64
"""Tokens of a step of the trained model: batch and context of its preset."""
TRAINED_STEPS: Final = 2400
"""Steps of all learners together: about a minute, whoever makes them."""
DEAD: Final = "1:1:1:1, one dead half of the time"
DEAD_S: Final = 8.0
TRAINED: Final = {
    "1:1:1:1": (0.08, 0.08, 0.08, 0.08),
    "4:1": (0.025, 0.1),
    "10:1": (0.02, 0.2),
    "10:1:1": (0.02, 0.2, 0.2),
    DEAD: (0.08, 0.08, 0.08, 0.08),
    "the fast one alone": (0.02,),
}
"""Seconds that are added to each step of a learner, far more than the step itself takes."""

TRAINED_COLUMNS: Final = (
    Column("speeds", "mix"),
    Column("seed", "seed"),
    Column("validation loss", "validation_loss", "{:.4f}"),
    Column("loop s", "loop_s", "{:.0f}"),
)


@dataclass(frozen=True)
class TrainedCell:
    """A run of the reference model to so many steps of all learners together."""

    mix: str
    seed: int
    steps: int = TRAINED_STEPS


@dataclass(frozen=True)
class Cell:
    """A mix, and how long its two runs take."""

    step_s: tuple[float, ...]
    minutes: float
    away: Literal["frozen", "killed"] = "frozen"
    """The slowest learner is stopped by SIGSTOP for a while, or killed and started again."""


def fairness(
    *,
    short: bool = False,
    json_: Annotated[Path | None, Parameter(name="--json")] = None,
    minutes: float = 3.0,
    away: Literal["frozen", "killed"] = "frozen",
    train: bool = False,
    seeds: int = 1,
) -> None:
    """Measure the share of its own tokens that each of several unequal learners has merged.

    Parameters
    ----------
    short
        Two mixes for 15 seconds each.
    json_
        File for the rows.
    minutes
        Length of a cell; there are five.
    away
        What becomes of the slowest learner for a third of the rough run, at most a minute.
    train
        Instead: validation loss of mixes of speeds at equal tokens, a minute for each.
    seeds
        Runs of each trained mix.
    """
    need_torch()
    if train:
        mixes = list(TRAINED)[:1] if short else TRAINED
        trained = [TrainedCell(mix, seed) for mix in mixes for seed in range(1, seeds + 1)]
        bench("fairness", trained, measure_loss, TRAINED_COLUMNS, headline_losses, json=json_)
        return
    if not minutes > 0:
        raise ConfigError("--minutes", expected="> 0", got=str(minutes))
    cells = [Cell(each, 0.25 if short else minutes, away) for each in (SHORT if short else MIXES)]
    bench("fairness", cells, measure, COLUMNS, headline, json=json_)


def measure(cell: Cell) -> Row:
    """One calm and one rough run of a mix, at the same time."""
    toys = [
        Toy(f"learner-{index}", PARAMS, step_s=step_s, seed=index)
        for index, step_s in enumerate(cell.step_s)
    ]
    with Run() as calm, Run() as rough:
        for run in (calm, rough):
            _serve(run, toys)
            for toy in toys:
                run.toy(toy)
        for run in (calm, rough):
            run.wait_until(run.merges, "the first version", *run.running)
        before = _disturb(rough, toys, cell)
        row: Row = {}
        for name, run, dead in (("calm", calm, 0), ("rough", rough, before)):
            row |= {f"{name}_{key}": value for key, value in _look(run, toys, dead).items()}
    return row


def measure_loss(cell: TrainedCell) -> Row:
    """Validation loss of the final model, and the time that its loop took."""
    step_s = TRAINED[cell.mix]
    names = [f"learner-{index}" for index in range(len(step_s))]
    with Run() as run:
        goal = cell.steps * STEP_TOKENS
        run.broker({"run.learners_at_start": len(names), "run.goal_tokens": goal})

        def start(name: str, wait_s: float) -> None:
            run.command(
                name, "learner", "--broker", run.address, "--name", name, "--preset", "nano",
                "--step-wait-s", str(wait_s), "--seed", str(cell.seed),
                "--json", str(run.folder / f"{name}.json"),
            )  # fmt: skip

        for name, wait_s in zip(names, step_s, strict=True):
            start(name, wait_s)
        run.wait_until(run.merges, "the first version", *run.running)
        broker, victim, is_dead = run.running["broker"], names[-1], False
        while broker.exitcode is None:
            broker.join(DEAD_S)
            if cell.mix != DEAD or broker.exitcode is not None:
                continue
            if is_dead:
                start(victim, step_s[-1])
            else:
                run.signal(victim, signal.SIGKILL)
            is_dead = not is_dead
        for name in ("broker", names[0]):
            run.ends(name, 0)
        summary = json.loads((run.folder / f"{names[0]}.json").read_text())
    return {key: summary[key] for key in ("validation_loss", "loop_s")}


def headline_losses(rows: Sequence[Row]) -> list[str]:
    """The mean of each mix."""
    mixes = dict.fromkeys(row["mix"] for row in rows)
    of = {mix: [row["validation_loss"] for row in rows if row["mix"] == mix] for mix in mixes}
    return [f"{mix}: {fmean(losses):.4f} of {len(losses)}" for mix, losses in of.items()]


def _serve(run: Run, toys: Sequence[Toy]) -> None:
    run.broker(
        {
            "run.learners_at_start": len(toys),
            "fragments.count": FRAGMENTS,
            "fragments.sync_period_steps": SYNC_PERIOD_STEPS,
        }
    )


def _disturb(run: Run, toys: Sequence[Toy], cell: Cell) -> int:
    """Lets the rough run go on to its end; steps of the slowest learner's life that was killed."""
    seconds, slowest, steps = 60 * cell.minutes, toys[-1], 0
    began_s, away_s = time.monotonic(), min(AWAY_S_MAX, seconds / 3)

    def until(share: float) -> None:
        run.wait(max(0.0, began_s + share * seconds - time.monotonic()))

    until(1 / 3)
    if cell.away == "frozen":
        run.signal(slowest.name, signal.SIGSTOP)
    else:
        run.signal(slowest.name, signal.SIGKILL)
        run.ends(slowest.name, -signal.SIGKILL)
        del run.running[slowest.name]
        steps = int(run.facts(slowest.name).get("steps", 0))
    until(1 / 3 + away_s / seconds / 2)
    run.signal("broker", signal.SIGKILL)
    run.ends("broker", -signal.SIGKILL)
    _serve(run, toys)
    until(1 / 3 + away_s / seconds)
    if cell.away == "frozen":
        run.signal(slowest.name, signal.SIGCONT)
    else:
        # Else the facts of the dead one are taken for those of the new one, before it has joined.
        (run.folder / f"{slowest.name}.facts").unlink()
        run.toy(slowest)
    until(1.0)
    return steps


def _look(run: Run, toys: Sequence[Toy], dead_steps: int) -> Row:
    """Shares, and how far the clock is from what was merged and from what was logged."""
    for toy in toys:  # At one moment, else the fast ones would log what nobody can merge any more.
        run.signal(toy.name, signal.SIGSTOP)
    steps = {toy.name: int(run.facts(toy.name).get("steps", 0)) for toy in toys}
    steps[toys[-1].name] += dead_steps
    clock = float(run.stop_broker()["run_tokens"])
    merged = merged_tokens(run.folder / "state")
    logged = {name: TOKENS * count for name, count in steps.items()}
    a_period = len(toys) * SYNC_PERIOD_STEPS * TOKENS
    shares = []
    for name, tokens in logged.items():  # Every token is pushed once in each fragment.
        mine = sum(merged[name, fragment] for fragment in range(FRAGMENTS))
        shares.append(round(mine / FRAGMENTS / max(1, tokens), 3))
    return {
        "shares": shares,
        "logged_tokens": list(logged.values()),
        "behind_periods": (sum(logged.values()) - clock) / a_period,
        "clock_off_tokens": round(clock - merged.total() / FRAGMENTS),
    }


def merged_tokens(state: Path) -> Counter[tuple[str, int]]:
    """Tokens in the durable rounds of a state directory, by learner and fragment."""
    merged: Counter[tuple[str, int]] = Counter()
    history = History(state)
    try:
        for row in history.rounds():
            for push in row.round_.contributions:
                merged[push.learner, row.round_.fragment] += push.tokens
    finally:
        history.close()
    return merged


def headline(rows: Sequence[Row]) -> list[str]:
    """The lowest share of calm and rough runs, beside what equals have in calm."""
    equals = [min(row["calm_shares"]) for row in rows if len(set(row["step_s"])) == 1]
    asked = f"asked {ASKED * min(equals):.3f}" if equals else "without equals to compare with"
    lines = []
    for name in ("calm", "rough"):
        lowest, step_s = min((min(row[f"{name}_shares"]), row["step_s"]) for row in rows)
        off = [row["step_s"] for row in rows if abs(row[f"{name}_clock_off_tokens"]) >= 1]
        behind = max(row[f"{name}_behind_periods"] for row in rows)
        lines.append(
            f"{name}: the lowest share is {lowest:.3f} (steps of {step_s} s), {asked}; the clock "
            f"is {f'wrong at {off}' if off else 'exact'}, and {behind:.2f} of a period behind"
        )
    return lines
