"""`narrows bench fairness`: unequal learners share a run; the work of each must count.

A cell is a mix of step times. It has two runs at the same time: the learners only wait in a step,
so the machine has room for both. Nothing disturbs the calm run. In the rough one the slowest
learner is away for a third of the time, at most a minute, and the broker is killed meanwhile.

A learner's share is the part of its own tokens that durable rounds hold. Only what is still under
way may be missing: about a period. The run's clock must be the sum of what was merged.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import TOKENS, Deployment, Toy

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
"""Seconds that a step of each learner takes. The other mixes are compared with the first, of
equals."""
SHORT_MIXES: Final = ((0.1, 0.1), (0.02, 0.2))
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
"""Shares stand in the order of the step times. Behind: tokens that were logged and not merged, in
units of those that all learners make in a period. Clock off: tokens between the clock and the sum
of the merged ones."""


@dataclass(frozen=True)
class FairnessCell:
    """A mix, and how long its two runs take."""

    step_s: tuple[float, ...]
    minutes: float


def fairness(*, short: Short = False, json: Json = None) -> None:
    """Measure the share of its own tokens that each of several unequal learners has merged."""
    if short:
        cells = [FairnessCell(mix, 0.25) for mix in SHORT_MIXES]
    else:
        cells = [FairnessCell(mix, 3.0) for mix in MIXES]
    bench("fairness", cells, measure, COLUMNS, headline, json=json)


def measure(cell: FairnessCell) -> Row:
    """Makes the calm and the rough run of a mix at the same time."""
    toys = [
        Toy(f"learner-{index}", PARAMS, step_s=step_s, seed=index)
        for index, step_s in enumerate(cell.step_s)
    ]
    settings = {
        "run.learners_at_start": len(toys),
        "fragments.count": FRAGMENTS,
        "fragments.sync_period_steps": SYNC_PERIOD_STEPS,
    }
    with Deployment() as calm, Deployment() as rough:
        for run in (calm, rough):
            run.broker(settings)
            for toy in toys:
                run.toy(toy)
        for run in (calm, rough):
            run.wait_merges(1)

        # A third of the time is calm. Then the slowest learner is away, and the rest is calm again.
        seconds = 60 * cell.minutes
        slowest = toys[-1].name
        away_s = min(AWAY_S_MAX, seconds / 3)
        rough.wait(seconds / 3)
        rough.running[slowest].signal(signal.SIGSTOP)
        rough.wait(away_s / 2)
        rough.kill("broker")
        rough.broker(settings)
        rough.wait(away_s / 2)
        rough.running[slowest].signal(signal.SIGCONT)
        rough.wait(seconds * 2 / 3 - away_s)

        row: Row = {}
        for name, run in (("calm", calm), ("rough", rough)):
            row |= {f"{name}_{key}": value for key, value in _look(run, toys).items()}
    return row


def _look(run: Deployment, toys: Sequence[Toy]) -> Row:
    """Each learner's share, and how far the clock is from what was merged and what was logged."""
    logged, merged = run.account([toy.name for toy in toys])
    clock = float(run.final()["run_tokens"])
    shares = list[float]()
    for name, tokens in logged.items():
        # Every token is pushed once in each fragment.
        mine = sum(merged[name, fragment] for fragment in range(FRAGMENTS))
        shares.append(round(mine / FRAGMENTS / max(1, tokens), 3))
    period_tokens = len(toys) * SYNC_PERIOD_STEPS * TOKENS
    return {
        "shares": shares,
        "logged_tokens": list(logged.values()),
        "behind_periods": (sum(logged.values()) - clock) / period_tokens,
        "clock_off_tokens": round(clock - merged.total() / FRAGMENTS),
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """The lowest share of calm and rough runs, beside what equals have in calm."""
    equals = [min(row["calm_shares"]) for row in rows if len(set(row["step_s"])) == 1]
    asked = "without equals to compare with"
    if equals:
        asked = f"asked {ASKED * min(equals):.3f}"
    lines = []
    for name in ("calm", "rough"):
        lowest, step_s = min((min(row[f"{name}_shares"]), row["step_s"]) for row in rows)
        wrong_at = [row["step_s"] for row in rows if abs(row[f"{name}_clock_off_tokens"]) >= 1]
        clock = f"wrong at {wrong_at}" if wrong_at else "exact"
        behind = max(row[f"{name}_behind_periods"] for row in rows)
        lines.append(
            f"{name}: the lowest share is {lowest:.3f} (steps of {step_s} s), {asked}; the clock "
            f"is {clock}, and {behind:.2f} of a period behind"
        )
    return lines
