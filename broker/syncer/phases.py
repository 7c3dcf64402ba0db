"""The run's phases and the process's end, and what must be durable for each. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import Waiting
from narrows.broker.syncer.run import RunState
from narrows.broker.syncer.scheduler import Scheduler
from narrows.proto import messages as msg
from narrows.proto.limits import TEXT_CHARACTERS_MAX
from narrows.proto.units import counted

STOP_S = 20.0
"""A process that is to stop waits so long for the disk."""

RETRY_S = 10.0
"""A checkpoint that failed is tried again after so long."""


@dataclass
class Lifecycle:
    """FOUNDING -> RUNNING (version 0 durable) -> ENDING (goal) -> ENDED (last rounds over).

    ENDED is told once it is durable: the journal keeps the last versions, but not that no more
    come. A broker that was started again would open the last rounds anew.
    """

    state: RunState
    scheduler: Scheduler
    started_at: float
    checkpoint_sum: int = -1
    """Sum of the versions in the newest durable checkpoint."""
    stopping: str = ""
    """Why the process stops, "" while it does not."""
    finished: bool = False
    journal_fails: bool = False
    """Merged rounds wait for the disk."""
    checkpoint_wanted: bool = False
    """The journal has a gap, or the last one failed."""
    _stop_by: float | None = None
    _durable_phase: msg.Phase | None = None
    _writing_phase: msg.Phase | None = None
    """Phase in the checkpoint that is being written, None if none is."""
    _retry_at: float | None = None
    _seen_at: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.state, self.started_at)
        self.scheduler.absent = self.waiting.absent

    def resumed(self, checkpoint_sum: int | None) -> None:
        """The state is that of a checkpoint, with the rounds of the journal after it."""
        version_sum = self.state.version_sum
        self.checkpoint_sum = version_sum if checkpoint_sum is None else checkpoint_sum
        self._durable_phase = self.state.phase
        self.state.end_told = self.state.phase is msg.Phase.ENDED
        if self.state.phase in (msg.Phase.ENDING, msg.Phase.ENDED):
            self.waiting.begin(self.started_at)
        if self.state.phase is msg.Phase.ENDING:
            self.scheduler.final_due = list(range(len(self.state.heads)))

    def founded(self, digests: tuple[int, ...]) -> None:
        """Version 0 stands in memory; nothing is opened before it is on disk."""
        self.state.heads = [msg.FragmentHead(0, digest) for digest in digests]
        self.state.first_kept = [1] * len(digests)

    # Checkpoints.

    def checkpoint(self, now: float) -> list[ev.Effect]:
        """Writes one every N versions, and at once when a phase or the process ends."""
        state = self.state
        grown = state.version_sum - self.checkpoint_sum
        new_phase = state.phase is msg.Phase.ENDED and self._durable_phase is not state.phase
        due = grown >= state.config.broker.checkpoint_versions or new_phase
        due |= grown > 0 and (bool(self.stopping) or state.phase is msg.Phase.ENDED)
        due |= self.checkpoint_sum < 0 or self.checkpoint_wanted
        waiting = self._retry_at is not None and now < self._retry_at
        if not due or not state.heads or waiting or self._writing_phase is not None:
            return []
        if self.stopping and self._merging() and not self.journal_fails:
            return []
        self._writing_phase, self._retry_at = state.phase, None
        self.checkpoint_wanted = False
        return [ev.WriteCheckpoint()]

    def checkpoint_written(self, version_sum: int) -> list[ev.Effect]:
        founding = self.checkpoint_sum < 0
        self.checkpoint_sum, self._durable_phase = version_sum, self._writing_phase
        self._writing_phase = None
        if founding:
            return [ev.Note("info", "version 0 is durable")]
        if self.stopping or self._durable_phase is msg.Phase.ENDED:
            text = f"checkpoint written, versions {list(self.state.versions)}"
            return [ev.Note("info", text)]
        return []

    def checkpoint_failed(self, reason: str, now: float) -> list[ev.Effect]:
        self._writing_phase, self._retry_at = None, now + RETRY_S
        self.checkpoint_wanted = True
        effects: list[ev.Effect] = [ev.Note("error", f"checkpoint failed: {reason}")]
        if self.stopping:
            where = "in the journal" if self._is_journalled else "NOT on disk"
            effects += self._finish(f"{self.stopping}; the newest versions are {where}")
        return effects

    # The journal.

    def journal_failed(self, reason: str) -> list[ev.Effect]:
        self.journal_fails = True
        serve = self.state.config.broker.journal_errors == "serve"
        meanwhile = "versions are published all the same" if serve else "nothing is published"
        text = f"the journal cannot be written: {reason}. Until it can, {meanwhile}"
        return [ev.Note("error", text)]

    def journal_gap(self, reason: str) -> list[ev.Effect]:
        """A round exists that the journal did not take: only a checkpoint makes it durable."""
        self.checkpoint_wanted = True
        return self.journal_failed(reason) if not self.journal_fails else []

    @property
    def _is_journalled(self) -> bool:
        return self.state.config.broker.journal != "off" and not self.journal_fails

    def journal_works(self) -> list[ev.Effect]:
        self.journal_fails = False
        return [ev.Note("info", "the journal is written again")]

    def next_deadline(self) -> float | None:
        times = [self._retry_at, self._stop_by, self.waiting.next_deadline()]
        return min((time for time in times if time and time > self._seen_at), default=None)

    # Phases.

    def begin(self, now: float) -> list[ev.Effect]:
        """The run begins once version 0 is durable and enough learners wait for it."""
        state = self.state
        wanted = state.config.run.learners_at_start
        joined = len(state.roster.connected())
        if state.phase is not msg.Phase.FOUNDING or self.checkpoint_sum < 0 or joined < wanted:
            return []
        state.phase = msg.Phase.RUNNING
        self.scheduler.launched_at = now
        return [ev.Note("info", f"the run begins with {counted(joined, 'learner')}")]

    def reach_goal(self, now: float) -> list[ev.Effect]:
        """From the goal on the last rounds are opened, and learners may be given up."""
        state = self.state
        goal = state.settings.goal_tokens
        if state.phase is not msg.Phase.RUNNING or not goal or state.clock.run_tokens < goal:
            return self.waiting.look(now)
        self._enter(msg.Phase.ENDING, now)
        self.scheduler.final_due = list(range(len(state.heads)))
        return [ev.Note("info", f"goal of {goal} tokens reached: one last round per fragment")]

    def end(self, now: float) -> list[ev.Effect]:
        """ENDING becomes ENDED when every last round is over; once told, everyone says Bye."""
        state = self.state
        self._seen_at = now
        if state.phase is msg.Phase.ENDING:
            if not self.waiting.anybody():
                self.scheduler.final_due.clear()  # Nobody is left who could contribute.
            if not self.scheduler.final_due and not state.rounds:
                self._enter(msg.Phase.ENDED, now)
        durable = self.checkpoint_sum == state.version_sum and self._durable_phase is state.phase
        if state.phase is not msg.Phase.ENDED:
            return []
        effects = [] if state.end_told else self._tell_end(durable, now)
        if not durable or self.waiting.anybody():
            return effects
        outcome = self.waiting.outcome()
        return [*effects, *self._say_bye(outcome), *self._finish(outcome)]

    def _tell_end(self, durable: bool, now: float) -> list[ev.Effect]:
        serve = self.state.config.broker.journal_errors == "serve" and self._retry_at is not None
        if not durable and not serve:
            return []
        self.state.end_told = True
        self.waiting.begin(now)
        return [ev.Note("info", "the run has ended"), *self.waiting.look(now)]

    def _enter(self, phase: msg.Phase, now: float) -> None:
        self.state.phase = phase
        self.waiting.begin(now)

    # The end of the process.

    def stop(self, reason: str) -> list[ev.Effect]:
        """Takes no more work in; ends when what exists is durable."""
        if self.stopping:
            return []
        self.stopping = reason
        self.scheduler.halted = True
        return self._say_bye(reason)

    def _say_bye(self, reason: str) -> list[ev.Effect]:
        return [
            ev.Send(member.peer, msg.Bye(reason[:TEXT_CHARACTERS_MAX]))
            for member in self.state.roster.connected()
            if member.peer is not None
        ]

    def stop_if_durable(self) -> list[ev.Effect]:
        if not self.stopping:
            return []
        durable = not self.state.heads or self.checkpoint_sum == self.state.version_sum
        merging = self._merging() and not self.journal_fails
        if durable and not merging and self._writing_phase is None:
            return self._finish(self.stopping)
        self._stop_by = self._stop_by or self._seen_at + STOP_S
        if self._seen_at < self._stop_by:
            return []
        return self._finish(f"{self.stopping}; the disk took longer than {STOP_S:g} s")

    def _merging(self) -> bool:
        return any(round_.merging for round_ in self.state.rounds.values())

    def _finish(self, reason: str) -> list[ev.Effect]:
        self.finished = True
        return [ev.Finish(reason)]
