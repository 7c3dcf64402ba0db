"""The learner's own pace, what it reports of it, and the run's clock as it sees it. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrows.proto.flow import ACKNOWLEDGE_BYTES
from narrows.proto.messages import Report, RunSettings, TokenLedger
from narrows.proto.schedule import first_step, is_lockstep
from narrows.proto.smoothing import Smoothed
from narrows.proto.timing import (
    ACKNOWLEDGE_S,
    ACKNOWLEDGE_SOON_S,
    EXTRAPOLATION_MAX_S,
    IDLE_REPORT_S,
    REPORT_S,
)


@dataclass
class Pace:
    """Inner steps of this incarnation, their duration, and when to report. Times in seconds."""

    steps: int = 0
    offset: int = 0
    """Steps that the run had made before ours (lockstep modes)."""
    received: list[int] = field(default_factory=list[int])
    """Downlink stream positions seen."""
    up_bits_per_s: float = 0.0
    """What it may send; 0: no limit."""
    _rate_changed: bool = False
    _step_s: Smoothed = field(default_factory=Smoothed)
    _stepped_at: float | None = None
    _loss: float | None = None
    _reported_at: float = 0.0
    _reported_steps: int = 0
    _acknowledged: int = 0

    @property
    def run_step(self) -> int:
        """Inner step of the run in the lockstep modes."""
        return self.offset + self.steps

    def realign(self, settings: RunSettings, adopted: Sequence[int], *, rolled_back: bool) -> None:
        """Lockstep modes: stands at the step of the versions adopted.

        Who joined or was cut off is behind the others, who was rolled back is ahead of them; both
        would make everybody wait for steps that nobody needs.
        """
        start = first_step(settings, adopted) if is_lockstep(settings) else 0
        if self.run_step < start or (rolled_back and is_lockstep(settings)):
            self.offset = start - self.steps

    def expect(self, streams: int) -> None:
        """A new session: nothing has come on its streams."""
        self.received, self._acknowledged = [0] * streams, 0

    def step(self, loss: float | None, now: float) -> None:
        self.steps += 1
        self._loss = loss
        if self._stepped_at is not None:
            self._step_s.add(now - self._stepped_at)
        self._stepped_at = now

    def pause(self) -> None:
        """The time until the next step is no step time."""
        self._stepped_at = None

    def report_at(self) -> float:
        """When the next Report is due: the sooner, the more has happened since the last one."""
        fresh_bytes = sum(self.received) - self._acknowledged
        if self._rate_changed:
            return self._reported_at
        if fresh_bytes >= ACKNOWLEDGE_BYTES:
            return self._reported_at + ACKNOWLEDGE_SOON_S
        if fresh_bytes > 0:
            return self._reported_at + ACKNOWLEDGE_S
        news = self.steps > self._reported_steps
        return self._reported_at + (REPORT_S if news else IDLE_REPORT_S)

    def keep_rate(self, bits_per_s: float) -> bool:
        """Notes the uplink's rate; True if it is another one: others wait to hear so."""
        changed = bits_per_s != self.up_bits_per_s
        self._rate_changed |= changed
        self.up_bits_per_s = bits_per_s
        return changed

    def report(self, tokens: int, ledger: TokenLedger, now: float) -> Report:
        self._reported_at, self._reported_steps = now, self.steps
        self._acknowledged, self._rate_changed = sum(self.received), False
        return Report(
            step=self.steps,
            tokens=tokens,
            step_s=self._step_s.mean,
            loss=self._loss,
            received=tuple(self.received),
            up_bits_per_s=self.up_bits_per_s,
            ledger=ledger,
        )


@dataclass
class RunTime:
    """Tokens of the run in one epoch: told by the broker, extrapolated in between, never falling.

    A broker that was restarted from older state sets it back.
    """

    _told: int = 0
    _per_s: float = 0.0
    _told_at: float = 0.0
    _floor: float = 0.0

    def tell(self, tokens: int, tokens_per_s: float, now: float) -> None:
        self._floor = self.tokens(now)
        self._told, self._per_s, self._told_at = tokens, tokens_per_s, now

    def tokens(self, now: float) -> float:
        ahead_s = min(max(now - self._told_at, 0.0), EXTRAPOLATION_MAX_S)
        return max(self._floor, self._told + self._per_s * ahead_s)
