"""What learners send into open rounds: announcements, chunks, declines; and its repair. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import data_path
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC, codecs_of
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Arrival
from narrows.proto.timing import BROKER_REPAIR_S, REPAIR_MAX_S


@dataclass
class Intake:
    """Checks everything that claims to be part of a contribution."""

    state: RunState

    def push(self, member: Member, message: msg.Push, now: float) -> list[ev.Effect]:
        """An announced push: its chunks come on the uplink, or have come already."""
        if self._is_settled(member, message.fragment, message.push_id):
            return self._decline_refused(member, message)
        try:
            round_ = self._round(member, message.fragment, message.base_version)
            effects = self._supersede(round_, member, message.push_id)
            self._expect(member, now)
            push = round_.push_of(member.name, member.incarnation, message.push_id, now)
            round_.announce(push, message)
        except RemoteProtocolError as error:
            return self.refuse(member, error, message.fragment, message.push_id)
        self._settle(round_, member, now)
        return effects + data_path.announced(self.state, member, now)

    def _decline_refused(self, member: Member, message: msg.Push) -> list[ev.Effect]:
        """A push that was refused, perhaps for a chunk that came before it, will not come; who
        announces it again may have missed the refusal."""
        if message.push_id not in member.refused_pushes or member.peer is None:
            return []
        told = msg.Decline(
            message.fragment, message.base_version, message.attempt, "its push was refused"
        )
        error = RemoteProtocolError(
            ErrorCode.NO_ROUND, f"push {message.push_id} of {member.name} was refused before"
        )
        refuse = refusal(error, fragment=message.fragment, push_id=message.push_id)
        return [*self.decline(member, told), ev.Send(member.peer, refuse)]

    def decline(self, member: Member, message: msg.Decline) -> list[ev.Effect]:
        """The learner will not contribute; about a round that is gone this means nothing."""
        round_ = self.state.rounds.get(message.fragment)
        told = (message.base_version, message.attempt)
        if round_ is None or round_.merging or (round_.base_version, round_.attempt) != told:
            return []
        if member.name not in round_.contributed:
            round_.declined[member.name] = message.reason
        handles = round_.drop_push(member.name)
        return [ev.Drop(handles)] if handles else []

    def arrived(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """A chunk before its payload is decoded: only what fits an open round is."""
        member = self.state.roster.get(header.learner)
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        if member is None or member.incarnation != header.incarnation:
            # There is no session to answer to: an old process, or one that never joined.
            self.state.tally.refuse(ErrorCode.OLD_INCARNATION)
            return drop
        data_path.arrived(member)
        if header.stream < len(member.received):
            member.received[header.stream] = header.position
            member.up.move(member.received, now)
        push = header.kind is msg.DataKind.PUSH
        if push and self._is_settled(member, header.fragment, header.push_id):
            return drop
        try:
            self._check(header)
            effects, is_wanted = self._enter(member, header, now)
        except RemoteProtocolError as error:
            if not push and error.code is ErrorCode.WRONG_EPOCH:
                return drop  # On its way since before a restart; it says nothing about now.
            return drop + self.refuse(member, error, header.fragment, header.push_id)
        return effects + ([ev.Unpack(header, handle)] if is_wanted else drop)

    def _enter(
        self, member: Member, header: msg.Header, now: float
    ) -> tuple[list[ev.Effect], bool]:
        """Notes that a push makes progress, and whether the chunk is to be decoded; raises if no
        open round takes it."""
        if header.kind is not msg.DataKind.PUSH:
            return [], True
        round_ = self._round(member, header.fragment, header.version)
        effects = self._supersede(round_, member, header.push_id)
        self._expect(member, now)
        push = round_.push_of(member.name, member.incarnation, header.push_id, now)
        is_wanted = push.wants(header)
        if is_wanted:
            push.progress_at, push.asks = now, 0
        return effects, is_wanted

    def unpacked(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """A decoded chunk of a push."""
        member = self.state.roster.get(header.learner)
        round_ = self.state.rounds.get(header.fragment)
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        push = round_.incoming.get(header.learner) if round_ else None
        ours = (header.incarnation, header.push_id)
        if (
            member is None
            or round_ is None
            or round_.base_version != header.version
            or push is None
            or (push.incarnation, push.push_id) != ours
        ):
            return drop  # The round went on while the payload was decoded.
        try:
            arrival = round_.add_chunk(push, header, handle, now)
        except RemoteProtocolError as error:
            return drop + self.refuse(member, error, header.fragment, header.push_id)
        self._settle(round_, member, now)
        return drop if arrival is Arrival.DUPLICATE else []

    def damaged(
        self, header: msg.Header, handle: int, error: RemoteProtocolError
    ) -> list[ev.Effect]:
        """The payload does not decode: the push is refused whole."""
        member = self.state.roster.get(header.learner)
        effects: list[ev.Effect] = [ev.Drop((handle,))]
        if member is None or member.incarnation != header.incarnation:
            return effects
        return effects + self.refuse(member, error, header.fragment, header.push_id)

    def refuse(
        self, member: Member, error: NarrowsError, fragment: int, push_id: int
    ) -> list[ev.Effect]:
        """Tells the learner once per push why it is not merged; what has arrived of it goes."""
        if push_id and push_id in member.refused_pushes:
            return []
        member.refused_pushes.append(push_id)
        member.refused += 1
        self.state.tally.refuse(error.code)
        effects: list[ev.Effect] = [
            ev.LogFate(
                "refused", member.name, member.incarnation, fragment, push_id, str(error.code)
            )
        ]
        round_ = self.state.rounds.get(fragment)
        push = round_.incoming.get(member.name) if round_ else None
        if round_ and push and (push.incarnation, push.push_id) == (member.incarnation, push_id):
            effects.append(ev.Drop(round_.drop_push(member.name)))
            # Nobody waits for it; while the round is open, it may answer again.
            round_.declined[member.name] = f"its push was refused: {error.code}"
        if member.peer is not None:
            refuse = refusal(error, fragment=fragment, push_id=push_id)
            effects.append(ev.Send(member.peer, refuse))
        return effects

    def _is_settled(self, member: Member, fragment: int, push_id: int) -> bool:
        """True for a push whose outcome is known: a late copy of it changes nothing.

        A refusal would make the learner believe that its merged push was lost.
        """
        if push_id in member.refused_pushes:
            return True
        round_ = self.state.rounds.get(fragment)
        if round_ is not None and round_.has(member.incarnation, push_id, member.name):
            return True
        return fragment < len(member.last_merged) and 0 < push_id <= member.last_merged[fragment]

    def repair(self, now: float) -> list[ev.Effect]:
        """Asks for the chunks that are missing from announced pushes without progress."""
        effects: list[ev.Effect] = []
        for index in sorted(self.state.rounds):
            round_ = self.state.rounds[index]
            for name in sorted(round_.incoming):
                push = round_.incoming[name]
                member = self.state.roster.get(name)
                quiet_s = now - max(push.progress_at, push.asked_at)
                patience_s = min(BROKER_REPAIR_S * 2.0**push.asks, REPAIR_MAX_S)
                if member is None or member.peer is None or quiet_s < patience_s or push.here:
                    continue
                push.asked_at, push.asks = now, push.asks + 1
                missing = msg.Missing(
                    msg.DataKind.PUSH,
                    index,
                    round_.base_version,
                    push.push_id,
                    push.assembly.missing(),
                )
                effects.append(ev.Send(member.peer, missing))
        return effects

    def _check(self, header: msg.Header) -> None:
        """Raises RemoteProtocolError unless a chunk belongs to this run, epoch and codec."""
        state, who = self.state, f"chunk of {header.learner}"
        if header.run_id != state.run_id:
            raise RemoteProtocolError(
                ErrorCode.WRONG_RUN, who, expected=state.run_id, got=header.run_id
            )
        if header.epoch != state.epoch:
            raise RemoteProtocolError(
                ErrorCode.WRONG_EPOCH, who, expected=str(state.epoch), got=str(header.epoch)
            )
        if header.fragment >= len(state.table):
            raise RemoteProtocolError(
                ErrorCode.BAD_FRAGMENT,
                who,
                expected=f"fragment below {len(state.table)}",
                got=str(header.fragment),
            )
        founding = header.kind is msg.DataKind.FOUND
        if not founding and header.kind is not msg.DataKind.PUSH:
            raise RemoteProtocolError(
                ErrorCode.BAD_MESSAGE, who, expected="PUSH or FOUND", got=header.kind.name
            )
        codecs = codecs_of(STATE_CODEC if founding else state.settings.push_codec)
        if header.codec not in codecs:
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_CODEC, who, expected=" or ".join(sorted(codecs)), got=header.codec
            )
        elements = state.table[header.fragment].elements
        if header.offset + header.count > elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                who,
                expected=f"elements within 0..{elements} of fragment {header.fragment}",
                got=f"{header.offset}+{header.count}",
            )

    def _round(self, member: Member, fragment: int, base_version: int) -> Round:
        """The open round that a push belongs to, or the reason why there is none."""
        state, who = self.state, f"push of {member.name}"
        if fragment >= len(state.heads):
            raise RemoteProtocolError(
                ErrorCode.BAD_FRAGMENT,
                who,
                expected=f"fragment below {len(state.heads)}",
                got=str(fragment),
            )
        version = state.heads[fragment].version
        if base_version != version:
            stale = base_version < version
            raise RemoteProtocolError(
                ErrorCode.STALE_BASE if stale else ErrorCode.FUTURE_BASE,
                f"{who} for fragment {fragment}",
                expected=f"base version {version}",
                got=str(base_version),
                remedy="the round was over when the push was complete" if stale else "",
            )
        round_ = state.rounds.get(fragment)
        if round_ is None or round_.merging:
            raise RemoteProtocolError(
                ErrorCode.NO_ROUND,
                f"{who} for fragment {fragment}",
                expected="a round that takes contributions",
                got="the round is being merged" if round_ else "no open round",
            )
        return round_

    def _supersede(self, round_: Round, member: Member, push_id: int) -> list[ev.Effect]:
        handles = round_.supersede(member.name, member.incarnation, push_id)
        return [ev.Drop(handles)] if handles else []

    def _settle(self, round_: Round, member: Member, now: float) -> None:
        push = round_.incoming.get(member.name)
        if push is not None and round_.settle_if_complete(push, now):
            if member.name in round_.expected and not push.declined_before:
                # Who evaluated or was not here would seem to take as long for every push.
                member.arrival.add(now - round_.opened_at)
            member.missed_running, member.missed_named = 0, False
            member.contributed_at = now
            if not self._is_sending(member):
                member.up.settle()

    def _expect(self, member: Member, now: float) -> None:
        """Bytes of a push are awaited: the time until they come tells the learner's rate."""
        member.up.expect(now, anew=not self._is_sending(member))

    def _is_sending(self, member: Member) -> bool:
        return any(member.name in round_.incoming for round_ in self.state.rounds.values())
