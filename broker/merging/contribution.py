"""A complete push of one learner, from its last chunk to the journal. [pure]"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contribution:
    """A complete push that a round counts; its values stay with the shell, under handles."""

    learner: str
    incarnation: str
    push_id: int
    tokens: int
    """Tokens since the base was adopted (c_tokens)."""
    steps: int
    """Inner steps since then (c_steps)."""
    handles: tuple[int, ...]
    """Decoded chunks in offset order, covering the fragment without gap or overlap."""
    counted: int | None = None
    """Tokens of these that the run's clock counts; None: that is not decided yet."""

    def __post_init__(self) -> None:
        assert self.push_id >= 1 and self.tokens >= 1 and self.steps >= 1
        assert self.counted is None or 0 <= self.counted <= self.tokens

    @property
    def weighing(self) -> int:
        """Tokens for its weight: those that count, and at least one."""
        return self.tokens if self.counted is None else max(1, self.counted)
