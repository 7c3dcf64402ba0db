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
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from narrows.broker.records import Contribution, NotFinite, Round
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
)
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, fault

GAMMA: Final = 0.9
"""Share of the hidden time that a window may use, so that the merge itself is hidden too."""

SYNC_SHARE: Final = 0.25
"""Weight of the newest round in the moving average of the seconds from due to durable."""


class LastMerge(NamedTuple):
    """A round that has become durable."""

    fragment: int
    version: int
    at: float
    reason: str
    taken: tuple[Contribution, ...]


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
    last_merge: LastMerge | None = None
    """The newest durable round of this life."""
    trained_at: float = field(init=False)
    """When somebody trained last."""
    enough_at: float = field(init=False)
    """When at least as many trained as a quorum needs."""
    sync_s: float = 0.0
    """Moving average of the seconds from due to durable."""
    due_at: float = math.inf
    """When the time alone makes something due."""
    _next: int = 0
    """The fragment whose turn it is to be launched."""
    _awaited: list[Member] = field(default_factory=list[Member])
    """Learners that train as of this event: ready, heard and not paused."""

    def __post_init__(self) -> None:
        self.trained_at = self.enough_at = self.launched_at

    def advance(self, now: float) -> None:
        """Decides everything that the time or the last event has made due."""
        state = self.state
        self._awaited = state.members.awaited(now)
        if self._awaited:
            self.trained_at = now
        if len(self._awaited) >= state.config.merge.quorum:
            self.enough_at = now
        self.due_at = math.inf
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
        """The pace xi: the harmonic mean of the step times of the learners that contribute.

        All n of them together make n * H inner steps in a period, whatever their speeds, and a hung
        one stretches it by n / (n - 1) at most. While nobody contributes, all who train count.
        Without learners the old pace stands, so that an open round keeps its window.
        """
        timed = [each for each in self._awaited if each.step_s > 0]
        steps_s = [each.step_s for each in timed]
        counting = [each for each in timed if each.counts(self.state.period_s, now)]
        if counting:
            # A learner that makes a step in s seconds is merged every n * H * s seconds at the
            # latest. A last merged push that is older bounds the speed that is believed.
            steps = COUNTS_PERIODS * len(counting) * self.state.settings.sync_period_steps
            steps_s = [max(each.step_s, (now - each.merged_at) / steps) for each in counting]
        if not steps_s:
            return self.state.xi_s
        return len(steps_s) / sum(1 / each for each in steps_s)

    # Launch.

    def _has_room(self, fragment: int) -> bool:
        is_idle = self.state.rounds[fragment].stage is Stage.IDLE
        return is_idle and self.state.in_flight() < IN_FLIGHT_MAX

    def _to_launch(self, now: float) -> int | None:
        """The fragment whose round begins now: round robin, and not faster than the pace."""
        if not self._awaited:
            return self._to_launch_for_leavers()
        if not self._has_room(self._next):
            return None
        has_pace = self.state.xi_s > 0
        launch_at = self.launched_at + self._spacing_s
        # In lockstep the learners set the pace.
        if self.state.settings.mode is msg.Mode.DILOCO or (has_pace and now >= launch_at):
            return self._next
        if has_pace:
            self.due_at = min(self.due_at, launch_at)
        return None

    def _to_launch_for_leavers(self) -> int | None:
        """A fragment that has pushes, while nobody trains: learners that leave wait until their
        last pushes are merged. Open rounds that nobody will fill make room for it."""
        rounds = self.state.rounds
        order = [*range(self._next, len(rounds)), *range(self._next)]
        idle = [each for each in order if rounds[each].stage is Stage.IDLE]
        with_pushes = [each for each in idle if rounds[each].here()]
        if with_pushes:
            for fragment in self.state.collecting():
                if not rounds[fragment].inbox:
                    self.move(rounds[fragment], Step.ABANDON)
        return next(filter(self._has_room, with_pushes), None)

    @property
    def _spacing_s(self) -> float:
        """Seconds between two launches, whatever their fragments."""
        return self.state.period_s / len(self.state.rounds)

    def _launch(self, fragment: int, now: float) -> None:
        slot = self.state.rounds[fragment]
        self.move(slot, Step.LAUNCH)
        slot.launched_at = self.launched_at = now
        slot.quorum_at = None
        # The pushes that wait in the inbox may be enough at once.
        self._collect(fragment, now)

    # Collect.

    def _collect(self, fragment: int, now: float) -> None:
        """Merges an open round if it is due: a round waits for its quorum without a limit, and then
        at most for a window."""
        slot = self.state.rounds[fragment]
        if self.state.phase is msg.Phase.ENDING:
            # No quorum any more: each learner pushes what it has left, or is given up.
            if self.ending.owing(fragment, now):
                return
            if slot.here():
                self._merge(fragment, "last", now)
            else:
                self.move(slot, Step.ABANDON)
            return
        if not self._has_quorum(fragment, now):
            return
        if slot.quorum_at is None:
            slot.quorum_at = now
        window_s = self._window_s(slot, slot.quorum_at)
        ends_at = slot.quorum_at + window_s
        connected = self.state.members.connected()
        if not any(self._misses(each, slot, window_s, now) for each in connected):
            self._merge(fragment, "everybody", now)
        elif now < ends_at:
            self.due_at = min(self.due_at, ends_at)
        # After the window the round waits only for pushes whose bytes are all here and that workers
        # still decode: a delay of ours must not make them miss this version.
        elif not any(w.is_coming and w.transfer.complete for w in slot.inbox.values()):
            self._merge(fragment, "window", now)

    def _has_quorum(self, fragment: int, now: float) -> bool:
        here = len(self.state.rounds[fragment].here())
        quorum = self.state.config.merge.quorum
        if quorum == 0:  # Everybody.
            return here > 0 and not self.state.absent(fragment, now)
        # Never more than there are learners that train: two rounds that nobody can fill would hold
        # both places for ever.
        return here > 0 and here >= min(quorum, len(self._awaited))

    def _misses(self, member: Member, slot: FragmentRound, window_s: float, now: float) -> bool:
        """Whether the window is worth while for a learner: its push is on its way, or it trains,
        has announced none, and can finish a step within the window."""
        waiting = slot.inbox.get(member.incarnation)
        if waiting is not None and waiting.announcement is not None:
            return waiting.is_coming and member.is_heard(now)
        # A learner whose step time is not known yet has just joined: it may be fast.
        return member.is_awaited(now) and member.step_s < window_s

    def _window_s(self, slot: FragmentRound, quorum_at: float) -> float:
        """Seconds that a round waits after its quorum for learners that may still come: the time
        that their overlap hides from them (Decoupled DiLoCo, Eq. 3), or one launch spacing where
        that is longer."""
        overlap_s = self.state.settings.overlap_steps * self.state.xi_s
        hidden_s = overlap_s - (quorum_at - slot.launched_at) - self.sync_s
        return max(GAMMA * hidden_s, self._spacing_s)

    # Merge.

    def _merge(self, fragment: int, reason: str, now: float) -> None:
        slot = self.state.rounds[fragment]
        self.move(slot, Step.DUE)
        slot.taken = self.pushes.take(fragment)
        slot.reason = reason
        slot.due_at = now
        assert slot.taken, "a round is merged from at least one push"
        policy = self.state.config.policy
        if self.state.phase is msg.Phase.ENDING:
            policy = policy.of_last_round()
        self.state.effects.append(
            ev.MergeRound(
                Round(
                    fragment=fragment,
                    version=self.state.heads[fragment] + 1,
                    contributions=slot.taken,
                    policy=policy,
                    period_s=self.state.period_s,
                    reason=reason,
                )
            )
        )

    def merge_failed(self, due: Round, error: Exception) -> None:
        """Nothing has changed. If one push is to blame, it is refused and the others are merged
        without it: one learner must not keep the work of all out. Else all are refused; what a
        refused push holds travels with the next one."""
        slot = self.state.rounds[due.fragment]
        refused = slot.taken
        if isinstance(error, NotFinite):
            refused = tuple(push for push in slot.taken if push.order == error.longest.order)
        self.state.note(
            "merge_failed",
            f"fragment {due.fragment}: {error}",
            warning=True,
            fragment=due.fragment,
            learners=[push.learner for push in refused],
        )
        refusal = fault(
            f"the merge of fragment {due.fragment} failed",
            expected="finite sums",
            got=str(error)[:200],
            remedy="the steps stay in your parameters and travel with the next push",
            code=ErrorCode.MERGE_FAILED,
        )
        for push in refused:
            self.state.effects.append(ev.Drop(due.fragment, push.incarnation, push.push_id))
            member = self.state.members.of(push.incarnation)
            if member is not None:
                self.pushes.refuse(member, due.fragment, push.push_id, refusal)
        slot.taken = tuple(push for push in slot.taken if push not in refused)
        if slot.taken:
            self.state.effects.append(ev.MergeRound(replace(due, contributions=slot.taken)))
        else:
            self.move(slot, Step.FAILED)

    # Commit.

    def merged(self, fragment: int, now: float) -> None:
        """The sum is made. Nothing has changed yet, and no learner hears of it."""
        self.move(self.state.rounds[fragment], Step.MERGED)
        self.state.rounds[fragment].merged_at = now
        self.state.effects.append(ev.Commit(fragment))

    def disk_failed(self, fragment: int, error: Exception) -> None:
        """Publishing waits for the disk; training goes on."""
        slot = self.state.rounds[fragment]
        assert slot.stage is Stage.COMMITTING, slot
        if not slot.disk_error:
            self.state.note(
                "disk_failed",
                f"fragment {fragment} cannot be written, nothing of it is published: {error}",
                warning=True,
                fragment=fragment,
            )
        slot.disk_error = str(error) or type(error).__name__

    # Publish.

    def durable(self, fragment: int, now: float) -> None:
        """The version exists: after version 0, heads, clock and merged ids change here alone."""
        state = self.state
        slot = state.rounds[fragment]
        self.move(slot, Step.DURABLE)
        state.heads[fragment] += 1
        state.clock.count(sum(push.tokens for push in slot.taken), now)
        for push in slot.taken:
            slot.merged.pop(push.incarnation, None)  # The newest merge stands last.
            slot.merged[push.incarnation] = push.push_id
            member = state.members.of(push.incarnation)
            if member is not None:
                member.merged_tokens += push.tokens
                member.contributions += 1
                # A learner cannot move while a last round waits for others. It is not given up
                # together with those.
                member.merged_at = member.moved_at = now
        # As many as a STATE can tell of; the store knows the others.
        while len(slot.merged) > msg.LEARNERS_MAX:
            del slot.merged[next(iter(slot.merged))]

        slot.durable_at = now
        self.last_merge = LastMerge(fragment, state.heads[fragment], now, slot.reason, slot.taken)
        self.merges += 1
        self.contributions += len(slot.taken)
        if slot.disk_error:
            state.note("disk_works", f"fragment {fragment} is written", fragment=fragment)
        else:
            self.sync_s += SYNC_SHARE * (now - slot.due_at - self.sync_s)
        slot.taken = ()
        slot.disk_error = ""
        state.effects.append(ev.Publish(fragment, state.heads[fragment]))

    def move(self, slot: FragmentRound, step: Step) -> None:
        """Takes a round from one stage to another."""
        before, after = step.value
        assert slot.stage is before, f"{step.name} in stage {slot.stage.name}"
        slot.stage = after
        # Learners push only to rounds that they believe are open: each change is told at once.
        if Stage.COLLECTING in (before, after):
            self.state.beat_wanted = True

    def check(self) -> None:
        assert self.state.in_flight() <= IN_FLIGHT_MAX
        for fragment, slot in enumerate(self.state.rounds):
            assert bool(slot.taken) == (slot.stage in (Stage.MERGING, Stage.COMMITTING)), slot
            order = [push.order for push in slot.taken]
            assert order == sorted(set(order)), slot
            assert not slot.disk_error or slot.stage is Stage.COMMITTING, slot
            for incarnation, waiting in slot.inbox.items():
                assert waiting.incarnation == incarnation and waiting.fragment == fragment
                assert waiting.push_id > slot.newest_id(incarnation), waiting
                assert waiting.checked <= waiting.transfer.here, waiting
