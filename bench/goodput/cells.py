"""Cells of the goodput bench: the published table, and a sweep over its assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from narrows.bench.goodput.machines import STEP_S
from narrows.bench.goodput.published import CHIPS, LEARNERS, Place

MONTH_S: Final = 30 * 86_400.0
QUARTER_S: Final = 3 * MONTH_S
DAY_S: Final = 100_000.0
"""A little more than a day."""
DAYS: Final = 2
"""Length of the tapes for the real state machines, in units of DAY_S."""

GoodputMethod: TypeAlias = Literal["data_parallel", "elastic", "decoupled", "sweep"]


@dataclass(frozen=True)
class GoodputCell:
    """One row. The table's rows keep the defaults of the sweep's fields."""

    method: GoodputMethod
    learners: int
    chips: int
    """Chips of the whole cluster; 0: nothing fails."""
    span_s: float
    sweep: str = ""
    """Name of the sweep; "" in the table. `name` is the variant."""
    name: str = ""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    step_s: float = STEP_S
    restarts: bool = False
    """A failure kills the whole learner; it restarts instead of reconfiguring."""
    ramp_steps: int = 0
    """Steps before a learner's new process contributes."""
    slow: float = 1.0
    """Length of every second learner's steps, in units of the others'."""
    added: int = 0
    """Learners beside `learners` that are present every second hour."""

    @property
    def place(self) -> Place:
        return Place(self.method, self.learners, self.chips)


def table(machines_s: float) -> list[GoodputCell]:
    """Every published cell; the state machines play tapes of `machines_s`."""
    alone: tuple[GoodputMethod, ...] = ("data_parallel", "elastic")
    cells = [GoodputCell(method, 1, chips, QUARTER_S) for method in alone for chips in CHIPS]
    for learners in LEARNERS:
        cells += [GoodputCell("decoupled", learners, chips, machines_s) for chips in CHIPS]
    return cells


HEADLINE: Final = (8, 1_200_000)
NO_WAITING: Final[dict[str, object]] = {"merge.grace_fraction": 0.0, "merge.wait_fraction": 0.0}
SWEEP_S: Final = 30_000.0


def sweeps() -> list[GoodputCell]:
    """Variants of the headline cell, then runs without failures."""
    return [*_quorums(), *_restarts(), *_steps(), *_speeds(), *_scavenging()]


def _quorums() -> list[GoodputCell]:
    return [
        GoodputCell(
            "sweep", *HEADLINE, SWEEP_S, "quorum", f"K = {quorum}, {text}",
            {"merge.quorum": quorum, **settings},
        )
        for quorum in (1, 4, 8)
        for text, settings in (("grace", {}), ("no grace", NO_WAITING))
    ]  # fmt: skip


def _restarts() -> list[GoodputCell]:
    return [
        GoodputCell(
            "sweep", *HEADLINE, SWEEP_S, "restart", f"learners restart, ramp of {ramp} steps",
            restarts=True, ramp_steps=ramp,
        )
        for ramp in (0, 20)
    ]  # fmt: skip


def _steps() -> list[GoodputCell]:
    return [
        GoodputCell(
            "sweep", *HEADLINE, SWEEP_S, "step", f"inner steps of {step_s:g} s", step_s=step_s
        )
        for step_s in (5.0, 10.0, 40.0)
    ]


def _speeds() -> list[GoodputCell]:
    everybody: dict[str, object] = {"run.mode": "streaming"}
    rules: list[tuple[str, dict[str, object]]] = [
        ("streaming: all wait for all", everybody),
        *((f"K = {k}, no grace", {"merge.quorum": k, **NO_WAITING}) for k in (8, 4, 1)),
        ("K = 1, grace", {}),
    ]
    return [
        GoodputCell("sweep", 8, 0, SWEEP_S, "speeds", name, settings, slow=1.18)
        for name, settings in rules
    ]


def _scavenging() -> list[GoodputCell]:
    return [
        GoodputCell(
            "sweep", 4, 0, DAY_S, "scavenging", f"+{25 * added}% every second hour",
            ramp_steps=20, added=added,
        )
        for added in (0, 1, 2, 4, 12)
    ]  # fmt: skip
