"""The learner's own inner steps, and when to report them to the broker. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrows.proto.flow import ACKNOWLEDGE_BYTES
from narrows.proto.messages import Report, RunSettings, TokenLedger
from narrows.proto.schedule import first_step, is_lockstep, next_snapshot
from narrows.proto.smoothing import Smoothed
from narrows.proto.timing import ACKNOWLEDGE_S, ACKNOWLEDGE_SOON_S, IDLE_REPORT_S, REPORT_S


@dataclass
class Pace:
    """Inner steps of this incarnation, their duration, and when to report. Times in seconds."""

    contribute_after_steps: int = 0
    """No contribution before so many own steps (the ramp of a newcomer)."""
    steps: int = 0
    offset: int = 0
    """Steps that the run had made before ours (lockstep modes)."""
    received: list[int] = field(default_factory=list[int])
    """Newest position seen on each downlink stream."""
    up_bits_per_s: float = 0.0
    """Rate at which the learner may send; 0: no limit."""
    _rate_changed: bool = False
    _step_s: Smoothed = field(default_factory=Smoothed)
    _stepped_at: float | None = None
    _loss: float | None = None
    _reported_at: float = 0.0
    _reported_steps: int = 0
    _acknowledged: int = 0

    def __post_init__(self) -> None:
        assert self.contribute_after_steps >= 0, self.contribute_after_steps

    @property
    def run_step(self) -> int:
        """Inner step of the run in the lockstep modes."""
        return self.offset + self.steps

    def realign(self, settings: RunSettings, adopted: Sequence[int], *, rolled_back: bool) -> None:
        """Lockstep modes: stands at the step of the versions adopted.

        A learner that joined or was cut off is behind the others. One that was rolled back is ahead
        of them. Either would make everybody wait for steps that nobody needs.
        """
        if not is_lockstep(settings):
            return
        assert adopted and min(adopted) >= 0, adopted
        start = first_step(settings, adopted)
        if self.run_step < start or rolled_back:
            self.offset = start - self.steps
        assert self.run_step >= start, (self.run_step, start)

    def is_ahead(self, settings: RunSettings, adopted: Sequence[int]) -> bool:
        """Lockstep modes: the next step would be one of the round after the versions adopted."""
        assert is_lockstep(settings) and min(adopted) >= 0, (settings.mode, adopted)
        return self.run_step >= next_snapshot(settings, adopted) + settings.overlap_steps

    def warming(self, settings: RunSettings | None) -> str:
        """Reason for a newcomer not to contribute yet, "" if it may.

        In the lockstep modes everybody must contribute, or nobody would go on.
        """
        lockstep = settings is not None and is_lockstep(settings)
        if lockstep or self.steps >= self.contribute_after_steps:
            return ""
        return f"warming up, {self.steps} of {self.contribute_after_steps} steps"

    def expect(self, streams: int) -> None:
        """A new session begins: nothing has come on its streams."""
        self.received, self._acknowledged = [0] * streams, 0

    def note_position(self, stream: int, position: int) -> None:
        """A data message came; a stream that this session did not open is left out."""
        if stream < len(self.received):
            self.received[stream] = position

    def step(self, loss: float | None, now: float) -> None:
        """Counts an inner step that ended at `now`."""
        self.steps += 1
        self._loss = loss
        # The first step, and the first after a pause, began at a time that nobody knows.
        if self._stepped_at is not None:
            self._step_s.add(now - self._stepped_at)
        self._stepped_at = now

    def pause(self) -> None:
        """The time until the next step is no step time."""
        self._stepped_at = None

    def report_at(self) -> float:
        """Time of the next Report: the sooner, the more has happened since the last one."""
        assert 0 <= self._reported_steps <= self.steps, (self._reported_steps, self.steps)
        fresh_bytes = sum(self.received) - self._acknowledged
        if self._rate_changed:
            return self._reported_at
        if fresh_bytes >= ACKNOWLEDGE_BYTES:
            return self._reported_at + ACKNOWLEDGE_SOON_S
        if fresh_bytes > 0:
            return self._reported_at + ACKNOWLEDGE_S
        has_news = self.steps > self._reported_steps
        return self._reported_at + (REPORT_S if has_news else IDLE_REPORT_S)

    def keep_rate(self, bits_per_s: float) -> bool:
        """Notes the uplink's rate; True if it is another one, which others wait to hear of."""
        changed = bits_per_s != self.up_bits_per_s
        # Others get the share that this learner gives up only once the broker has heard of it.
        self._rate_changed |= changed
        self.up_bits_per_s = bits_per_s
        return changed

    def report(self, tokens: int, ledger: TokenLedger, now: float) -> Report:
        """The Report of this moment; the next one is then scheduled."""
        assert 0 <= tokens <= ledger.logged, (tokens, ledger)
        # A Report also acknowledges data, which gives the broker credit for more.
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
