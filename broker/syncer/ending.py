"""The end of a run: the goal, one last round per fragment, and the learners it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import Stage, State
from narrows.proto.messages import Phase
from narrows.proto.timing import LEAVE_MAX_S, LEAVE_S, RETURN_S


@dataclass(eq=False)
class Ending:
    """Ends the run when its goal is reached, and the process when everybody has the final model.

    In phase ENDING learners make no more steps. A fragment gets rounds until no learner that the
    end waits for has anything to push for it; that is one round, or two where a push was waiting
    already.

    The end waits three times: for the last pushes, for the disk, and for the last adoptions.
    """

    state: State
    began_at: float
    """When the present one of the three waits began."""
    finished: bool = False

    # Learners that the end waits for.

    def awaited(self, now: float) -> list[Member]:
        """Learners that have moved lately, also those that are cut off for a moment."""
        if now >= self.began_at + LEAVE_MAX_S:
            return []
        expected = [m for m in self.state.members if not (m.has_left or m.is_revoked)]
        return [m for m in expected if now < m.moved_at + LEAVE_S]

    def expects_strangers(self, now: float) -> bool:
        """After a start of the broker all learners are cut off, and it has met none of them yet.

        It knows who has taught the run, and waits for them as long as for anybody. Others have at
        least the time that a dial takes.
        """
        since_s = now - self.state.started_at
        if not self.state.taught or since_s >= LEAVE_S:
            return False
        return since_s < RETURN_S or not self.state.taught <= self.state.members.by_name.keys()

    def owes(self, member: Member, fragment: int) -> bool:
        """A push of it is on its way, or it has neither pushed nor said that nothing is left."""
        waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
        if waiting is not None and waiting.announcement is not None:
            return waiting.is_coming
        return member.has_model and fragment not in member.told.finished

    def owing(self, fragment: int, now: float) -> list[Member]:
        """Learners that the last round of a fragment waits for."""
        return [member for member in self.awaited(now) if self.owes(member, fragment)]

    def fragments_open(self, now: float) -> list[int]:
        """Idle fragments that need a last round."""
        return [
            fragment
            for fragment, slot in enumerate(self.state.rounds)
            if slot.stage is Stage.IDLE and (slot.here() or self.owing(fragment, now))
        ]

    # Phases.

    def reach_goal(self, now: float) -> None:
        """Begins the end once the goal is reached."""
        state = self.state
        goal = state.settings.goal_tokens
        if state.phase is Phase.RUNNING and goal and state.clock.run_tokens >= goal:
            state.enter(Phase.ENDING)
            self._wait_anew(state.members, now)
            state.note("goal", f"{goal} tokens are reached: one last round per fragment")

    def advance(self, now: float) -> None:
        """Closes the run after the last rounds, and finishes the process after the last adoption.

        Called after the rounds have been looked at.
        """
        if self.expects_strangers(now):
            return
        if self.state.phase is Phase.ENDING:
            self._close(now)
        # A learner says Bye once it has adopted the final model outright. That it holds the heads
        # is not enough: it may not know yet that they are final.
        elif self.state.phase is Phase.ENDED and not self.finished and not self.awaited(now):
            self.finished = True
            self.state.effects.append(ev.Finish(self._given_up()))

    def _close(self, now: float) -> None:
        """Has the end made durable once the last rounds are over."""
        state = self.state
        if state.closing or state.in_flight() or self.fragments_open(now):
            return
        # A learner that the last rounds have waited for in vain gets no second wait.
        patient = [
            member
            for member in state.members
            if not any(self.owes(member, fragment) for fragment in range(len(state.heads)))
        ]
        self._wait_anew(patient, now)
        state.closing = True
        state.effects.append(ev.CommitEnd())

    def ended(self, now: float) -> None:
        """The end is durable: the heads are final."""
        # A full disk may have kept everybody waiting, so all get a full wait from now on, except
        # those that were given up before the wait for the disk began.
        self._wait_anew([m for m in self.state.members if m.moved_at >= self.began_at], now)
        self.state.closing = False
        self.state.enter(Phase.ENDED)
        self.state.note("ended", "the run has ended: learners adopt the final model")

    def _wait_anew(self, members: Iterable[Member], now: float) -> None:
        """Begins the next wait, and gives these learners the whole of it: while they waited for
        others they could not move."""
        self.began_at = now
        for member in members:
            if member.is_heard(now):
                member.moved_at = now

    def _given_up(self) -> tuple[str, ...]:
        """Learners that saw the end and have not got the final model, each with what it lacks."""
        lines = []
        for member in self.state.members:
            if member.has_left or member.heard_at < self.began_at - LEAVE_S:
                continue
            lacks = [
                str(fragment)
                for fragment, base in enumerate(member.bases)
                if base < self.state.heads[fragment]
            ]
            if lacks:
                noun = "fragment" if len(lacks) == 1 else "fragments"
                lines.append(f"{member.name} ({noun} {', '.join(lacks)})")
        return tuple(lines)
