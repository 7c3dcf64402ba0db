"""The two tables of the broker: the phases of a run, and the stages of a fragment's round."""

from __future__ import annotations

from enum import Enum
from typing import Final

from narrows.proto.messages import Phase


class RunPhase(Enum):
    """Where the run stands. Learners know four phases; CLOSING is the broker's own."""

    SEEDING = "seeding"
    """Version 0 is not durable yet, or too few learners have joined."""
    RUNNING = "running"
    ENDING = "ending"
    """The goal is reached; the last round of each fragment is collected."""
    CLOSING = "closing"
    """The last rounds are over, but that is not on the disk yet. A broker that is started again now
    would open them anew, so no learner may leave."""
    ENDED = "ended"
    """The end is durable: the heads are final."""

    @property
    def visible(self) -> Phase:
        """The phase that learners are told."""
        return Phase.ENDING if self is RunPhase.CLOSING else Phase(self.value)


class Turn(Enum):
    """An event that ends a phase."""

    BEGIN = "version 0 is durable and enough learners have joined"
    REACH_GOAL = "the goal is reached"
    CLOSE = "the last round of every fragment is over"
    CONFIRM_END = "the end is durable"


PHASES: Final[dict[tuple[RunPhase, Turn], RunPhase]] = {
    (RunPhase.SEEDING, Turn.BEGIN): RunPhase.RUNNING,
    (RunPhase.RUNNING, Turn.REACH_GOAL): RunPhase.ENDING,
    (RunPhase.ENDING, Turn.CLOSE): RunPhase.CLOSING,
    (RunPhase.CLOSING, Turn.CONFIRM_END): RunPhase.ENDED,
}
"""Every other pair is a bug. A run never goes back."""


class Stage(Enum):
    """Where a fragment's round stands. At most two fragments are out of IDLE."""

    IDLE = "idle"
    """Its newest version is published."""
    COLLECTING = "collecting"
    """Learners are asked; what waited in the inbox counts already."""
    MERGING = "merging"
    """A worker adds. What comes now waits for the next round."""
    COMMITTING = "committing"
    """The next version is on its way to the disk; nobody may know it."""


class Step(Enum):
    """An event that moves a round on."""

    LAUNCH = "learners are asked"
    DUE = "enough pushes are here"
    ABANDON = "nobody is left who could push"
    MERGED = "the sum is made"
    FAILED = "the merge failed"
    DURABLE = "the round's row is committed"


STAGES: Final[dict[tuple[Stage, Step], Stage]] = {
    (Stage.IDLE, Step.LAUNCH): Stage.COLLECTING,
    (Stage.COLLECTING, Step.DUE): Stage.MERGING,
    (Stage.COLLECTING, Step.ABANDON): Stage.IDLE,
    (Stage.MERGING, Step.MERGED): Stage.COMMITTING,
    (Stage.MERGING, Step.FAILED): Stage.IDLE,
    (Stage.COMMITTING, Step.DURABLE): Stage.IDLE,
}
"""Every other pair is a bug."""


def next_phase(phase: RunPhase, turn: Turn) -> RunPhase:
    """The phase after an event; asserts that the table has the pair."""
    assert (phase, turn) in PHASES, f"{turn.name} ({turn.value}) in phase {phase.name}"
    return PHASES[phase, turn]


def next_stage(stage: Stage, step: Step) -> Stage:
    """The stage after an event; asserts that the table has the pair."""
    assert (stage, step) in STAGES, f"{step.name} ({step.value}) in stage {stage.name}"
    return STAGES[stage, step]
