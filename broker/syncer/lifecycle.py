"""The course of a run and the end of the process, with what must be durable for each. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import Waiting
from narrows.broker.syncer.phases import RunPhase, Turn
from narrows.broker.syncer.run import RunState
from narrows.broker.syncer.scheduler import Scheduler
from narrows.proto import messages as msg
from narrows.proto.limits import TEXT_CHARACTERS_MAX
from narrows.proto.units import counted

STOP_S = 20.0
"""A process that is to stop waits at most this long for the disk."""

RETRY_S = 10.0
"""A checkpoint that failed is tried again after this time."""


@dataclass
class Lifecycle:
    """Turns the phases of `phases.TRANSITIONS` when their conditions hold, and writes checkpoints.

    CLOSING lasts until a checkpoint holds the end: the journal keeps the last versions, but not
    that no more come. A broker that was started again would open the last rounds anew.
    """

    state: RunState
    scheduler: Scheduler
    waiting: Waiting
    started_at: float
    checkpoint_sum: int = -1
    """Sum of the versions in the newest durable checkpoint."""
    stopping: str = ""
    """Reason for which the process stops; empty while it serves."""
    finished: bool = False
    journal_fails: bool = False
    """The journal cannot be written, and merged rounds wait for it."""
    checkpoint_wanted: bool = False
    """The journal has a gap, or the last checkpoint failed."""
    _stop_by: float | None = None
    _durable_phase: msg.Phase | None = None
    _writing_phase: msg.Phase | None = None
    """Phase in the checkpoint that is being written, None if none is."""
    _retry_at: float | None = None
    _seen_at: float = 0.0

    def resumed(self, checkpoint_sum: int | None) -> None:
        """Goes on from a checkpoint and the rounds that the journal has after it.

        `checkpoint_sum` is the sum of the versions in the checkpoint; None: that of the heads.
        """
        version_sum = self.state.version_sum
        self.checkpoint_sum = version_sum if checkpoint_sum is None else checkpoint_sum
        assert 0 <= self.checkpoint_sum <= version_sum, "no checkpoint is newer than the state"
        self._durable_phase = self.state.phase.stored
        if self.state.phase in (RunPhase.ENDING, RunPhase.ENDED):
            self.waiting.begin(self.started_at)
        if self.state.phase is RunPhase.ENDING:
            self.scheduler.final_due = list(range(len(self.state.heads)))

    def founded(self, digests: tuple[int, ...]) -> None:
        """Version 0 stands in memory; nothing is opened before it is on disk."""
        assert self.state.phase is RunPhase.FOUNDING and not self.state.heads
        assert len(digests) == len(self.state.table)
        self.state.heads = [msg.FragmentHead(0, digest) for digest in digests]
        self.state.first_kept = [1] * len(digests)

    # Checkpoints.

    def checkpoint(self, now: float) -> list[ev.Effect]:
        """Writes a checkpoint every N versions, and at once when the run or the process ends."""
        state = self.state
        stored = state.phase.stored
        grown = state.version_sum - self.checkpoint_sum
        new_phase = state.phase.is_over and self._durable_phase is not stored
        due = grown >= state.config.broker.checkpoint_versions or new_phase
        due |= grown > 0 and (bool(self.stopping) or state.phase.is_over)
        # Version 0 is written at once: no journal can make it again.
        due |= self.checkpoint_sum < 0 or self.checkpoint_wanted
        waiting = self._retry_at is not None and now < self._retry_at
        if not due or not state.heads or waiting or self._writing_phase is not None:
            return []
        # A stopping process waits for its last merge, so that one checkpoint holds it too. With a
        # journal that fails that merge would never come.
        if self.stopping and self._merging() and not self.journal_fails:
            return []
        self._writing_phase, self._retry_at = stored, None
        self.checkpoint_wanted = False
        return [ev.WriteCheckpoint()]

    def checkpoint_written(self, version_sum: int) -> list[ev.Effect]:
        """A checkpoint is durable that holds this sum of versions."""
        assert self._writing_phase is not None, "one checkpoint is written at a time"
        assert self.checkpoint_sum <= version_sum <= self.state.version_sum
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
        """Tries again later, or gives up if the process is to stop."""
        assert self._writing_phase is not None
        self._writing_phase, self._retry_at = None, now + RETRY_S
        self.checkpoint_wanted = True
        effects: list[ev.Effect] = [ev.Note("error", f"checkpoint failed: {reason}")]
        if self.stopping:
            where = "in the journal" if self._is_journalled else "NOT on disk"
            effects += self._finish(f"{self.stopping}; the newest versions are {where}")
        return effects

    # The journal.

    def journal_failed(self, reason: str) -> list[ev.Effect]:
        """Warns that merged rounds are not durable."""
        self.journal_fails = True
        serve = self.state.config.broker.journal_errors == "serve"
        meanwhile = "versions are published all the same" if serve else "nothing is published"
        text = f"the journal cannot be written: {reason}. Until it can, {meanwhile}"
        return [ev.Note("error", text)]

    def journal_gap(self, reason: str) -> list[ev.Effect]:
        """Wants a checkpoint: nothing else makes a round durable that the journal did not take."""
        self.checkpoint_wanted = True
        return self.journal_failed(reason) if not self.journal_fails else []

    @property
    def _is_journalled(self) -> bool:
        return self.state.config.broker.journal != "off" and not self.journal_fails

    def journal_works(self) -> list[ev.Effect]:
        """The journal takes records again."""
        self.journal_fails = False
        return [ev.Note("info", "the journal is written again")]

    def next_deadline(self) -> float | None:
        times = [self._retry_at, self._stop_by, self.waiting.next_deadline()]
        return min((time for time in times if time and time > self._seen_at), default=None)

    # Phases.

    def begin(self, now: float) -> list[ev.Effect]:
        """Begins the run once version 0 is durable and enough learners wait for it."""
        state = self.state
        wanted = state.config.run.learners_at_start
        joined = len(state.roster.connected())
        if state.phase is not RunPhase.FOUNDING or self.checkpoint_sum < 0 or joined < wanted:
            return []
        state.turn(Turn.BEGIN)
        state.clock.begin(len(state.heads), now)
        # The first round comes one spacing later: before that no learner has trained.
        self.scheduler.launched_at = now
        return [ev.Note("info", f"the run begins with {counted(joined, 'learner')}")]

    def reach_goal(self, now: float) -> list[ev.Effect]:
        """Begins the end at the goal: last rounds are opened, and learners may be given up."""
        state = self.state
        goal = state.settings.goal_tokens
        if state.phase is not RunPhase.RUNNING or not goal or state.clock.run_tokens < goal:
            return self.waiting.look(now)
        self._turn(Turn.REACH_GOAL, now)
        # One more round per fragment, so that work done since the last one is not lost.
        self.scheduler.final_due = list(range(len(state.heads)))
        return [ev.Note("info", f"goal of {goal} tokens reached: one last round per fragment")]

    def end(self, now: float) -> list[ev.Effect]:
        """Ends the run after every last round; when nobody is awaited, everyone gets a Bye."""
        state = self.state
        self._seen_at = now
        if state.phase is RunPhase.ENDING:
            if not self.waiting.anybody():
                self.scheduler.final_due.clear()  # Nobody is left who could contribute.
            if not self.scheduler.final_due and not state.rounds:
                self._turn(Turn.CLOSE_LAST_ROUND, now)
        if not state.phase.is_over:
            return []
        assert not state.rounds
        all_written = self.checkpoint_sum == state.version_sum
        durable = all_written and self._durable_phase is state.phase.stored
        effects = self._confirm_end(durable, now) if state.phase is RunPhase.CLOSING else []
        # The process outlives the end until all learners have left with the final model.
        if not durable or self.waiting.anybody():
            return effects
        outcome = self.waiting.outcome()
        return [*effects, *self._say_bye(outcome), *self._finish(outcome)]

    def _confirm_end(self, durable: bool, now: float) -> list[ev.Effect]:
        """Lets learners see the end once it is on disk, or where the operator said not to wait."""
        serve = self.state.config.broker.journal_errors == "serve" and self._retry_at is not None
        if not durable and not serve:
            return []
        self._turn(Turn.CONFIRM_END, now)
        return [ev.Note("info", "the run has ended"), *self.waiting.look(now)]

    def _turn(self, turn: Turn, now: float) -> None:
        self.state.turn(turn)
        self.waiting.begin(now)

    # The end of the process.

    def give_way(self, hello: msg.Hello) -> list[ev.Effect]:
        """Ends a broker that another one has replaced: two that serve would make two models.

        Who claims a replacement without its proof changes nothing.
        """
        state = self.state
        if hello.epoch[0] <= state.epoch[0] or not state.is_proven(hello):
            return []
        reason = (
            f"a broker of term {hello.epoch[0]} serves this run now, {hello.name} has met it;"
            f" this one is of term {state.epoch[0]}"
        )
        return [ev.Note("error", reason), *self.stop(reason)]

    def stop(self, reason: str) -> list[ev.Effect]:
        """Takes no more work in; the process ends when what exists is durable."""
        assert reason
        if self.stopping:
            return []
        self.stopping = reason
        self.scheduler.halted = True
        return self._say_bye(reason)

    def _say_bye(self, reason: str) -> list[ev.Effect]:
        return [
            ev.Send(member.peer, msg.Bye(reason[:TEXT_CHARACTERS_MAX]))
            for member in self.state.roster.connected()
            if member.presence.peer is not None
        ]

    def stop_if_durable(self) -> list[ev.Effect]:
        """Ends a process that is to stop, once all is durable or the disk took too long."""
        if not self.stopping:
            return []
        durable = not self.state.heads or self.checkpoint_sum == self.state.version_sum
        merging = self._merging() and not self.journal_fails
        if durable and not merging and self._writing_phase is None:
            return self._finish(self.stopping)
        # The wait has an end: a dead disk must not keep the process from ending.
        self._stop_by = self._stop_by or self._seen_at + STOP_S
        if self._seen_at < self._stop_by:
            return []
        return self._finish(f"{self.stopping}; the disk took longer than {STOP_S:g} s")

    def _merging(self) -> bool:
        return any(round_.merging for round_ in self.state.rounds.values())

    def _finish(self, reason: str) -> list[ev.Effect]:
        """Lets the process exit; no deadline is due any more."""
        assert reason
        self.finished = True
        return [ev.Finish(reason)]
