"""Options of the demo, and a record of its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from narrows.learner.reference.gpt import preset
from narrows.proto.errors import ConfigError
from narrows.proto.messages import LearnerStatus, Phase, Status

PRESET = "tiny"
STEPS = 1500
"""Inner steps per learner."""

SYNC_PERIOD_STEPS = 16
"""H: docs/lab-notes.md, "Settings of the demo"."""

KILL_AT, RETURN_AT = 0.40, 0.60
"""Shares of the run at which a learner is killed and started again."""

ROOM = 1.5
"""The rest of the run must be longer than so many times the start of a learner. Otherwise nobody is
killed, and a learner that was killed is started again before the rest gets shorter."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line."""

    learners: int = 4
    steps: int = 0
    baselines: bool = False
    keep: Path | None = None
    json: Path | None = None
    picture: Path | None = None
    plain: bool = False
    record: Path | None = None
    keys: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.learners <= 26 or self.steps < 0:
            raise ConfigError(
                "demo", expected="2 to 26 learners, at least 1 step", got=f"{self.learners}"
            )

    @property
    def inner_steps(self) -> int:
        return self.steps or STEPS

    @property
    def names(self) -> list[str]:
        return [f"site-{chr(ord('a') + index)}" for index in range(self.learners)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one learner."""
        config = preset(PRESET)
        return config.batch * config.context

    @property
    def goal_tokens(self) -> int:
        return self.inner_steps * self.tokens_per_step * self.learners


@dataclass
class DemoStory:
    """Record of a run, for the display and the results."""

    victim: str
    started_at: float = 0.0
    begun_at: float | None = None
    """Time at which all learners had started and the run began."""
    killed_at: float | None = None
    returned_at: float | None = None
    first_incarnation: str = ""
    live_at: float | None = None
    """Time at which the broker counted the returned learner as live."""
    contributed_at: float | None = None
    """Time at which the returned learner was merged again."""
    ended_at: float = 0.0
    last: Status | None = None
    losses: dict[str, list[tuple[float, float]]] = field(
        default_factory=dict[str, list[tuple[float, float]]]
    )

    def note(self, status: Status, now: float) -> None:
        """Reads a new status."""
        self.last = status
        if status.phase is not Phase.FOUNDING and self.begun_at is None:
            self.begun_at = now
        for learner in status.learners:
            if learner.loss is not None:
                self.losses.setdefault(learner.name, []).append((now, learner.loss))
            if learner.name == self.victim:
                self._note_victim(learner, now)

    def _note_victim(self, learner: LearnerStatus, now: float) -> None:
        if self.killed_at is None:
            self.first_incarnation = learner.incarnation
        elif learner.incarnation != self.first_incarnation:
            if learner.state == "live":
                self.live_at = self.live_at or now
            if learner.contributions:
                self.contributed_at = self.contributed_at or now

    def is_to_kill(self, share: float, now: float) -> bool:
        """True if the victim dies now: there is time for it to come back."""
        return self.killed_at is None and share >= KILL_AT and self._has_room(share, now)

    def is_to_return(self, share: float, now: float) -> bool:
        """True if the victim is started again now."""
        is_dead = self.killed_at is not None and self.returned_at is None
        return is_dead and (share >= RETURN_AT or not self._has_room(share, now))

    def _has_room(self, share: float, now: float) -> bool:
        """True if the rest of the run is long enough to start a learner in it."""
        if self.begun_at is None or not share:
            return False
        left_s = (now - self.begun_at) * (1 - share) / share
        return left_s >= ROOM * (self.begun_at - self.started_at)

    @property
    def chapter(self) -> str:
        """Present state of the victim in words; "" before it is killed."""
        if self.killed_at is None:
            return ""
        if self.returned_at is None:
            return f"{self.victim} was killed (SIGKILL); the others train on"
        if self.live_at is None:
            return f"{self.victim} is starting under its old name"
        if self.contributed_at is None:
            return f"{self.victim} is back under its old name, warming up"
        return f"{self.victim} contributes again after {self.rejoin_s:.1f} s"

    @property
    def rejoin_s(self) -> float | None:
        """Seconds from the start of the new process to its first merged contribution."""
        if self.returned_at is None or self.contributed_at is None:
            return None
        return self.contributed_at - self.returned_at
