"""The life of a round, on one page: launch, collect, merge, commit, publish.

    IDLE --launch--> COLLECTING --due--> MERGING --merged--> COMMITTING --durable--> IDLE
                     COLLECTING --abandon--> IDLE  MERGING --failed--> IDLE

The launch of a round opens it for one fragment, and a Beat tells all learners so. A push that came
before waits in the fragment's inbox, and counts. The host performs the effects: the pipeline adds
and writes, which is slow, and the downlink publishes. In this machine heads, clock and merged push
ids change in `durable` and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import Ending
from narrows.broker.syncer.members import COUNTS_PERIODS, Member
from narrows.broker.syncer.pushes import Pushes
from narrows.broker.syncer.state import (
    IN_FLIGHT_MAX,
    FragmentRound,
    Stage,
    State,
    Step,
    fault,
)
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode

GAMMA: Final = 0.9
"""Share of the hidden time that a window may use, so that the merge itself is hidden too."""

SYNC_SHARE: Final = 0.25
"""Weight of the newest round in the moving average of the seconds from due to durable."""


@dataclass(eq=False)
class Rounds:
    """Decides when a round begins, when it is due, and when its version exists."""

    state: State
    pushes: Pushes
    ending: Ending
    launched_at: float
    """When the last round was launched, or the run began or went on."""
    merges: int = 0
    contributions: int = 0
    sync_s: float = 0.0
    """Moving average of the seconds from due to durable."""
    _next: int = 0
    """The fragment whose turn it is to be launched."""
    due_at: float = math.inf
    """When the time alone makes something due."""
    _awaited: list[Member] = field(default_factory=list[Member])
    """Learners that train as of this event: ready, heard and not paused."""

    def advance(self, now: float) -> None:
        """Decides everything that the time or the last event has made due."""
        state = self.state
        self._awaited, self.due_at = state.members.awaited(now), math.inf
        state.xi_s = self._pace_s(now)
        for fragment in state.collecting():
            self._collect(fragment, now)
        if state.phase is msg.Phase.RUNNING and not state.stopping:
            while (next_ := self._to_launch(now)) is not None:
                self._launch(next_, now)
                self._next = (next_ + 1) % len(state.rounds)
        if state.phase is msg.Phase.ENDING and not (state.closing or state.stopping):
            for fragment in self.ending.fragments_open(now):
                if self._has_room(fragment):
                    self._launch(fragment, now)

    def _pace_s(self, now: float) -> float:
        """The pace xi: the harmonic mean of the step times of those who contribute.

        All n of them together make n * H inner steps in a period, whatever their speeds, and a hung
        one stretches it by n / (n - 1) at most. While nobody contributes all who train count.
        Without learners the old pace stands, so that an open round keeps its window.
        """
        steps_s = [each.step_s for each in self._awaited if each.step_s]
        counting = [e for e in self._awaited if e.step_s and e.counts(self.state.period_s, now)]
        if counting:
            # Who makes a step in s seconds is merged every n * H * s seconds at the latest. When
            # its last merged push is so much older, its steps are not believed to be that short.
            believed = COUNTS_PERIODS * len(counting) * self.state.settings.sync_period_steps
            steps_s = [max(e.step_s or 0.0, (now - e.merged_at) / believed) for e in counting]
        return len(steps_s) / sum(1 / each for each in steps_s) if steps_s else self.state.xi_s

    # Launch.

    def _has_room(self, fragment: int) -> bool:
        idle = self.state.rounds[fragment].stage is Stage.IDLE
        return idle and self.state.in_flight() < IN_FLIGHT_MAX

    def _to_launch(self, now: float) -> int | None:
        """Round robin, and not faster than the pace. In lockstep the learners set the pace."""
        state = self.state
        if self._awaited:
            launch_at = self.launched_at + self._spacing_s if state.xi_s > 0 else math.inf
            if not self._has_room(self._next):
                return None
            if now >= launch_at or state.settings.mode is msg.Mode.DILOCO:
                return self._next
            self.due_at = min(self.due_at, launch_at)
            return None
        # Nobody trains. Learners that leave wait until their last pushes are merged, so fragments
        # that have pushes come now, and open rounds that nobody will fill make room for them.
        order = [*range(self._next, len(state.rounds)), *range(self._next)]
        idle = [each for each in order if state.rounds[each].stage is Stage.IDLE]
        with_pushes = [each for each in idle if state.rounds[each].here()]
        for fragment in state.collecting() if with_pushes else ():
            if not state.rounds[fragment].inbox:
                self.move(state.rounds[fragment], Step.ABANDON)
        return next(filter(self._has_room, with_pushes), None)

    @property
    def _spacing_s(self) -> float:
        """Seconds between two launches, whatever their fragments."""
        return self.state.period_s / len(self.state.rounds)

    def _launch(self, fragment: int, now: float) -> None:
        round_ = self.state.rounds[fragment]
        self.move(round_, Step.LAUNCH)
        round_.launched_at, round_.quorum_at, self.launched_at = now, None, now
        # What waited in the inbox may be enough at once.
        self._collect(fragment, now)

    # Collect.

    def _collect(self, fragment: int, now: float) -> None:
        """A round waits for its quorum without a limit, and then at most for a window."""
        state, round_ = self.state, self.state.rounds[fragment]
        here, quorum = len(round_.here()), state.config.merge.quorum
        if state.phase is msg.Phase.ENDING:
            # No quorum any more: each learner pushes what it has left, or is given up.
            if not self.ending.owing(fragment, now):
                if here:
                    self._merge(fragment, "last", now)
                else:
                    self.move(round_, Step.ABANDON)
            return
        # Never more than who trains: two rounds that nobody can fill would hold both places for
        # ever. Quorum 0 stands for everybody.
        needed = min(quorum, len(self._awaited))
        enough = here >= needed if quorum else not state.absent(fragment, now)
        if not here or not enough:
            return
        if round_.quorum_at is None:
            round_.quorum_at = now
        window_s = self._window_s(round_, round_.quorum_at)
        ends_at = round_.quorum_at + window_s
        if not any(self._misses(each, round_, window_s, now) for each in state.members.connected()):
            self._merge(fragment, "everybody", now)
        elif now < ends_at:
            self.due_at = min(self.due_at, ends_at)
        # A push whose bytes are all here is waited for while workers decode it: else it would miss
        # this version through a delay of ours. The host calls again when it is checked.
        elif not any(w.is_coming and w.transfer.complete for w in round_.inbox.values()):
            self._merge(fragment, "window", now)

    def _misses(self, member: Member, round_: FragmentRound, window_s: float, now: float) -> bool:
        """Whether the window is worth while for a learner: its push is on its way, or it trains,
        has announced none and can finish a step within the window."""
        waiting = round_.inbox.get(member.incarnation)
        if waiting is not None and waiting.push is not None:
            return waiting.is_coming and member.is_heard(now)
        # A learner that has reported no step time has just joined: it may be fast.
        return member.is_awaited(now) and (member.step_s or 0.0) < window_s

    def _window_s(self, round_: FragmentRound, quorum_at: float) -> float:
        """Seconds that a round waits after its quorum for learners that may still come: the time
        that their overlap hides from them (Decoupled DiLoCo, Eq. 3), or one launch spacing where
        that is longer."""
        overlap_s = self.state.settings.overlap_steps * self.state.xi_s
        hidden_s = overlap_s - (quorum_at - round_.launched_at) - self.sync_s
        return max(GAMMA * hidden_s, self._spacing_s)

    # Merge.

    def _merge(self, fragment: int, reason: str, now: float) -> None:
        round_ = self.state.rounds[fragment]
        self.move(round_, Step.DUE)
        round_.taken, round_.due_at = self.pushes.take(fragment), now
        assert round_.taken, "a round is merged from at least one push"
        version, period_s = self.state.heads[fragment] + 1, self.state.period_s
        self.state.effects.append(ev.Merge(fragment, version, round_.taken, period_s, reason))

    def merge_failed(self, fragment: int, error: Exception) -> None:
        """Nothing has changed; the learners push these steps again."""
        round_ = self.state.rounds[fragment]
        learners = [facts.learner for facts in round_.taken]
        text = f"fragment {fragment}: {error}"
        self.state.note("merge_failed", text, warning=True, fragment=fragment, learners=learners)
        refusal = fault(
            f"the merge of fragment {fragment} failed", "finite sums", str(error)[:200],
            "the steps stay in your parameters and travel with the next push",
            ErrorCode.MERGE_FAILED,
        )  # fmt: skip
        for facts in round_.taken:
            self.state.effects.append(ev.Drop(fragment, facts.incarnation, facts.push_id))
            if member := self.state.members.of(facts.incarnation):
                self.pushes.refuse(member, fragment, facts.push_id, refusal)
        round_.taken = ()
        self.move(round_, Step.FAILED)

    # Commit.

    def merged(self, fragment: int) -> None:
        """The sum is made. Nothing has changed yet, and no learner hears of it."""
        self.move(self.state.rounds[fragment], Step.MERGED)
        self.state.effects.append(ev.Commit(fragment))

    def disk_failed(self, fragment: int, error: Exception) -> None:
        """Publishing waits for the disk; training goes on."""
        round_ = self.state.rounds[fragment]
        assert round_.stage is Stage.COMMITTING, round_
        if not round_.disk_error:
            text = f"fragment {fragment} cannot be written, nothing of it is published: {error}"
            self.state.note("disk_failed", text, warning=True, fragment=fragment)
        round_.disk_error = str(error) or type(error).__name__

    # Publish.

    def durable(self, fragment: int, now: float) -> None:
        """The version exists: the only place where heads, clock and merged ids change."""
        state, round_ = self.state, self.state.rounds[fragment]
        self.move(round_, Step.DURABLE)
        state.heads[fragment] += 1
        state.clock.count(sum(facts.tokens for facts in round_.taken), now)
        for facts in round_.taken:
            round_.merged.pop(facts.incarnation, None)
            round_.merged[facts.incarnation] = facts.push_id
            if (member := state.members.of(facts.incarnation)) is not None:
                member.merged_tokens += facts.tokens
                member.contributions += 1
                # Who waits for the last rounds is not given up with whom they wait for.
                member.moved_at = member.merged_at = now
        # As many as a STATE can tell of; the store knows the others.
        while len(round_.merged) > msg.LEARNERS_MAX:
            del round_.merged[next(iter(round_.merged))]
        self.merges += 1
        self.contributions += len(round_.taken)
        if round_.disk_error:
            state.note("disk_works", f"fragment {fragment} is written", fragment=fragment)
        else:
            self.sync_s += SYNC_SHARE * (now - round_.due_at - self.sync_s)
        round_.taken, round_.disk_error = (), ""
        state.effects.append(ev.Publish(fragment, state.heads[fragment]))

    def move(self, round_: FragmentRound, step: Step) -> None:
        """Takes a round from one stage to another."""
        before, after = step.value
        assert round_.stage is before, f"{step.name} in stage {round_.stage.name}"
        round_.stage = after
        # Learners push only to rounds that they believe are open: each change is told at once.
        self.state.beat_wanted |= Stage.COLLECTING in (before, after)

    def check(self) -> None:
        assert self.state.in_flight() <= IN_FLIGHT_MAX
        for fragment, round_ in enumerate(self.state.rounds):
            busy = round_.stage in (Stage.MERGING, Stage.COMMITTING)
            assert bool(round_.taken) == busy, round_
            taken = {facts.incarnation: facts.push_id for facts in round_.taken}
            assert len(taken) == len(round_.taken) and list(round_.taken) == sorted(round_.taken)
            assert not round_.disk_error or round_.stage is Stage.COMMITTING, round_
            for incarnation, entry in round_.inbox.items():
                assert entry.incarnation == incarnation and entry.fragment == fragment
                known = max(round_.merged.get(incarnation, 0), taken.get(incarnation, 0))
                assert entry.push_id > known, entry
                assert entry.checked <= entry.transfer.here, entry
