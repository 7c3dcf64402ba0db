"""Two tables: the phases of a run, and the moves between the stages of a fragment's round."""

from __future__ import annotations

from enum import Enum

from narrows.proto.messages import Phase


class RunPhase(Enum):
    """Where the run stands. It takes these phases in order, and never goes back."""

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
        """The phase that learners are told: CLOSING is the broker's own."""
        return Phase.ENDING if self is RunPhase.CLOSING else Phase(self.value)


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
    """The six moves of a round, each from one stage to another. Every other move is a bug."""

    LAUNCH = (Stage.IDLE, Stage.COLLECTING)
    """Learners are asked."""
    DUE = (Stage.COLLECTING, Stage.MERGING)
    """Enough pushes are here."""
    ABANDON = (Stage.COLLECTING, Stage.IDLE)
    """Nobody is left who could push."""
    MERGED = (Stage.MERGING, Stage.COMMITTING)
    """The sum is made."""
    FAILED = (Stage.MERGING, Stage.IDLE)
    DURABLE = (Stage.COMMITTING, Stage.IDLE)
    """The round's row is committed."""
