"""Whom the end of a run waits for, how long, and who has the final model. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.run import RunState
from narrows.proto import messages as msg
from narrows.proto.flow import STATE_BYTES, Patience, Way, push_bytes_max
from narrows.proto.units import counted, format_bytes, format_duration_s

NAMED_MAX = 10
"""Names in one line of the log."""

LIVES_MAX: Final = 3
"""So many processes of a name are waited for in a phase of the end: the next one would crash as the
ones before it did."""

EndProgress: TypeAlias = tuple[str, float, int]
"""Incarnation, when its last contribution was complete, sum of the versions that it has adopted."""


class _Wait(NamedTuple):
    progress: EndProgress
    patience: Patience


@dataclass
class Waiting:
    """Gives up learners that hold the end up for longer than the rule of `proto.patience` allows.

    The rule is applied to one learner at a time: to its answers to the last rounds, to what it
    lacks of the final versions. Each contribution and each adoption begins its wait anew.
    """

    state: RunState
    started_at: float
    ending_since: float = math.inf
    """Who has been gone since before does not belong to the end."""
    _took_part: set[str] = field(default_factory=set[str])
    """Names that were connected when a phase of the end began."""
    _lives: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Incarnations by name that were connected in this phase of the end."""
    _waits: dict[str, _Wait] = field(default_factory=dict[str, _Wait])
    _until: dict[str, float] = field(default_factory=dict[str, float])

    def begin(self, now: float) -> None:
        """The phase is another one: what was waited for in the one before is over."""
        self.ending_since = min(self.ending_since, now)
        self._took_part |= {member.name for member in self.state.roster.connected()}
        self._lives.clear()
        self._waits.clear()
        for member in self.state.roster:
            member.given_up = False

    def look(self, now: float) -> list[ev.Effect]:
        """Gives up those whose time is over."""
        self._until.clear()
        ending = self.state.phase in (msg.Phase.ENDING, msg.Phase.ENDED)
        if not ending or self.state.phase is not self.state.told_phase:
            return []
        effects: list[ev.Effect] = []
        for member in self.state.roster.connected():
            lives = self._lives.setdefault(member.name, set())
            lives.add(member.incarnation)
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

    def _give_up(self, member: Member, why: str) -> list[ev.Effect]:
        if member.given_up:
            return []
        member.given_up = True
        return [ev.Note("warning", f"the end goes on without {member.name}: {why}")]

    def next_deadline(self) -> float | None:
        return min(self._until.values(), default=None)

    def anybody(self) -> bool:
        """Somebody takes part in the end, or may come back to it."""
        here = any(not member.given_up for member in self.state.roster.connected())
        return here or bool(self._until)

    @property
    def holders_up(self) -> list[str]:
        """The connected learners that are waited for, by name."""
        return [m.name for m in self.state.roster.connected() if m.name in self._until]

    # How long.

    def _wait_for(self, member: Member, now: float) -> _Wait | None:
        """The wait for a connected learner; None if it owes nothing."""
        progress = (member.incarnation, member.contributed_at, sum(member.held))
        wait = self._waits.get(member.name)
        is_new = wait is None or wait.progress != progress
        if is_new:
            member.given_up = False
        if not self._owes(member) and not member.given_up:
            self._waits.pop(member.name, None)
            return None
        if is_new:
            wait = self._waits[member.name] = _Wait(progress, self._patience(member, now))
        return wait

    def _owes(self, member: Member) -> bool:
        if self.state.phase is msg.Phase.ENDED or not member.ready:
            return True
        return bool(self._rounds_of(member))

    def _rounds_of(self, member: Member) -> list[int]:
        """Fragments whose open round waits for this learner."""
        rounds = sorted(self.state.rounds.items())
        return [index for index, round_ in rounds if round_.awaits(member.name)]

    def _lacks(self, member: Member) -> list[int]:
        """Fragments of which the learner has not adopted the newest version."""
        heads = self.state.versions
        return [index for index, held in enumerate(member.held) if held < heads[index]]

    def _patience(self, member: Member, now: float) -> Patience:
        state = self.state
        codec, table = state.settings.push_codec, state.table
        pushes = sum(push_bytes_max(codec, table[i].elements) for i in self._rounds_of(member))
        states = STATE_BYTES * sum(table[index].elements for index in self._lacks(member))
        ways = (Way(member.up, pushes), Way(member.down, states))
        return Patience(now, self._round_s(member, now), state.config.liveness.lost, ways)

    def _keep_to_budget(self, member: Member, patience: Patience) -> None:
        """Rates may have changed: nobody can be faster than it may be now."""
        wan, count = self.state.config.wan, len(self.state.roster.connected())
        down = [rate for rate in (wan.down, wan.total_down / count) if rate]
        for way, bits_per_s in zip(
            patience.ways, (member.up_bits_per_s, min(down, default=0.0)), strict=True
        ):
            way.limit_bytes_per_s = bits_per_s / 8 or math.inf

    def _round_s(self, member: Member, now: float) -> float:
        """The learner's usual round, as measured here; of one that has not contributed yet the
        slowest other's, and at least its step, of which only it can tell: no longer than it is
        here."""
        if member.arrival.samples:
            return member.arrival.mean
        others = max((other.arrival.mean for other in self.state.roster), default=0.0)
        return max(others, min(member.step_s, now - member.joined_at))

    def absent(self, now: float) -> dict[str, float]:
        """Who was cut off lately may come back, by name until when; "": after a start anybody."""
        lost_s, until_by_name = self.state.config.liveness.lost, dict[str, float]()
        for member in self.state.roster:
            if member.connected or member.left or member.given_up:
                continue
            absence = Patience(member.heard_at, self._round_s(member, now), lost_s)
            if now < (until := absence.until(now)):
                until_by_name[member.name] = until
        if self.state.epoch_resumed and now < self.started_at + lost_s:
            until_by_name[""] = self.started_at + lost_s
        return until_by_name

    # What is said.

    def _why(self, member: Member, patience: Patience, now: float) -> str:
        rounds, lacks = self._rounds_of(member), self._lacks(member)
        what = f"it has not adopted the newest version of {_fragments(lacks)}"
        if self.state.phase is msg.Phase.ENDING and rounds:
            what = f"it has not contributed to the last round of {_fragments(rounds)}"
        elif not lacks:
            what = "it has the final model and has not left"
        waited_s = format_duration_s(now - patience.begun_at)
        moved = format_bytes(sum(way.moved_bytes for way in patience.ways))
        usual_s = format_duration_s(patience.round_s)
        return f"{what} in {waited_s}, {moved} came; its rounds usually take {usual_s}"

    def outcome(self) -> str:
        """Who has the final model, as far as it was told, now that nobody is waited for."""
        have = [member for member in self.state.roster if not self._lacks(member)]
        others = [
            f"{member.name} ({_fragments(self._lacks(member))})"
            for member in self.state.roster
            if self._lacks(member)
            and (member.name in self._took_part or member.heard_at >= self.ending_since)
        ]
        if others:
            count = f"{len(have)} of {counted(len(have) + len(others), 'learner')}"
            return (
                f"the run has ended, {count} have the final model; not adopted: {_listed(others)}"
            )
        if have:
            # Of those that a broker before this one knew, only who came back is known.
            which = "that came back " if self.state.epoch_resumed else ""
            return f"the run has ended, all learners {which}have the final model"
        return "the run has ended, no learner has come for the final model"


def _fragments(indices: list[int]) -> str:
    return ("fragment " if len(indices) == 1 else "fragments ") + _listed(list(map(str, indices)))


def _listed(texts: list[str]) -> str:
    more = len(texts) - NAMED_MAX
    return ", ".join(texts[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
