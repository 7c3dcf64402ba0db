"""The phases of a run and the only table that leads from one to the next. [pure]"""

from __future__ import annotations

from enum import Enum
from typing import Final

from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.messages import Phase


class RunPhase(Enum):
    """Phase of a run. The wire and the disk know four; CLOSING is the broker's own."""

    FOUNDING = "founding"
    """Version 0 is being made, or waits for learners."""
    RUNNING = "running"
    ENDING = "ending"
    """The goal is reached; the last round of each fragment is collected."""
    CLOSING = "closing"
    """The last rounds are over, but that is not on disk yet. A broker that is started again now
    would open them anew, so learners must not leave."""
    ENDED = "ended"
    """The end is durable: a learner that leaves has the model that a restart has as well."""

    @property
    def visible(self) -> Phase:
        """Phase that learners and operators see."""
        return _VISIBLE[self]

    @property
    def stored(self) -> Phase:
        """Phase that a checkpoint and a round's record keep."""
        return _STORED[self]

    @property
    def is_over(self) -> bool:
        """No round is opened any more."""
        return self in (RunPhase.CLOSING, RunPhase.ENDED)


class Turn(Enum):
    """An event that ends a phase."""

    BEGIN = "version 0 is durable and enough learners are here"
    REACH_GOAL = "the goal is reached"
    CLOSE_LAST_ROUND = "the last round of every fragment is over"
    CONFIRM_END = "the end is durable"


TRANSITIONS: Final[dict[tuple[RunPhase, Turn], RunPhase]] = {
    (RunPhase.FOUNDING, Turn.BEGIN): RunPhase.RUNNING,
    (RunPhase.RUNNING, Turn.REACH_GOAL): RunPhase.ENDING,
    (RunPhase.ENDING, Turn.CLOSE_LAST_ROUND): RunPhase.CLOSING,
    (RunPhase.CLOSING, Turn.CONFIRM_END): RunPhase.ENDED,
}
"""Every other pair is an internal error. A run never goes back; a restart begins in the phase that
is on disk."""

_VISIBLE: Final = {
    RunPhase.FOUNDING: Phase.FOUNDING,
    RunPhase.RUNNING: Phase.RUNNING,
    RunPhase.ENDING: Phase.ENDING,
    RunPhase.CLOSING: Phase.ENDING,
    RunPhase.ENDED: Phase.ENDED,
}
_STORED: Final = _VISIBLE | {RunPhase.CLOSING: Phase.ENDED}


def next_phase(phase: RunPhase, turn: Turn) -> RunPhase:
    """Phase after an event. Raises LocalProtocolError MISUSE for a pair that the table lacks."""
    # A typed error, not a KeyError: the report of the bug should name phase and event.
    after = TRANSITIONS.get((phase, turn))
    if after is None:
        possible = [each.name for before, each in TRANSITIONS if before is phase]
        raise LocalProtocolError(
            ErrorCode.MISUSE,
            f"phase {phase.name} of the run",
            expected=" or ".join(possible) or "no event: the run is over",
            got=f"{turn.name} ({turn.value})",
            remedy="this is a bug of the broker: please report it",
        )
    return after


def resumed_phase(stored: Phase) -> RunPhase:
    """Phase in which a run goes on that has this phase on disk."""
    # A stored ENDED is durable by being stored, so CLOSING is over.
    return next(p for p in RunPhase if p is not RunPhase.CLOSING and p.stored is stored)
