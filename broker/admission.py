"""Who joins: Hello, contested names, founding of version 0, Welcome. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker import events as ev
from narrows.broker.members import Member, check_name
from narrows.broker.state import RunState, drop_pushes, refusal
from narrows.proto import messages as msg
from narrows.proto.assembly import Arrival, Assembly
from narrows.proto.codecs import codec_names
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.fragments import build_table
from narrows.proto.layout import check_layout, differences
from narrows.proto.limits import PROTOCOL

FOUNDING_REPAIR_S = 1.0
"""Missing chunks of version 0 are asked for after so long without progress."""


@dataclass
class _Contest:
    """A newcomer claims a live name; the holder is probed until `until`."""

    newcomer: ev.Received
    hello: msg.Hello
    nonce: int
    until: float


@dataclass
class Admission:
    """Admits learners and has version 0 made."""

    state: RunState
    from_file: bool = False
    """Version 0 comes from a file that the shell holds, not from the first learner."""
    founder: str = ""
    _contests: dict[str, _Contest] = field(default_factory=dict[str, _Contest])
    _founding: dict[int, Assembly] = field(default_factory=dict[int, Assembly])
    _nonce: int = 0
    _layout_of: str = ""
    """Learner that brought the layout."""
    _making: bool = False
    """The shell is making version 0, or it stands."""
    _progress_at: float = 0.0

    def hello(self, event: ev.Received, now: float) -> list[ev.Effect]:
        """A Hello: refused with the reason, contested, or admitted."""
        hello = event.message
        assert isinstance(hello, msg.Hello)
        try:
            self._check(hello)
        except NarrowsError as error:
            self.state.tally.refuse(error.code)
            note = ev.Note("warning", f"{event.address or 'a peer'} refused: {error}")
            return [ev.Send(event.peer, refusal(error)), note]
        holder = self.state.roster.get(hello.name)
        if holder is None or not holder.connected or holder.incarnation == hello.incarnation:
            return self._admit(event, hello, now) + self._probe_again(hello, event.peer, now)
        return self._contest(event, hello, holder, now)

    def _contest(
        self, event: ev.Received, hello: msg.Hello, holder: Member, now: float
    ) -> list[ev.Effect]:
        """Somebody else holds the name: the holder is probed."""
        assert holder.peer is not None
        contest = self._contests.get(hello.name)
        if contest is not None:
            # The newcomer repeats its Hello, perhaps on a new connection; a third one waits.
            if contest.hello.incarnation == hello.incarnation:
                contest.newcomer = event
            return []
        self._nonce += 1
        until = now + self.state.config.liveness.probe
        self._contests[hello.name] = _Contest(event, hello, self._nonce, until)
        return [ev.Send(holder.peer, msg.Probe(self._nonce))]

    def _probe_again(self, hello: msg.Hello, peer: ev.Peer, now: float) -> list[ev.Effect]:
        """The holder of a contested name came back on another connection: ask it there."""
        contest = self._contests.get(hello.name)
        if contest is None:
            return []
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
            got=f"{member.name!r}, held from {member.address or 'unknown address'} "
            f"for {now - member.joined_at:.0f} s",
            remedy="choose another --name, or stop the other process first",
        )
        self.state.tally.refuse(error.code)
        newcomer = contest.newcomer
        note = ev.Note("warning", f"{newcomer.address or 'a peer'} refused: {error}")
        return [ev.Send(newcomer.peer, refusal(error)), note]

    def expire(self, now: float) -> list[ev.Effect]:
        """Gives contested names whose holder did not answer to the newcomer."""
        effects: list[ev.Effect] = []
        for name in sorted(self._contests):
            if now >= self._contests[name].until:
                effects += self._award(name, now)
        return effects

    def _award(self, name: str, now: float) -> list[ev.Effect]:
        """The newcomer gets the name, if there is one."""
        contest = self._contests.pop(name, None)
        return self._admit(contest.newcomer, contest.hello, now) if contest else []

    def next_deadline(self) -> float | None:
        return min((contest.until for contest in self._contests.values()), default=None)

    def lost(self, member: Member, now: float) -> list[ev.Effect]:
        """A learner is gone: whoever claims its name gets it; the next founder is asked."""
        effects = self._award(member.name, now)
        if self.state.phase is not msg.Phase.FOUNDING or member.name != self.founder:
            return effects
        holder = self.state.roster.get(member.name)
        if self._making or (holder is not None and holder.connected):
            return effects  # All is here, or the newcomer has become the founder.
        self.founder = ""
        effects += self._drop_founding()
        for other in self.state.roster.connected():
            return effects + self._welcome(other, now)
        return effects

    def founding_chunk(
        self, member: Member, header: msg.Header, handle: int, now: float
    ) -> list[ev.Effect]:
        """A decoded chunk of the founder's parameters."""
        assembly = self._founding.get(header.fragment)
        if member.name != self.founder or self._making or assembly is None:
            return [ev.Drop((handle,))]
        self._progress_at = now
        try:
            arrival = assembly.add(header.offset, header.count, header.payload_digest, handle)
        except RemoteProtocolError as error:
            return [ev.Drop((handle,)), *self.founding_failed(error)]
        if arrival is Arrival.DUPLICATE:
            return [ev.Drop((handle,))]
        if not all(self._founding[index].complete for index in sorted(self._founding)):
            return []
        self._making = True
        handles = tuple(self._founding[index].handles for index in sorted(self._founding))
        return [ev.Found(self.state.layout, handles)]

    def missing_founding(self, now: float) -> list[ev.Effect]:
        """Asks the founder again for what has not arrived, once nothing arrives any more."""
        founder = self.state.roster.get(self.founder)
        if founder is None or founder.peer is None or self._making:
            return []
        if now < self._progress_at + FOUNDING_REPAIR_S:
            return []
        return [
            ev.Send(founder.peer, msg.Missing(msg.DataKind.FOUND, index, 0, 0, assembly.missing()))
            for index, assembly in sorted(self._founding.items())
            if not assembly.complete
        ]

    def founding_damaged(self, header: msg.Header, error: NarrowsError) -> list[ev.Effect]:
        """A payload of version 0 that does not decode; once all is here it says nothing."""
        member = self.state.roster.get(header.learner)
        wanted = header.fragment in self._founding and not self._making
        if member is None or member.name != self.founder or not wanted:
            return []
        if member.incarnation != header.incarnation:
            return []
        return self.founding_failed(error)

    def founded(self) -> None:
        """Version 0 stands; the shell has let go of the chunks."""
        self._founding = {}

    def founding_failed(self, error: NarrowsError) -> list[ev.Effect]:
        """Version 0 cannot be made: who brought the layout is refused, the others start again."""
        by = self.founder or self._layout_of
        self.founder, self._making, self._layout_of = "", False, ""
        effects = self._drop_founding()
        self.state.layout, self.state.table = (), ()
        effects.append(ev.Note("error", f"version 0 cannot be made: {error}"))
        again = RemoteProtocolError(ErrorCode.UNKNOWN_SESSION, "founding starts again")
        for member in self.state.roster.connected():
            assert member.peer is not None
            member.left = member.name == by
            refuse = refusal(error if member.left else again)
            effects += [ev.Send(member.peer, refuse), ev.Forget(member.name)]
            self.state.roster.disconnect(member)
        return effects

    def held_handles(self) -> tuple[int, ...]:
        """Payloads of version 0 that have arrived."""
        return tuple(h for part in self._founding.values() for h in part.handles)

    def welcome_all(self, now: float) -> list[ev.Effect]:
        """Version 0 is durable: everybody who waits may adopt it."""
        effects: list[ev.Effect] = []
        for member in self.state.roster.connected():
            effects += self._welcome(member, now)
        return effects

    def _check(self, hello: msg.Hello) -> None:
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
        if hello.epoch > state.epoch:
            raise RemoteProtocolError(
                ErrorCode.WRONG_EPOCH,
                f"{hello.name!r} has seen a newer epoch of this run",
                expected=f"at most {state.epoch}",
                got=str(hello.epoch),
                remedy="this broker was replaced: stop it, or restore the newest state directory",
            )
        missing = {state.settings.push_codec, state.settings.publish_codec} - set(hello.codecs)
        if missing:
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_CODEC,
                f"{hello.name!r} lacks a codec of this run",
                expected=", ".join(sorted(missing)),
                got=", ".join(hello.codecs[:16]),
                remedy=f"set [codec] at the broker to one of: {', '.join(codec_names())}",
            )
        check_layout(hello.layout)
        if state.layout:
            self._check_layout(hello)

    def _check_layout(self, hello: msg.Hello) -> None:
        state = self.state
        found = differences(state.layout, hello.layout)
        if not found and hello.frozen_digest != state.frozen_digest:
            found = ["the frozen (not trained) parameters differ"]
        if found:
            raise RemoteProtocolError(
                ErrorCode.LAYOUT_MISMATCH,
                f"the model of {hello.name!r} is not the run's model",
                expected=f"{len(state.layout)} tensors as in the run",
                got="; ".join(found),
                remedy="start every learner with the same model code and configuration; another "
                "model needs a run of its own, that is a broker with another --state-dir",
            )

    def _admit(self, event: ev.Received, hello: msg.Hello, now: float) -> list[ev.Effect]:
        state = self.state
        if not state.layout:
            try:
                state.table = build_table(hello.layout, state.settings.fragment_count)
            except NarrowsError as error:
                state.tally.refuse(error.code)
                return [ev.Send(event.peer, refusal(error)), ev.Note("error", str(error))]
            state.layout, state.frozen_digest = hello.layout, hello.frozen_digest
            self._layout_of = hello.name
        count = len(state.table)
        before = state.roster.get(hello.name)
        if before is not None and before.incarnation == hello.incarnation:
            if before.connected and before.peer == event.peer:
                return self._welcome(before, now)  # A Hello that was repeated.
            if len(before.held) == count:
                state.roster.move(before, event.peer, event.address, now)
                return self._enter(before, hello, "is back", now)
        member = Member(
            hello.name,
            hello.incarnation,
            event.peer,
            event.address,
            now,
            now,
            held=[-1] * count,
            last_merged=[0] * count,
            received=[0] * state.settings.streams,
            contributed_at=now,
        )
        try:
            state.roster.admit(member)
        except RemoteProtocolError as error:
            return [ev.Send(event.peer, refusal(error))]
        effects = drop_pushes(state, member.name)
        if before is not None and member.name == self.founder and not self._making:
            self.founder = ""
            effects += self._drop_founding()
        return effects + self._enter(member, hello, "rejoined" if before else "joined", now)

    def _enter(self, member: Member, hello: msg.Hello, verb: str, now: float) -> list[ev.Effect]:
        self.state.clock.join(member.incarnation, hello.tokens, now)
        return [
            ev.Admit(member.name, member.incarnation),
            ev.Note("info", f"{member.name} {verb} from {member.address or '?'}"),
            *self._welcome(member, now),
        ]

    def _welcome(self, member: Member, now: float) -> list[ev.Effect]:
        state = self.state
        assert member.peer is not None
        role, effects = msg.Role.ADOPT, list[ev.Effect]()
        if state.phase is msg.Phase.FOUNDING:
            role, effects = self._founding_role(member, now)
        return [ev.Send(member.peer, state.welcome(member, role, now)), *effects]

    def _founding_role(self, member: Member, now: float) -> tuple[msg.Role, list[ev.Effect]]:
        """Who sends version 0: the file, or the first learner; the others wait."""
        if self._making or self.state.heads or self.founder not in ("", member.name):
            return msg.Role.WAIT, []
        if self.from_file:
            self._making = True
            return msg.Role.WAIT, [ev.Found(self.state.layout, None)]
        if self.founder:
            return msg.Role.FOUND, []
        self.founder, self._progress_at = member.name, now
        self._founding = {f.index: Assembly(f.elements) for f in self.state.table}
        return msg.Role.FOUND, [ev.Note("info", f"{member.name} sends version 0")]

    def _drop_founding(self) -> list[ev.Effect]:
        handles, self._founding = self.held_handles(), {}
        return [ev.Drop(handles)] if handles else []
