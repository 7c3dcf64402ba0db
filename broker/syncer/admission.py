"""Admission of learners: Hello, contested names, Welcome. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.syncer import data_path, serving
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.forgetting import forget_at, forget_gone, forget_older
from narrows.broker.syncer.founding import Founding
from narrows.broker.syncer.layouts import LayoutDesk, other_layout
from narrows.broker.syncer.lost_history import LostHistory
from narrows.broker.syncer.member import Copies, Member, Presence, Uplink
from narrows.broker.syncer.participation import Participation
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.roster import check_name
from narrows.broker.syncer.run import RunState, drop_pushes, refusal
from narrows.proto import messages as msg
from narrows.proto.codec import codecs_of, setting_names
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.limits import PROTOCOL


@dataclass
class _Contest:
    """A newcomer claims a live name; the holder is probed until `until`."""

    newcomer: ev.Received
    hello: msg.Hello
    nonce: int
    until: float


@dataclass
class Admission:
    """Admits learners."""

    state: RunState
    founding: Founding
    _contests: dict[str, _Contest] = field(default_factory=dict[str, _Contest])
    _nonce: int = 0

    def __post_init__(self) -> None:
        self._lost_history = LostHistory(self.state)
        self.layouts = LayoutDesk(self.state)

    def hello(self, event: ev.Received, now: float) -> list[ev.Effect]:
        """A Hello: refused with the reason, contested, or admitted."""
        hello = event.message
        assert isinstance(hello, msg.Hello)
        # Checked before the name is contested: a Hello that can never be admitted disturbs nobody.
        try:
            self._check(hello, event.peer)
        except NarrowsError as error:
            return self._refused(event, error)
        holder = self.state.roster.get(hello.name)
        # The same incarnation is the same process: it reconnects and need not contest its own name.
        if holder is None or not holder.connected or holder.incarnation == hello.incarnation:
            return self._admit(event, hello, now) + self._probe_again(hello, event.peer, now)
        return self._contest(event, hello, holder, now)

    def _refused(self, event: ev.Received, error: NarrowsError) -> list[ev.Effect]:
        if error.code is ErrorCode.LAYOUT_MISMATCH:
            self.layouts.refused(event.peer)
        self.state.tally.refuse(error.code)
        note = ev.Note(
            "warning",
            f"{event.address or 'a peer'} refused: {error}",
            about=f"{error.code} {event.address}",
        )
        return [ev.Send(event.peer, refusal(error)), note]

    def _contest(
        self, event: ev.Received, hello: msg.Hello, holder: Member, now: float
    ) -> list[ev.Effect]:
        """Probes the live holder of a name that a newcomer claims."""
        assert holder.connected and holder.incarnation != hello.incarnation
        contest = self._contests.get(hello.name)
        if contest is not None:
            # The newcomer repeats its Hello, perhaps on a new connection; a third one waits.
            if contest.hello.incarnation == hello.incarnation:
                contest.newcomer = event
            return []
        # The nonce tells the answer to this probe from a late answer to an earlier one.
        self._nonce += 1
        until = now + self.state.config.liveness.probe
        self._contests[hello.name] = _Contest(event, hello, self._nonce, until)
        return [ev.Send(holder.peer, msg.Probe(self._nonce))]

    def _probe_again(self, hello: msg.Hello, peer: ev.Peer, now: float) -> list[ev.Effect]:
        """Asks the holder of a contested name again, on the connection on which it came back."""
        contest = self._contests.get(hello.name)
        if contest is None:
            return []
        # The first probe may have gone to a dead connection: the holder gets the full time again.
        contest.until = now + self.state.config.liveness.probe
        return [ev.Send(peer, msg.Probe(contest.nonce))]

    def alive(self, member: Member, nonce: int, now: float) -> list[ev.Effect]:
        """The holder of a contested name answered: the newcomer is refused."""
        contest = self._contests.get(member.name)
        if contest is None or contest.nonce != nonce:
            return []
        del self._contests[member.name]
        error = RemoteProtocolError(
            ErrorCode.NAME_IN_USE,
            f"the name {member.name!r} is held by a live learner",
            expected="a name of its own for every learner",
            got=f"{member.name!r}, held from {member.presence.address or 'unknown address'} "
            f"for {now - member.presence.joined_at:.0f} s",
            remedy="choose another --name, or stop the other process first",
        )
        self.state.tally.refuse(error.code)
        newcomer = contest.newcomer
        note = ev.Note(
            "warning",
            f"{newcomer.address or 'a peer'} refused: {error}",
            about=f"{error.code} {newcomer.address}",
        )
        return [ev.Send(newcomer.peer, refusal(error)), note]

    def expire(self, now: float) -> list[ev.Effect]:
        """Gives a contested name to the newcomer if its holder did not answer in time.

        It also forgets learners that are gone for long.
        """
        effects: list[ev.Effect] = []
        # In name order, so that effects do not depend on the order of arrival.
        for name in sorted(self._contests):
            if now >= self._contests[name].until:
                effects += self._award(name, now)
        return effects + forget_gone(self.state, now)

    def _award(self, name: str, now: float) -> list[ev.Effect]:
        """Gives a contested name to the newcomer, if there is one."""
        contest = self._contests.pop(name, None)
        if contest is None:
            return []
        try:
            # Its connection may speak for another name by now, which it joined under meanwhile.
            self._check(contest.hello, contest.newcomer.peer)
        except NarrowsError as error:
            return self._refused(contest.newcomer, error)
        return self._admit(contest.newcomer, contest.hello, now)

    def next_deadline(self) -> float | None:
        times = [contest.until for contest in self._contests.values()]
        return min([*times, *forget_at(self.state)], default=None)

    def lost(self, member: Member, now: float) -> list[ev.Effect]:
        """A learner is gone: gives its name to a newcomer and asks the next founder."""
        effects = self._award(member.name, now)
        holder = self.state.roster.get(member.name)
        if self.state.phase is not RunPhase.FOUNDING or (holder is not None and holder.connected):
            return effects
        # While the run is founded, someone must send version 0: the next in name order is asked.
        effects += self.founding.lost(member)
        if (founder := self.founding.next_founder()) is None:
            return effects
        return [*effects, *self._begin_founding(founder), *self._welcome(founder, now)]

    def _begin_founding(self, member: Member) -> list[ev.Effect]:
        """Learners that came before the founder with another layout may ask for its own."""
        effects = self.founding.begin(member)
        for effect in effects:
            if isinstance(effect, ev.Send):
                self.layouts.refused(effect.peer)
        return effects

    def layout_part(self, member: Member, part: msg.LayoutPart, now: float) -> list[ev.Effect]:
        """A part of the founder's layout came; after the last one the founder is welcomed."""
        before = self.state.layout
        effects = self.founding.take_part(member, part, now)
        is_known = bool(self.state.layout) and not before
        return effects + self._welcome(member, now) if is_known else effects

    def welcome_all(self, now: float) -> list[ev.Effect]:
        """Sends the state that the group shares to everybody: it has changed."""
        effects: list[ev.Effect] = []
        for member in self.state.roster.connected():
            effects += self._welcome(member, now)
        return effects

    def _check(self, hello: msg.Hello, peer: ev.Peer) -> None:
        """Raises RemoteProtocolError for a Hello that can never be admitted."""
        state = self.state
        if hello.protocol != PROTOCOL:
            raise RemoteProtocolError(
                ErrorCode.PROTOCOL_VERSION,
                f"protocol of {hello.name!r}",
                expected=str(PROTOCOL),
                got=str(hello.protocol),
                remedy="install the same narrows version on the broker and on every learner",
            )
        check_name(hello.name, hello.incarnation)
        speaker = state.roster.by_peer(peer)
        if speaker is not None and speaker.name != hello.name:
            raise RemoteProtocolError(
                ErrorCode.BAD_NAME,
                "one connection speaks for one learner",
                expected=speaker.name,
                got=hello.name,
                remedy="open a connection for each learner",
            )
        if state.roster.is_superseded(hello.name, hello.incarnation):
            raise RemoteProtocolError(
                ErrorCode.SUPERSEDED,
                f"a newer process has taken the name {hello.name!r}",
                remedy="stop this process, or start it again under another --name",
            )
        if hello.run_id and hello.run_id != state.run_id:
            raise RemoteProtocolError(
                ErrorCode.WRONG_RUN,
                f"{hello.name!r} belongs to another run",
                expected=state.run_id,
                got=hello.run_id,
                remedy="start the learner again to join this run with this run's model",
            )
        if hello.epoch[0] > state.epoch[0]:
            raise _higher_term(hello, state)
        settings = state.settings
        needed = codecs_of(settings.push_codec) | codecs_of(settings.publish_codec)
        # Checked now, not at the first push: a learner would train for nothing until then.
        missing = needed - set(hello.codecs)
        if missing:
            shared = ", ".join(
                name for name in setting_names() if codecs_of(name) <= set(hello.codecs)
            )
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_CODEC,
                f"{hello.name!r} lacks a codec of this run",
                expected=", ".join(sorted(missing)),
                got=", ".join(hello.codecs[:16]),
                remedy="install the same narrows version on the broker and on every learner, or "
                f"set codec.push and codec.publish to what all have: {shared or 'none'}",
            )
        if state.fingerprint not in ("", hello.fingerprint):
            raise other_layout(state, hello.name, hello.fingerprint)

    def _admit(self, event: ev.Received, hello: msg.Hello, now: float) -> list[ev.Effect]:
        state = self.state
        count = state.settings.fragment_count
        before = state.roster.get(hello.name)
        is_same = before is not None and before.incarnation == hello.incarnation
        if before is not None and is_same and before.connected and before.peer == event.peer:
            return self._welcome(before, now)  # A Hello that was repeated.
        # After a restart of the broker the journal still knows what this process had merged. The
        # learner learns from it whether the residual of an open push counts.
        last_merged = [
            state.merged_pushes.get((hello.name, hello.incarnation, index), (0, 0))[0]
            for index in range(count)
        ]
        member = Member(
            hello.name,
            hello.incarnation,
            Presence(event.peer, event.address, heard_at=now, joined_at=now, holder=event.holder),
            Copies([-1] * count, adopted_at=[None] * count, is_new=hello.epoch == (0, 0, 0)),
            Uplink([0] * state.settings.streams),
            Participation(last_merged, contributed_at=now),
            fingerprint=hello.fingerprint,
        )
        try:
            if before is not None and is_same and len(before.copies.held) == count:
                state.roster.move(before, event.peer, event.address, now, event.holder)
                data_path.begin(before)
                return self._enter(before, hello, "is back", now)
            state.roster.admit(member)
        except RemoteProtocolError as error:
            return self._refused(event, error)
        effects = forget_older(state, member) + drop_pushes(state, member.name)
        if before is not None:
            effects += self.founding.taken_over(member.name)
        return effects + self._enter(member, hello, "rejoined" if before else "joined", now)

    def _enter(self, member: Member, hello: msg.Hello, verb: str, now: float) -> list[ev.Effect]:
        self.state.clock.expect(member.name, now)
        self.state.shares.admit(member, self.state.roster.connected(), now)
        return [
            ev.Admit(member.name, member.incarnation),
            ev.Note(
                "info",
                f"{member.name} {verb} from {member.presence.address or '?'}",
                about=f"joined {member.name}",
            ),
            ev.LogFate("joined", member.name, member.incarnation, reason=verb),
            *self._lost_history.look(hello),
            *self._begin_founding(member),
            *self._welcome(member, now),
        ]

    def _welcome(self, member: Member, now: float) -> list[ev.Effect]:
        state = self.state
        if asked := self.founding.ask(member, now):
            return asked
        role, effects = msg.Role.ADOPT, list[ev.Effect]()
        if state.phase is RunPhase.FOUNDING:
            role, effects = self.founding.role(member, now)
        else:
            serving.begin_adoption(member, now)
        return [ev.Send(member.peer, state.welcome(member, role, now)), *effects]


def _higher_term(hello: msg.Hello, state: RunState) -> RemoteProtocolError:
    """The refusal of a learner that names a higher term, with what it means for who shows it."""
    name, remedy = repr(hello.name), "this broker was replaced: stop it"
    message = f"{name} has followed a broker of a higher term"
    if not state.is_proven(hello):
        message = f"{name} names a higher term and does not prove that it has met its broker"
        remedy = "start the learner again, then it follows this broker; if a broker of that term"
        remedy += " does serve this run, stop this one"
    return RemoteProtocolError(
        ErrorCode.WRONG_EPOCH,
        message,
        expected=f"term {state.epoch[0]} at most",
        got=f"term {hello.epoch[0]}",
        remedy=remedy,
    )
