"""The run's phases and the process's end, and what must be durable for each. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker import events as ev
from narrows.broker.scheduler import Scheduler
from narrows.broker.state import RunState
from narrows.proto import messages as msg


@dataclass
class Lifecycle:
    """FOUNDING -> RUNNING (version 0 durable) -> ENDING (goal) -> ENDED (last rounds over)."""

    state: RunState
    scheduler: Scheduler
    checkpoint_running: bool = False
    checkpoint_sum: int = -1
    """Sum of the versions in the newest durable checkpoint."""
    stopping: str = ""
    """Why the process stops, "" while it does not."""
    finished: bool = False

    def founded(self, digests: tuple[int, ...]) -> list[ev.Effect]:
        """Version 0 stands in memory; nothing is opened before it is on disk."""
        self.state.heads = [msg.FragmentHead(0, digest) for digest in digests]
        self.state.first_kept = [1] * len(digests)
        self.checkpoint_running = True
        return [ev.WriteCheckpoint()]

    def checkpoint_failed(self, reason: str) -> list[ev.Effect]:
        self.checkpoint_running = False
        effects: list[ev.Effect] = [ev.Note("error", f"checkpoint failed: {reason}")]
        if self.stopping:
            self.finished = True
            effects.append(ev.Finish(f"{self.stopping}; the newest versions are NOT on disk"))
        return effects

    def reach_goal(self) -> list[ev.Effect]:
        state = self.state
        goal = state.settings.goal_tokens
        if state.phase is not msg.Phase.RUNNING or not goal or state.clock.run_tokens < goal:
            return []
        state.phase = msg.Phase.ENDING
        self.scheduler.final_due = list(range(len(state.heads)))
        return [ev.Note("info", f"goal of {goal} tokens reached: one last round per fragment")]

    def end(self) -> list[ev.Effect]:
        """ENDING becomes ENDED when every last round is over; then everyone says Bye."""
        state = self.state
        if state.phase is msg.Phase.ENDING and not self.scheduler.final_due and not state.rounds:
            state.phase = msg.Phase.ENDED
            self.checkpoint_sum = -1  # The phase is part of what must be durable.
            return [ev.Note("info", "the run has ended"), *self.checkpoint_if_due()]
        durable = self.checkpoint_sum == state.version_sum and not self.checkpoint_running
        over = state.phase is msg.Phase.ENDED and durable
        if over and not self.finished and not state.roster.connected():
            self.finished = True
            return [ev.Finish("the run has ended, all learners have the final model")]
        return []

    def stop(self, reason: str) -> list[ev.Effect]:
        if self.stopping:
            return []
        self.stopping = reason
        self.scheduler.halted = True
        effects: list[ev.Effect] = []
        for member in self.state.roster.connected():
            assert member.peer is not None
            effects.append(ev.Send(member.peer, msg.Bye(reason)))
        if not self.state.heads or self.checkpoint_sum == self.state.version_sum:
            self.finished = True
            return [*effects, ev.Finish(reason)]
        return [*effects, *self.checkpoint_if_due()]

    def checkpoint_if_due(self) -> list[ev.Effect]:
        """A checkpoint every N versions, and at once when the run or the process ends."""
        grown = self.state.version_sum - self.checkpoint_sum
        last = bool(self.stopping) or self.state.phase is msg.Phase.ENDED
        due = (last and grown > 0) or grown >= self.state.config.broker.checkpoint_versions
        merging = any(round_.merging for round_ in self.state.rounds.values())
        if not due or self.checkpoint_running or (self.stopping and merging):
            return []
        self.checkpoint_running = True
        return [ev.WriteCheckpoint()]

    def checkpoint_written(self, version_sum: int, now: float) -> list[ev.Effect]:
        self.checkpoint_running = False
        self.checkpoint_sum = version_sum
        if self.state.phase is msg.Phase.FOUNDING:
            self.state.phase = msg.Phase.RUNNING
            self.scheduler.launched_at = now
            return [ev.Note("info", "version 0 is durable, the run begins")]
        merging = any(round_.merging for round_ in self.state.rounds.values())
        if self.stopping and version_sum == self.state.version_sum and not merging:
            self.finished = True
            return [ev.Finish(self.stopping)]
        return self.checkpoint_if_due()
