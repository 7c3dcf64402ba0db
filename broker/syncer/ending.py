"""Waiting for single learners, in lockstep and at the end of a run: for whom, and how long. [pure]

This module alone writes `Member.given_up`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_high, median_low
from typing import Final, NamedTuple, TypeAlias

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.run import RunState
from narrows.proto.flow import (
    STATE_BYTES,
    USUAL_RATIO_MAX,
    Flow,
    Patience,
    Way,
    push_bytes_max,
)
from narrows.proto.timing import ADOPTION_WAIT_S
from narrows.proto.units import counted, format_bytes, format_duration_s

NAMED_MAX = 10
"""Most names in one line of the log."""

LIVES_MAX: Final = 3
"""Processes of one name that a phase of the end waits for: the next one would crash as the ones
before it did."""

LEFT_OUT_DOUBLINGS_MAX: Final = 6
"""Lockstep: a learner that is given up is waited for again after 1, 2, 4, .. versions, at most 2 to
this power."""

EndProgress: TypeAlias = tuple[str, float, int]
"""Incarnation, time of its last complete contribution, number of its adoptions of a newest version.
Older ones do not count: it could claim thousands of them one by one."""


class _Wait(NamedTuple):
    progress: EndProgress
    patience: Patience


class _LeftOut(NamedTuple):
    times: int
    """How often in a row."""
    until_version_sum: int


@dataclass
class Waiting:
    """Gives up learners that hold the end up for longer than the rule of `Patience` allows.

    The rule is applied to one learner at a time: first to its answers to the last rounds, then to
    the final versions that it lacks. Each contribution and each adoption begins its wait anew.
    """

    state: RunState
    started_at: float
    ending_since: float = math.inf
    """Start of the end; a learner that was gone before does not belong to it."""
    _took_part: set[str] = field(default_factory=set[str])
    """Names that were connected when a phase of the end began."""
    _lives: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Incarnations by name that were connected in this phase of the end."""
    _waits: dict[str, _Wait] = field(default_factory=dict[str, _Wait])
    _until: dict[str, float] = field(default_factory=dict[str, float])
    _left_out: dict[str, _LeftOut] = field(default_factory=dict[str, _LeftOut])
    """Lockstep: names that the rounds go on without. A new process of a name changes nothing."""

    def begin(self, now: float) -> None:
        """Begins a phase of the end: the waits of the phase before are over."""
        assert self.state.phase is not RunPhase.FOUNDING
        self.ending_since = min(self.ending_since, now)
        self._took_part |= {member.name for member in self.state.roster.connected()}
        self._lives.clear()
        self._waits.clear()
        self._left_out.clear()
        # A learner that missed the last rounds may still take the final model in time.
        for member in self.state.roster:
            member.given_up = False

    def look(self, now: float) -> list[ev.Effect]:
        """Gives up the learners whose time is over."""
        self._until.clear()
        if self._in_lockstep:
            return self._look_in_lockstep(now)
        if self.state.phase not in (RunPhase.ENDING, RunPhase.ENDED):
            return []
        effects: list[ev.Effect] = []
        for member in self.state.roster.connected():
            lives = self._lives.setdefault(member.name, set())
            lives.add(member.incarnation)
            # A crash loop looks like progress, since each new process begins its wait anew.
            if len(lives) > LIVES_MAX:
                effects += self._give_up(
                    member, f"it was started {len(lives)} times while the end waited for it"
                )
                continue
            wait = self._wait_for(member, now)
            if wait is None or member.given_up:
                continue
            self._keep_to_budget(member, wait.patience)
            until = wait.patience.until(now)
            if now < until:
                self._until[member.name] = until
                continue
            effects += self._give_up(member, self._why(member, wait.patience, now))
        self._until |= self.absent(now)
        return effects

    def _look_in_lockstep(self, now: float) -> list[ev.Effect]:
        """Goes on without learners that a round waits for after others have contributed.

        All of it goes by name: a learner that joins anew again and again must not begin its wait
        anew. One that contributes is waited for again.
        """
        effects: list[ev.Effect] = []
        for name in [name for name in self._left_out if self.state.roster.get(name) is None]:
            del self._left_out[name]
        for member in self.state.roster.connected():
            name, rounds = member.name, self.state.rounds.values()
            if any(name in round_.contributed for round_ in rounds):
                self._left_out.pop(name, None)
            left_out = self._left_out.get(name)
            member.given_up = (
                left_out is not None and self.state.version_sum < left_out.until_version_sum
            )
            awaited = any(round_.contributed and round_.awaits(name) for round_ in rounds)
            if member.given_up or not member.ready or not awaited:
                self._waits.pop(name, None)
                continue
            if name not in self._waits:
                progress = (name, 0.0, 0)
                self._waits[name] = _Wait(progress, self._patience(member, now))
            patience = self._waits[name].patience
            self._keep_to_budget(member, patience)
            if now < (until := patience.until(now)):
                self._until[name] = until
                continue
            effects += self._give_up(member, self._why(member, patience, now))
            times = left_out.times + 1 if left_out else 0
            versions = 2 ** min(times, LEFT_OUT_DOUBLINGS_MAX)
            self._left_out[name] = _LeftOut(times, self.state.version_sum + versions)
        return effects

    def _give_up(self, member: Member, why: str) -> list[ev.Effect]:
        if member.given_up:
            return []
        assert member.name not in self._until, "nobody waits for a learner that is given up"
        member.given_up = True
        what = "run" if self.state.phase is RunPhase.RUNNING else "end"
        return [ev.Note("warning", f"the {what} goes on without {member.name}: {why}")]

    def next_deadline(self) -> float | None:
        return min(self._until.values(), default=None)

    def anybody(self) -> bool:
        """True while somebody takes part in the end, or may come back to it."""
        here = any(not member.given_up for member in self.state.roster.connected())
        return here or bool(self._until)

    @property
    def holders_up(self) -> list[str]:
        """Names of the connected learners that are waited for."""
        return [m.name for m in self.state.roster.connected() if m.name in self._until]

    # The length of a wait.

    def _wait_for(self, member: Member, now: float) -> _Wait | None:
        """The wait for a connected learner; None if it owes nothing."""
        progress = (
            member.incarnation,
            member.participation.contributed_at,
            member.copies.newest_adopted,
        )
        wait = self._waits.get(member.name)
        is_new = wait is None or wait.progress != progress
        # A learner that makes progress after all is taken back: it was slow, not hung.
        if is_new:
            member.given_up = False
        if not self._owes(member) and not member.given_up:
            self._waits.pop(member.name, None)
            return None
        if is_new:
            wait = self._waits[member.name] = _Wait(progress, self._patience(member, now))
        return wait

    def _owes(self, member: Member) -> bool:
        """True if the phase cannot end without this learner: a contribution, an adoption, a Bye."""
        assert self.state.phase in (RunPhase.ENDING, RunPhase.ENDED)
        # After the end every connected learner owes its Bye, and the process stays for it.
        if self.state.phase is RunPhase.ENDED or not member.ready:
            return True
        return bool(self._rounds_of(member))

    def _rounds_of(self, member: Member) -> list[int]:
        """Fragments whose open round waits for this learner."""
        rounds = sorted(self.state.rounds.items())
        return [index for index, round_ in rounds if round_.awaits(member.name)]

    def _lacks(self, member: Member) -> list[int]:
        """Fragments of which the learner has not adopted the newest version."""
        heads = self.state.versions
        return [index for index, held in enumerate(member.copies.held) if held < heads[index]]

    def _patience(self, member: Member, now: float) -> Patience:
        """Patience for the bytes that the learner has to send and to receive."""
        state = self.state
        codec, table = state.settings.push_codec, state.table
        pushes = sum(push_bytes_max(codec, table[i].elements) for i in self._rounds_of(member))
        states = STATE_BYTES * sum(table[index].elements for index in self._lacks(member))
        ways = (
            Way(member.uplink.flow, pushes, others_bytes_per_s=self._usual(_up)),
            Way(member.copies.flow, states, others_bytes_per_s=self._usual(_down)),
        )
        least_s = state.config.liveness.lost
        is_new = not member.participation.arrival.samples and member.name not in self._left_out
        if state.phase is RunPhase.RUNNING and is_new:
            least_s = max(least_s, ADOPTION_WAIT_S)  # It may have to compile its first step.
        return Patience(now, self._round_s(member, now), least_s, ways)

    def _usual(self, flow_of: Callable[[Member], Flow]) -> float | None:
        """Upper median of all learners' usual rates, in bytes per second; None: none is known."""
        rates = [flow_of(member).sampled_bytes_per_s for member in self.state.roster]
        known = [rate for rate in rates if rate is not None]
        return median_high(known) if known else None

    def _keep_to_budget(self, member: Member, patience: Patience) -> None:
        """Limits the expected speed to the rate that is granted now: rates may have changed."""
        wan, count = self.state.config.wan, len(self.state.roster.connected())
        assert count >= 1, "the member that is waited for is connected"
        down = [rate for rate in (wan.down, wan.total_down / count) if rate]
        for way, bits_per_s in zip(
            patience.ways, (member.up_bits_per_s, min(down, default=0.0)), strict=True
        ):
            way.limit_bytes_per_s = bits_per_s / 8 or math.inf

    def _round_s(self, member: Member, now: float) -> float:
        """Usual seconds of the learner's rounds, as measured here.

        For a learner that has not contributed yet it is the slowest other's, and at least the time
        of its steps as its Reports count them. They may count anything, so that time is at most the
        time for which the learner is here.
        """
        arrivals = [other.participation.arrival for other in self.state.roster]
        means = sorted(arrival.mean for arrival in arrivals if arrival.samples)
        most = USUAL_RATIO_MAX * median_low(means) if means else math.inf
        if member.participation.arrival.samples:
            return min(member.participation.arrival.mean, most)
        others = min(means[-1], most) if means else 0.0
        steps = self.state.settings.sync_period_steps if self._in_lockstep else 1
        step_s = member.stepping.step_s if member.stepping is not None else 0.0
        assert now >= member.presence.joined_at
        return max(others, min(steps * step_s, now - member.presence.joined_at))

    @property
    def _in_lockstep(self) -> bool:
        return self.state.lockstep and self.state.phase is RunPhase.RUNNING

    def absent(self, now: float) -> dict[str, float]:
        """Learners that were cut off lately and may come back, each with the end of its wait. The
        name "" stands for anybody: after a start of the broker all learners are cut off."""
        lost_s, until_by_name = self.state.config.liveness.lost, dict[str, float]()
        for member in self.state.roster:
            if member.connected or member.presence.left or member.given_up:
                continue
            absence = Patience(member.presence.heard_at, self._round_s(member, now), lost_s)
            if now < (until := absence.until(now)):
                until_by_name[member.name] = until
        if self.state.epoch_resumed and now < self.started_at + lost_s:
            until_by_name[""] = self.started_at + lost_s
        return until_by_name

    # Texts for the operator.

    def _why(self, member: Member, patience: Patience, now: float) -> str:
        rounds, lacks = self._rounds_of(member), self._lacks(member)
        what = f"it has not adopted the newest version of {_fragments(lacks)}"
        if self.state.phase is RunPhase.ENDING and rounds:
            what = f"it has not contributed to the last round of {_fragments(rounds)}"
        elif self.state.phase is RunPhase.RUNNING:
            what = f"it has not contributed to the round of {_fragments(rounds)}"
        elif not lacks:
            what = "it has the final model and has not left"
        waited_s = format_duration_s(now - patience.begun_at)
        moved = format_bytes(sum(way.moved_bytes for way in patience.ways))
        usual_s = format_duration_s(patience.round_s)
        return f"{what} in {waited_s}, {moved} came; its rounds usually take {usual_s}"

    def outcome(self) -> str:
        """Sentence on who has the final model, as far as the broker knows."""
        have = [member for member in self.state.roster if not self._lacks(member)]
        others = [
            f"{member.name} ({_fragments(self._lacks(member))})"
            for member in self.state.roster
            if self._lacks(member)
            and (member.name in self._took_part or member.presence.heard_at >= self.ending_since)
        ]
        if others:
            count = f"{len(have)} of {counted(len(have) + len(others), 'learner')}"
            return (
                f"the run has ended, {count} have the final model; not adopted: {_listed(others)}"
            )
        if have:
            # A broker before this one knew others; this one only knows those that came back.
            which = "that came back " if self.state.epoch_resumed else ""
            return f"the run has ended, all learners {which}have the final model"
        return "the run has ended, no learner has come for the final model"


def _up(member: Member) -> Flow:
    return member.uplink.flow


def _down(member: Member) -> Flow:
    return member.copies.flow


def _fragments(indices: list[int]) -> str:
    return ("fragment " if len(indices) == 1 else "fragments ") + _listed(list(map(str, indices)))


def _listed(texts: list[str]) -> str:
    more = len(texts) - NAMED_MAX
    return ", ".join(texts[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
