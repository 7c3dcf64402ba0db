"""Schedule of rounds: which fragment is next, when it opens, when it is merged. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrows.broker.syncer import events as ev
from narrows.broker.syncer import serving
from narrows.broker.syncer.counting import count_tokens
from narrows.broker.syncer.ending import Waiting
from narrows.broker.syncer.member import Liveness, Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.quorum import Awaited, Decision, QuorumRule, Verdict
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run import RunState
from narrows.broker.syncer.suspicion import Suspicion
from narrows.proto import messages as msg
from narrows.proto.errors import printable
from narrows.proto.flow import chunks_max
from narrows.proto.limits import PUBLICATIONS_KEPT, TOKENS_MAX
from narrows.proto.smoothing import Smoothed
from narrows.proto.timing import ADOPTION_WAIT_S, REOPEN_S

REASON_CHARACTERS = 60
"""Most characters of a peer's reason in a status line."""


@dataclass
class Scheduler:
    """Opens rounds, decides when they are merged, and enters the versions that come of them."""

    state: RunState
    waiting: Waiting
    """Knows which learners may come back to the last rounds."""
    launched_at: float
    waiting_for: str = ""
    """Reason for which the newest round waits, for operators."""
    halted: bool = False
    """The broker is stopping: nothing is opened or merged any more."""
    adopting: list[str] = field(default_factory=list[str])
    """Lockstep: learners that the next round waits for while they adopt."""
    _adopting_until: float = math.inf
    _adopting_since: dict[str, float] = field(default_factory=dict[str, float])
    _return_by: float = 0.0
    """Time before which the last rounds are not opened, because anybody may come back to them."""
    final_due: list[int] = field(default_factory=list[int])
    """Fragments whose last round is still to come; filled when the goal is reached."""
    _next_fragment: int = 0
    _reopen_at: float = 0.0
    _attempts: dict[int, int] = field(default_factory=dict[int, int])
    _decide_at: dict[int, float] = field(default_factory=dict[int, float])
    _merge_started: dict[tuple[int, int], float] = field(
        default_factory=dict[tuple[int, int], float]
    )
    _sync_s: Smoothed = field(default_factory=Smoothed)
    """xi_sync: seconds from the start of a merge to its adoption."""

    def next_deadline(self) -> float | None:
        times = list(self._decide_at.values())
        if self._can_launch() and self._next_due() is not None:
            times.append(self._launch_at())
        if self.adopting:
            times.append(self._adopting_until)
        return min(times, default=None)

    def adopted(self, fragment: int, version: int, now: float) -> None:
        """Measures how long after the start of its merge a version was adopted."""
        # A version that is no longer kept is unknown here: such a late adoption says nothing.
        started = self._merge_started.get((fragment, version))
        if started is not None:
            assert now >= started
            self._sync_s.add(now - started)

    def _launch_at(self) -> float:
        """Earliest time of the next launch: H * xi_step / P after the last one.

        Without it a fast network would shrink the effective H, and the outer momentum would
        over-drive. The lockstep modes need no spacing, since the snapshot's step gives it, and the
        last rounds need none.
        """
        state = self.state
        if state.lockstep or state.phase is RunPhase.ENDING:
            return max(self._reopen_at, self._return_by)
        spacing = state.settings.sync_period_steps / state.settings.fragment_count
        return max(self._reopen_at, self.launched_at + spacing * state.step_s())

    def _can_launch(self) -> bool:
        state = self.state
        if self.halted or state.phase not in (RunPhase.RUNNING, RunPhase.ENDING):
            return False
        # Without a learner that can contribute, a round would only age.
        if len(state.rounds) >= state.config.merge.rounds_in_flight or not state.roster.ready():
            return False
        if state.phase is RunPhase.ENDING:
            return any(index not in state.rounds for index in self.final_due)
        if state.lockstep:
            # A learner that is still adopting would miss a round that all must contribute to.
            return not self.adopting
        # The spacing needs a step time; before two steps of a learner were seen there is none.
        return state.step_s() > 0

    def _next_due(self) -> int | None:
        """Fragment whose turn it is; None if it is in flight already."""
        state = self.state
        free = [index for index in range(len(state.heads)) if index not in state.rounds]
        if state.phase is RunPhase.ENDING:
            free = [index for index in free if index in self.final_due]
            return free[0] if free else None
        if state.lockstep:
            return min(free, key=lambda index: (state.at_step(index), index), default=None)
        # Round robin: every fragment is exchanged equally often.
        count = len(state.heads)
        return min(free, key=lambda index: (index - self._next_fragment) % count, default=None)

    def launch(self, now: float) -> None:
        """Opens the rounds that are due; the next Beat carries them."""
        state = self.state
        self._find_adopting(now)
        ending = state.phase is RunPhase.ENDING
        self._return_by = self.waiting.absent(now).get("", 0.0) if ending else 0.0
        while self._can_launch():
            index = self._next_due()
            if index is None or now < self._launch_at():
                return
            assert index not in state.rounds
            self._attempts[index] = self._attempts.get(index, 0) + 1
            state.rounds[index] = Round(
                fragment=index,
                base_version=state.heads[index].version,
                attempt=self._attempts[index],
                at_step=state.at_step(index) if state.lockstep and not ending else -1,
                elements=state.table[index].elements,
                chunks_max=chunks_max(state.table[index].elements, state.least_chunk_elements),
                opened_at=now,
                quorum=state.config.merge.quorum,
                expected={m.name for m in state.roster.ready() if not state.is_excluded(m.name)},
                last=ending,
            )
            self._next_fragment = (index + 1) % len(state.heads)
            self.launched_at = now
            assert len(state.rounds) <= state.config.merge.rounds_in_flight

    def _find_adopting(self, now: float) -> None:
        """Finds the learners that the next round of the lockstep modes waits for.

        The wait has an end, or one learner that cannot reach the downlink would hold up all others.
        """
        self.adopting.clear()
        self._adopting_until = math.inf
        for member in self.state.roster.connected():
            if not self.state.lockstep or member.ready:
                self._adopting_since.pop(member.name, None)
                continue
            # By name: one that joins anew again and again must not hold up everybody for ever.
            since = self._adopting_since.setdefault(member.name, now)
            until = since + ADOPTION_WAIT_S
            if not member.given_up and now < until:
                self.adopting.append(member.name)
                self._adopting_until = min(self._adopting_until, until)

    def _awaited(self, round_: Round, ready: list[Member]) -> list[Awaited]:
        """Learners that may still contribute: expected, alive and not declined.

        Below the quorum, learners that were not expected count as well.
        """
        short = len(round_.contributed) < round_.quorum
        return [
            Awaited(
                member.name,
                member.name in round_.incoming and bool(round_.incoming[member.name].announced),
                member.presence.liveness is Liveness.LATE,
                member.participation.predicted_s(self.state.pace.of(member.name)),
                member.participation.arrival.mean,
                round_.is_here(member.name),
            )
            for member in ready
            if member.name not in round_.contributed
            and member.name not in round_.declined
            and not self.state.is_excluded(member.name)
            and (short or member.name in round_.expected)
        ]

    def decision(self, round_: Round, ready: list[Member], now: float) -> Decision:
        """Decides about a round; `ready` are the learners that may contribute."""
        assert not round_.merging
        merge, ending = self.state.config.merge, self.state.phase is RunPhase.ENDING
        if ending and (absent := [n for n in self.waiting.absent(now) if round_.awaits(n)]):
            return Decision(Verdict.WAIT, f"may come back: {', '.join(absent)}")
        rule = QuorumRule(
            quorum=round_.quorum,
            everybody=self.state.lockstep or ending,
            closing=ending,
            overlap_steps=self.state.settings.overlap_steps,
            grace_fraction=merge.grace_fraction,
            grace_max_s=merge.grace_max,
            wait_fraction=merge.wait_fraction,
            sync_period_steps=self.state.settings.sync_period_steps,
        )
        return rule.decide(
            now,
            opened_at=round_.opened_at,
            quorum_at=round_.quorum_at,
            complete=len(round_.contributed),
            awaited=self._awaited(round_, ready),
            step_s=self.state.pace.step_s(ready),
            sync_s=self._sync_s.mean,
            declined=[
                f"{member.name} declined"
                f" ({printable(round_.declined[member.name][:REASON_CHARACTERS])})"
                for member in ready
                if member.name in round_.declined
            ],
        )

    def decide(self, now: float) -> list[ev.Effect]:
        """Starts the merges and closes the rounds whose time has come."""
        effects: list[ev.Effect] = []
        self._decide_at.clear()
        ready = self.state.roster.counted_on()
        for index in sorted(self.state.rounds):
            round_ = self.state.rounds[index]
            if round_.merging or self.halted:
                continue
            decision = self.decision(round_, ready, now)
            self.waiting_for = f"fragment {index}: {decision.reason}"
            if decision.verdict is Verdict.GRACE and decision.until is not None:
                self._decide_at[index] = decision.until
            elif decision.verdict is Verdict.CLOSE:
                effects += self._close(round_, decision, now)
            elif decision.verdict is Verdict.MERGE:
                effects += self._start_merge(round_, decision, now)
        return effects

    def _close(self, round_: Round, decision: Decision, now: float) -> list[ev.Effect]:
        """Ends a round without a merge."""
        self._end_round(round_)
        # A round that nobody can join would otherwise open and close in one busy loop.
        if not round_.last:
            self._reopen_at = now + REOPEN_S
        names = ", ".join(sorted(round_.contributed))
        handles = round_.discard()
        effects: list[ev.Effect] = [ev.Drop(handles)] if handles else []
        if round_.last and names:
            what = f"the last round of fragment {round_.fragment} ends without a merge"
            text = f"{what}, the work of {names} is dropped: {decision.reason}"
            effects.append(ev.Note("warning", text))
        return effects

    def _end_round(self, round_: Round) -> None:
        assert self.state.rounds.get(round_.fragment) is round_
        del self.state.rounds[round_.fragment]
        if round_.last and round_.fragment in self.final_due:
            self.final_due.remove(round_.fragment)

    def _start_merge(self, round_: Round, decision: Decision, now: float) -> list[ev.Effect]:
        # Before the unfinished pushes go: they show why a learner missed the round.
        effects = self._count_missed(round_, now)
        effects += [
            ev.LogFate("expired", name, incoming.incarnation, round_.fragment, incoming.push_id)
            for name, incoming in sorted(round_.incoming.items())
        ]
        # Unfinished pushes go now: their base version is about to become old.
        handles = round_.close()
        if handles:
            effects.append(ev.Drop(handles))
        round_.merging = True
        version = round_.base_version + 1
        assert len(round_.contributed) >= round_.quorum
        self._merge_started[round_.fragment, version] = now
        effects += count_tokens(self.state, round_, now)
        contributions, organisations = round_.contributions(), self.state.organisations
        effects.append(
            ev.StartMerge(round_.fragment, version, contributions, decision.reason, organisations)
        )
        return effects

    def _count_missed(self, round_: Round, now: float) -> list[ev.Effect]:
        """Counts the round as missed by the awaited; warns of one that keeps missing rounds."""
        effects: list[ev.Effect] = []
        for awaited in self._awaited(round_, self.state.roster.counted_on()):
            member = self.state.roster.get(awaited.name)
            assert member is not None
            # A learner that is late may be cut off: that says nothing about its pace.
            waited_s = None if awaited.late else now - round_.opened_at
            member.participation.miss(waited_s)
            if missed := member.participation.name_misses(now):
                text = f"{member.name} {missed}: {_why_missed(awaited)}"
                effects.append(ev.Note("warning", text))
        return effects

    def merged(self, event: ev.Merged, now: float) -> list[ev.Effect]:
        """Enters a new version and publishes it to everybody."""
        state, index = self.state, event.fragment
        round_ = state.rounds[index]
        assert round_.merging
        assert event.version == round_.base_version + 1 == state.heads[index].version + 1
        state.heads[index] = msg.FragmentHead(event.version, event.digest)
        self._attempts.pop(index, None)
        self._merge_started.pop((index, event.version - PUBLICATIONS_KEPT), None)
        state.tally.merged(len(round_.contributed), event.clipped, now)
        state.clock.merged(index, [c.counted or 0 for c in round_.contributions()], now)
        self._end_round(round_)
        for contribution in round_.contributions():
            member = state.roster.get(contribution.learner)
            if member is None or member.incarnation != contribution.incarnation:
                continue  # It was replaced or forgotten: it cannot come back to ask.
            member.participation.merge(index, contribution.push_id)
            key = contribution.learner, contribution.incarnation, index
            before = state.merged_pushes.get(key, (0, 0))[1]
            tokens = min(before + contribution.tokens, TOKENS_MAX)
            assert tokens > 0
            state.merged_pushes[key] = contribution.push_id, tokens
        effects: list[ev.Effect] = [
            ev.Publish(member.name, index, event.version, member.participation.last_merged[index])
            for member in state.roster.connected()
        ]
        serving.expect_adoptions(state, index, now)
        return effects + Suspicion(state).judge(event, len(round_.contributed))

    def merge_failed(self, fragment: int, reason: str, now: float) -> list[ev.Effect]:
        """Ends a round whose merge changed nothing; it starts again with fresh pushes."""
        round_ = self.state.rounds[fragment]
        assert round_.merging
        self._end_round(round_)
        self._reopen_at = now + REOPEN_S
        names = ", ".join(sorted(round_.contributed))
        text = f"fragment {fragment}: merge of {names} dropped, nothing changed: {reason}"
        return [ev.Note("error", text)]


def _why_missed(awaited: Awaited) -> str:
    """Names the likely reason for a missed round, and the remedy."""
    if awaited.late:
        return "nothing was heard from it; is it alive, and its line up?"
    longer = "a larger merge.wait_fraction or fragments.sync_period_steps waits for it"
    if awaited.announced:
        return f"its push was announced but not complete in time; if its line is slow, {longer}"
    return f"it did not answer in time; if its steps are long, {longer}"
