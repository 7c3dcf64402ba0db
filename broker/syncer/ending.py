"""The end of a run: the goal, one last round per fragment, and whom the broker waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import Stage, State
from narrows.proto.messages import Phase
from narrows.proto.timing import LEAVE_MAX_S, LEAVE_S, RETURN_S
from narrows.proto.wire import name_of


@dataclass(eq=False)
class Ending:
    """Ends the run when its goal is reached, and the process when everybody has the final model.

    In phase ENDING learners make no more steps. A fragment gets rounds until nobody who is waited
    for has anything to push for it; that is one round, or two where a push was waiting already.
    """

    state: State
    began_at: float
    """When the wait began that is on now: for the last pushes, the disk, the last adoptions."""
    finished: bool = False

    # Who is waited for.

    def awaited(self, now: float) -> list[Member]:
        """Learners of which anything moved lately, also those that are cut off for a moment."""
        if now >= self.began_at + LEAVE_MAX_S:
            return []
        expected = [m for m in self.state.members if not (m.has_left or m.is_revoked)]
        return [m for m in expected if now < m.moved_at + LEAVE_S]

    def expects_strangers(self, now: float) -> bool:
        """After a start of the broker all learners are cut off, and it has met none of them yet.

        It knows who has taught the run, and waits for them as long as for anybody. Others have at
        least the time that a dial takes.
        """
        state, since_s = self.state, now - self.state.started_at
        if state.resumed is None or since_s >= LEAVE_S:
            return False
        taught = (name_of(incarnation) for incarnation, _ in state.resumed.merged)
        return since_s < RETURN_S or not all(name in state.members.by_name for name in taught)

    def owes(self, member: Member, fragment: int) -> bool:
        """A push of it is on its way, or it has neither pushed nor said that nothing is left."""
        waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
        if waiting is not None and waiting.push is not None:
            return waiting.is_coming
        return min(member.bases) >= 0 and fragment not in member.told.finished

    def owing(self, fragment: int, now: float) -> list[Member]:
        """Learners that the last round of a fragment waits for."""
        return [member for member in self.awaited(now) if self.owes(member, fragment)]

    def fragments_open(self, now: float) -> list[int]:
        """Idle fragments that need a last round."""
        return [
            fragment
            for fragment, round_ in enumerate(self.state.rounds)
            if round_.stage is Stage.IDLE and (round_.here() or self.owing(fragment, now))
        ]

    # Phases.

    def reach_goal(self, now: float) -> None:
        """Begins the end once the goal is reached."""
        state, goal = self.state, self.state.settings.goal_tokens
        if state.phase is Phase.RUNNING and goal and state.clock.run_tokens >= goal:
            state.turn(Phase.ENDING)
            self._wait_anew(state.members, now)
            state.note("goal", f"{goal} tokens are reached: one last round per fragment")

    def advance(self, now: float) -> None:
        """Closes the run after the last rounds, and finishes the process after the last adoption.

        Called after the rounds have been looked at.
        """
        state = self.state
        if state.phase is Phase.RUNNING or self.expects_strangers(now):
            return
        if state.phase is Phase.ENDING and not (state.closing or state.in_flight()):
            if not self.fragments_open(now):
                # Whom the last rounds have waited for in vain has had its time.
                fragments = range(len(state.heads))
                owing = [m for m in state.members if any(self.owes(m, f) for f in fragments)]
                self._wait_anew([m for m in state.members if m not in owing], now)
                state.closing = True
                state.effects.append(ev.CommitEnd())
        # A learner says Bye once it has adopted the final model outright. That it holds the heads
        # is not enough: it may not know yet that they are final.
        if state.phase is Phase.ENDED and not self.finished and not self.awaited(now):
            self.finished = True
            state.effects.append(ev.Finish(self._given_up()))

    def ended(self, now: float) -> None:
        """The end is durable: the heads are final."""
        # A full disk may have kept everybody waiting, but for those who were given up before.
        waiting = [member for member in self.state.members if member.moved_at >= self.began_at]
        self._wait_anew(waiting, now)
        self.state.closing = False
        self.state.turn(Phase.ENDED)
        self.state.note("ended", "the run has ended: learners adopt the final model")

    def _wait_anew(self, members: Iterable[Member], now: float) -> None:
        """Begins a full wait for these: who is paused makes no steps either."""
        self.began_at = now
        for member in members:
            if member.is_heard(now):
                member.moved_at = now

    def _given_up(self) -> tuple[str, ...]:
        """Learners that saw the end and have not got the final model, each with what it lacks."""
        lines = []
        for member in self.state.members:
            pairs = zip(self.state.heads, member.bases, strict=True)
            lacks = [str(fragment) for fragment, (head, v) in enumerate(pairs) if v < head]
            if lacks and not member.has_left and member.heard_at >= self.began_at - LEAVE_S:
                which = f"fragment{'s' * (len(lacks) > 1)} {', '.join(lacks)}"
                lines.append(f"{member.name} ({which})")
        return tuple(lines)
