"""The end of a run: the goal, one last round per fragment, and who is waited for."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.stages import RunPhase, Stage, Turn
from narrows.broker.syncer.state import State
from narrows.proto.timing import LEAVE_MAX_S, LEAVE_S, REDIAL_S
from narrows.proto.wire import name_of


@dataclass(eq=False)
class Ending:
    """Ends the run when its goal is reached, and the process when everybody has the final model.

    In phase ENDING learners make no more steps. A fragment gets rounds until nobody who is waited
    for has anything to push for it; that is one round, or two where a push was waiting already.
    """

    state: State
    began_at: float = 0.0
    """When the phase of the end began that is on now."""
    finished: bool = False

    # Who is waited for.

    def awaited(self, now: float) -> list[Member]:
        """Learners of which anything moved lately, also those that are cut off for a moment."""
        if now >= self.began_at + LEAVE_MAX_S:
            return []
        return [m for m in self.state.members if not m.has_left and now < m.moved_at + LEAVE_S]

    def expects_strangers(self, now: float) -> bool:
        """After a start of the broker all learners are cut off, and it has met none of them yet.

        It knows who has taught the run, and waits for them as long as for anybody. Others have at
        least the time that a dial takes.
        """
        state, since_s = self.state, now - self.state.started_at
        if not state.resumed or since_s >= LEAVE_S:
            return False
        taught = (name_of(incarnation) for incarnation, _ in state.merged)
        return since_s < REDIAL_S or not all(map(state.members.named, taught))

    def owes(self, member: Member, fragment: int) -> bool:
        """A push of it is on its way, or it has neither pushed nor said that nothing is left."""
        waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
        if waiting is not None and waiting.push is not None:
            return waiting.is_coming
        return min(member.held) >= 0 and fragment not in member.finished

    def holders_up(self, fragment: int, now: float) -> list[Member]:
        """Learners that the last round of a fragment waits for."""
        return [member for member in self.awaited(now) if self.owes(member, fragment)]

    def _lacks(self, member: Member) -> list[int]:
        heads = self.state.heads
        return [f for f, held in enumerate(member.held) if held < heads[f]]

    # Phases.

    def fragments_open(self, now: float) -> list[int]:
        """Idle fragments that need a last round."""
        rounds = self.state.rounds
        return [
            fragment
            for fragment, round_ in enumerate(rounds)
            if round_.stage is Stage.IDLE and (round_.here() or self.holders_up(fragment, now))
        ]

    def reach_goal(self, now: float) -> None:
        """Begins the end once the goal is reached."""
        state, goal = self.state, self.state.settings.goal_tokens
        if state.phase is not RunPhase.RUNNING or not goal or state.clock.run_tokens < goal:
            return
        self._turn(Turn.REACH_GOAL, now)
        state.note("goal", f"{goal} tokens are reached: one last round per fragment")

    def advance(self, now: float) -> None:
        """Closes the run after the last rounds, and finishes the process after the last adoption.

        Called after the rounds have been looked at.
        """
        state = self.state
        if state.phase is RunPhase.ENDING and not state.in_flight():
            if not self.fragments_open(now) and not self.expects_strangers(now):
                self._turn(Turn.CLOSE, now)
                state.effects.append(ev.CommitEnd())
        if state.phase is RunPhase.ENDED and not self.finished:
            # A learner says Bye once it has adopted the final model outright. That it holds the
            # heads is not enough: it may not know yet that they are final.
            if not self.awaited(now) and not self.expects_strangers(now):
                self.finished = True
                state.effects.append(ev.Finish(self._given_up()))

    def ended(self, now: float) -> None:
        """The end is durable: the heads are final."""
        self._turn(Turn.CONFIRM_END, now)
        self.state.note("ended", "the run has ended: learners adopt the final model")

    def _turn(self, turn: Turn, now: float) -> None:
        self.state.turn(turn)
        self.began_at, fragments = now, range(len(self.state.heads))
        for member in self.state.members:
            # A phase begins with a full wait: a learner that is paused makes no steps either. But
            # whom the last rounds have waited for in vain has had its time.
            is_given_up = turn is not Turn.REACH_GOAL and any(
                self.owes(member, fragment) for fragment in fragments
            )
            if member.is_heard(now) and not is_given_up:
                member.moved_at = now

    def _given_up(self) -> tuple[str, ...]:
        """Learners that saw the end and have not got the final model, each with what it lacks."""
        lines = []
        for member in self.state.members:
            lacks = self._lacks(member)
            if lacks and not member.has_left and member.heard_at >= self.began_at - LEAVE_S:
                which = ", ".join(map(str, lacks))
                lines.append(f"{member.name} (fragment{'s' * (len(lacks) > 1)} {which})")
        return tuple(lines)
