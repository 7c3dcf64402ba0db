"""Who joins: Hello, contested names, founding of version 0, Welcome. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker import events as ev
from narrows.broker.members import Liveness, Member, check_name
from narrows.broker.state import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.assembly import Assembly
from narrows.proto.codecs import codec_names
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.fragments import build_table
from narrows.proto.layout import check_layout, differences
from narrows.proto.limits import PROTOCOL


@dataclass
class _Contest:
    """A newcomer claims a live name; the holder is probed until `until`."""

    newcomer: ev.Received
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
        contested = (
            holder is not None
            and holder.connected
            and holder.incarnation != hello.incarnation
            and hello.name not in self._contests
        )
        if not contested:
            if hello.name in self._contests and holder and holder.incarnation != hello.incarnation:
                return []  # The probe is under way; the newcomer asks again by itself.
            return self._admit(event, hello, now)
        assert holder is not None and holder.peer is not None
        self._nonce += 1
        until = now + self.state.config.liveness.probe
        self._contests[hello.name] = _Contest(event, self._nonce, until)
        return [ev.Send(holder.peer, msg.Probe(self._nonce))]

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
            contest = self._contests[name]
            if now >= contest.until:
                del self._contests[name]
                hello = contest.newcomer.message
                assert isinstance(hello, msg.Hello)
                effects += self._admit(contest.newcomer, hello, now)
        return effects

    def next_deadline(self) -> float | None:
        return min((contest.until for contest in self._contests.values()), default=None)

    def lost(self, member: Member, now: float) -> list[ev.Effect]:
        """If the founder is gone before version 0 exists, the next learner is asked."""
        if self.state.phase is not msg.Phase.FOUNDING or member.name != self.founder:
            return []
        self.founder = ""
        handles = self._drop_founding()
        effects: list[ev.Effect] = [ev.Drop(handles)] if handles else []
        for other in self.state.roster.connected():
            return effects + self._welcome(other, now)
        return effects

    def founding_chunk(self, member: Member, header: msg.Header, handle: int) -> list[ev.Effect]:
        """A decoded chunk of the founder's parameters."""
        if self.state.phase is not msg.Phase.FOUNDING or member.name != self.founder:
            return [ev.Drop((handle,))]
        assembly = self._founding[header.fragment]
        if assembly.complete:
            return [ev.Drop((handle,))]
        arrival = assembly.add(header.offset, header.count, header.payload_digest, handle)
        effects: list[ev.Effect] = [ev.Drop((handle,))] if arrival.value == "duplicate" else []
        if all(self._founding[index].complete for index in sorted(self._founding)):
            handles = tuple(self._founding[index].handles for index in sorted(self._founding))
            effects.append(ev.Found(self.state.layout, handles))
        return effects

    def missing_founding(self) -> list[ev.Effect]:
        """Asks the founder again for what has not arrived."""
        founder = self.state.roster.get(self.founder) if self.founder else None
        if self.state.phase is not msg.Phase.FOUNDING or founder is None or founder.peer is None:
            return []
        return [
            ev.Send(founder.peer, msg.Missing(msg.DataKind.FOUND, index, 0, 0, assembly.missing()))
            for index, assembly in sorted(self._founding.items())
            if not assembly.complete
        ]

    def founding_failed(self, reason: str, now: float) -> list[ev.Effect]:
        """Version 0 cannot be made: the founder (or the file) is refused."""
        founder = self.state.roster.get(self.founder)
        self.founder = ""
        self._drop_founding()
        self.state.layout, self.state.table = (), ()
        effects: list[ev.Effect] = [ev.Note("error", f"version 0 cannot be made: {reason}")]
        if founder is not None and founder.peer is not None:
            error = RemoteProtocolError(ErrorCode.LAYOUT_MISMATCH, reason)
            effects += [ev.Send(founder.peer, refusal(error)), ev.Forget(founder.name)]
            self.state.roster.disconnect(founder)
        for other in self.state.roster.connected():
            error = RemoteProtocolError(ErrorCode.UNKNOWN_SESSION, "founding starts again")
            assert other.peer is not None
            effects.append(ev.Send(other.peer, refusal(error)))
        return effects

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
                remedy="start every learner with the same model code and configuration",
            )

    def _admit(self, event: ev.Received, hello: msg.Hello, now: float) -> list[ev.Effect]:
        state = self.state
        before = state.roster.get(hello.name)
        same = before is not None and before.incarnation == hello.incarnation
        if not state.layout:
            try:
                state.table = build_table(hello.layout, state.settings.fragment_count)
            except NarrowsError as error:
                state.tally.refuse(error.code)
                return [ev.Send(event.peer, refusal(error)), ev.Note("error", str(error))]
            state.layout, state.frozen_digest = hello.layout, hello.frozen_digest
        count = len(state.table)
        if same and before is not None:
            member = before
            state.roster.disconnect(member)
            member.peer, member.address = event.peer, event.address
            member.state, member.heard_at = Liveness.LIVE, now
        else:
            member = Member(
                hello.name, hello.incarnation, event.peer, event.address, now, now,
                held=[-1] * count, last_merged=[0] * count,
            )
        effects: list[ev.Effect] = []
        if not same and before is not None:
            effects += self.lost(before, now)
        # The newcomer's sockets and its streams start from nothing.
        member.received = [0] * state.settings.streams
        try:
            state.roster.admit(member)
        except RemoteProtocolError as error:
            return [ev.Send(event.peer, refusal(error))]
        state.clock.join(member.incarnation, hello.tokens, now)
        verb = "rejoined" if before is not None else "joined"
        effects.append(ev.Admit(member.name, member.incarnation))
        effects.append(ev.Note("info", f"{member.name} {verb} from {member.address or '?'}"))
        return effects + self._welcome(member, now)

    def _welcome(self, member: Member, now: float) -> list[ev.Effect]:
        state = self.state
        assert member.peer is not None
        if state.phase is not msg.Phase.FOUNDING:
            return [ev.Send(member.peer, state.welcome(member, msg.Role.ADOPT, now))]
        if self.from_file:
            welcome = ev.Send(member.peer, state.welcome(member, msg.Role.WAIT, now))
            if self.founder:
                return [welcome]
            self.founder = "(file)"
            return [welcome, ev.Found(state.layout, None)]
        if self.founder and self.founder != member.name:
            return [ev.Send(member.peer, state.welcome(member, msg.Role.WAIT, now))]
        if not self.founder:
            self.founder = member.name
        self._drop_founding()
        self._founding = {f.index: Assembly(f.elements) for f in state.table}
        note = ev.Note("info", f"{member.name} sends version 0")
        return [ev.Send(member.peer, state.welcome(member, msg.Role.FOUND, now)), note]

    def _drop_founding(self) -> tuple[int, ...]:
        handles = [h for index in sorted(self._founding) for h in self._founding[index].handles]
        self._founding = {}
        return tuple(handles)
