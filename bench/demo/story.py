"""What the demo is asked to do and what happened on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from narrows.learner.reference.gpt import preset
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Status

PRESET = "tiny"
STEPS = 1500
"""Inner steps per learner."""

SYNC_PERIOD_STEPS = 16
"""H: docs/lab-notes.md, "Settings of the demo"."""

KILL_AT, RETURN_AT = 0.40, 0.60
"""Shares of the run at which a learner is killed and started again."""


@dataclass(frozen=True)
class DemoOptions:
    """What the command line said."""

    learners: int = 4
    steps: int = 0
    baselines: bool = False
    keep: Path | None = None
    json: Path | None = None
    picture: Path | None = None
    plain: bool = False
    record: Path | None = None

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
    """What happened, for the display and the results."""

    victim: str
    started_at: float = 0.0
    killed_at: float | None = None
    returned_at: float | None = None
    first_incarnation: str = ""
    contributed_at: float | None = None
    """When the returned learner was merged again."""
    ended_at: float = 0.0
    last: Status | None = None
    losses: dict[str, list[tuple[float, float]]] = field(
        default_factory=dict[str, list[tuple[float, float]]]
    )

    @property
    def rejoin_s(self) -> float | None:
        """From the start of the new process to its first merged contribution."""
        if self.returned_at is None or self.contributed_at is None:
            return None
        return self.contributed_at - self.returned_at
