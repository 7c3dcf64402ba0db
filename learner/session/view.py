"""Shows a session to other threads: one immutable view, replaced as a whole after events. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrows.learner.session.dialer import Connection
from narrows.learner.session.leaving import is_ending
from narrows.learner.session.run_time import RunTime
from narrows.proto.errors import Refused
from narrows.proto.fragments import Fragment
from narrows.proto.messages import Phase, RunSettings


@dataclass(frozen=True)
class SessionView:
    """A session after one event. Its readers need no lock, and no two fields disagree.

    Times are seconds on the clock of the session's events.
    """

    connection: Connection
    run_id: str
    settings: RunSettings | None
    """None before the first Welcome."""
    phase: Phase
    table: tuple[Fragment, ...]
    adopted: tuple[int, ...]
    """Version in the parameters by fragment; -1 before the first adoption."""
    ready: bool
    """Every fragment has been adopted at least once."""
    steps: int
    tokens: int
    """Tokens of the steps that happened."""
    run_time: RunTime
    waits_from: float
    """Time from which the training loop may not go on; inf: never."""
    waits_for: str
    """For the user's log: the next thing that the learner waits for."""
    wants_boundary: bool
    """There may be something to do at the next boundary; until then steps only count."""
    next_deadline: float | None
    """Time of the next DeadlineReached if nothing else happens."""
    not_admitted: Refused | None
    """The broker's reason not to admit this learner for now."""
    final: bool
    """The learner has left, and its parameters are the run's final model."""
    lacks: str
    """For the user: what the learner has left without, "" for nothing."""

    def __post_init__(self) -> None:
        assert len(self.adopted) == len(self.table), (self.adopted, len(self.table))
        assert not self.ready or (self.settings is not None and min(self.adopted) >= 0)
        assert self.steps >= 0 and self.tokens >= 0, (self.steps, self.tokens)
        assert not (self.final and self.lacks), self.lacks

    @property
    def online(self) -> bool:
        """The broker has admitted the learner and was heard lately."""
        return self.connection is Connection.JOINED

    @property
    def closed(self) -> bool:
        """The session is over: nothing is sent or expected any more."""
        return self.connection in (Connection.REFUSED, Connection.LEFT)

    @property
    def should_stop(self) -> bool:
        """The goal is reached: no further inner step counts."""
        return is_ending(self.phase)

    @property
    def goal_tokens(self) -> int:
        """Tokens of all learners at which the run ends; 0: it has no goal."""
        return self.settings.goal_tokens if self.settings is not None else 0

    def must_wait(self, now: float) -> bool:
        """True while the training loop may not go on: lockstep modes, or offline for too long."""
        return now > self.waits_from

    def run_tokens(self, now: float) -> float:
        """The run's clock, extrapolated. It falls only when the broker was restarted."""
        return min(self.run_time.tokens(now), self.goal_tokens or math.inf)

    def progress(self, now: float) -> float:
        """Fraction of the goal that is reached, 0 to 1; 0 if the run has no goal."""
        goal = self.goal_tokens
        return min(self.run_tokens(now) / goal, 1.0) if goal else 0.0

    def run_step(self, now: float) -> float:
        """The run's clock in steps. Without a setting these are inner steps of this learner's size,
        and 0 before its first."""
        own = self.tokens / self.steps if self.steps else 0.0
        tokens_per_step = (self.settings.tokens_per_run_step if self.settings else 0) or own
        return self.run_tokens(now) / tokens_per_step if tokens_per_step else 0.0
