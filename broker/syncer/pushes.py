"""Intake of pushes into open rounds: announcements, chunks, declines, and repair. [pure]

This module alone writes `Member.uplink`.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.broker.syncer import data_path
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.decoding import Decoding
from narrows.broker.syncer.layouts import refuse_stray
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run import RunState, refusal
from narrows.broker.syncer.suspicion import check_merged
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC, codecs_of
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Arrival, chunks_max
from narrows.proto.timing import BROKER_REPAIR_S, REPAIR_MAX_S


@dataclass
class Intake:
    """Checks every message and chunk that claims to be part of a contribution."""

    state: RunState

    def __post_init__(self) -> None:
        self._decoding = Decoding(self.state.config.merge.rounds_in_flight)

    def push(self, member: Member, message: msg.Push, now: float) -> list[ev.Effect]:
        """Takes an announcement in: its chunks come on the uplink, or have come already."""
        # Announcements may be repeated, so late copies are normal.
        if self._is_settled(member, message.fragment, message.push_id):
            return self._decline_refused(member, message)
        try:
            round_ = self._round(member, message.fragment, message.base_version)
            effects = self._supersede(round_, member, message.push_id)
            self._expect(member, now)
            incoming = round_.incoming_of(member.name, member.incarnation, message.push_id, now)
            is_first = incoming.announced is None
            round_.announce(incoming, message)
        except RemoteProtocolError as error:
            return self.refuse(member, error, message.fragment, message.push_id)
        if is_first:
            incoming.seconds = self._worked_s(member, message.fragment, now)
            self.state.pace.pushed(member, message.fragment, message.steps, now)
            self.state.pace.settle(self.state.roster.ready())
        self._settle(round_, member, now)
        return effects + data_path.announced(self.state, member, now)

    def _worked_s(self, member: Member, fragment: int, now: float) -> float:
        """Seconds since a learner adopted a fragment, or since the fragment was published."""
        adopted_at = member.copies.adopted_at[fragment]
        return self.state.clock.age(fragment, now) if adopted_at is None else now - adopted_at

    def _decline_refused(self, member: Member, message: msg.Push) -> list[ev.Effect]:
        """Counts an announcement of a refused push as a decline, and repeats the refusal.

        It may have been refused for a chunk that came before; the learner may have missed that.
        """
        if message.push_id not in member.uplink.refused_pushes or member.presence.peer is None:
            return []
        decline = msg.Decline(
            message.fragment, message.base_version, message.attempt, "its push was refused"
        )
        error = RemoteProtocolError(
            ErrorCode.NO_ROUND, f"push {message.push_id} of {member.name} was refused before"
        )
        refuse = refusal(error, fragment=message.fragment, push_id=message.push_id)
        return [*self.decline(member, decline), ev.Send(member.peer, refuse)]

    def decline(self, member: Member, message: msg.Decline) -> list[ev.Effect]:
        """Notes that a learner will not contribute; for a round that is gone it means nothing."""
        round_ = self.state.rounds.get(message.fragment)
        wanted = (message.base_version, message.attempt)
        if round_ is None or round_.merging or (round_.base_version, round_.attempt) != wanted:
            return []
        if member.name not in round_.contributed:
            round_.declined[member.name] = message.reason
        handles = round_.drop_incoming(member.name)
        return [ev.Drop(handles)] if handles else []

    def arrived(
        self, header: msg.Header, handle: int, size_bytes: int, now: float
    ) -> list[ev.Effect]:
        """Takes the header of a chunk in; the payload is decoded only if it fits an open round."""
        member = self.state.roster.get(header.learner)
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        if member is None or member.incarnation != header.incarnation:
            # There is no session to answer to: an old process, or one that never joined.
            self.state.tally.refuse(ErrorCode.OLD_INCARNATION)
            return drop
        # Even a chunk that is refused below proves that the data path works.
        data_path.arrived(member)
        if header.stream < len(member.uplink.positions):
            member.uplink.positions[header.stream] = header.position
        is_push = header.kind is msg.DataKind.PUSH
        if header.kind is msg.DataKind.FOUND and header.epoch == self.state.epoch:
            if member.name != self.state.founder:
                return drop + refuse_stray(self.state, member, "a chunk of version 0")
        if is_push and self._is_settled(member, header.fragment, header.push_id):
            return drop
        try:
            # The header is checked in full before anybody pays for decoding.
            self._check(header)
            effects, is_wanted = self._enter(member, header, size_bytes, now)
            if is_push and is_wanted:
                self._decoding.begin(header)
        except RemoteProtocolError as error:
            if not is_push and error.code is ErrorCode.WRONG_EPOCH:
                return drop  # It was under way before a restart and says nothing about now.
            return drop + self.refuse(member, error, header.fragment, header.push_id)
        return effects + ([ev.Unpack(header, handle)] if is_wanted else drop)

    def _enter(
        self, member: Member, header: msg.Header, size_bytes: int, now: float
    ) -> tuple[list[ev.Effect], bool]:
        """Notes progress of a push; returns effects, and whether to decode the chunk.

        Raises RemoteProtocolError if no open round takes it.
        """
        if header.kind is not msg.DataKind.PUSH:
            return [], self._founds(header)
        round_ = self._round(member, header.fragment, header.version)
        effects = self._supersede(round_, member, header.push_id)
        is_sending = self._is_sending(member)
        incoming = round_.incoming_of(member.name, member.incarnation, header.push_id, now)
        is_wanted = incoming.wants(header)
        if is_wanted:
            incoming.progress_at, incoming.asks = now, 0
            # The position that a header claims proves nothing, nor does a copy of what is here.
            member.uplink.flow.add(size_bytes, now)
        member.uplink.flow.expect(now, anew=not is_sending)
        return effects, is_wanted

    def _founds(self, header: msg.Header) -> bool:
        """Whether to decode a chunk of version 0. One that is dropped is asked for again."""
        if self.state.heads:
            return False  # Version 0 stands.
        elements = self.state.table[header.fragment].elements
        most = chunks_max(elements, self.state.least_chunk_elements)
        return self._decoding.begin_founding(header, most)

    def decoded(self, header: msg.Header) -> None:
        """The shell is done with a chunk that it was to decode, of a push or of version 0."""
        self._decoding.done(header)

    def unpacked(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """Takes a decoded chunk of a push in."""
        member = self.state.roster.get(header.learner)
        round_ = self.state.rounds.get(header.fragment)
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        incoming = round_.incoming.get(header.learner) if round_ else None
        ours = (header.incarnation, header.push_id)
        if (
            member is None
            or round_ is None
            or round_.base_version != header.version
            or incoming is None
            or (incoming.incarnation, incoming.push_id) != ours
        ):
            return drop  # The round went on while the payload was decoded.
        try:
            arrival = round_.add_chunk(incoming, header, handle, now)
        except RemoteProtocolError as error:
            return drop + self.refuse(member, error, header.fragment, header.push_id)
        self._settle(round_, member, now)
        return drop if arrival is Arrival.DUPLICATE else []

    def damaged(
        self, header: msg.Header, handle: int, error: RemoteProtocolError
    ) -> list[ev.Effect]:
        """Refuses a whole push for a payload that does not decode."""
        member = self.state.roster.get(header.learner)
        effects: list[ev.Effect] = [ev.Drop((handle,))]
        if member is None or member.incarnation != header.incarnation:
            return effects
        return effects + self.refuse(member, error, header.fragment, header.push_id)

    def refuse(
        self, member: Member, error: NarrowsError, fragment: int, push_id: int
    ) -> list[ev.Effect]:
        """Refuses a push once, with the reason; drops all that has arrived of it."""
        if push_id and push_id in member.uplink.refused_pushes:
            return []
        # Remembered, so that the push's other chunks do not get a Refuse each.
        member.uplink.refused_pushes.append(push_id)
        member.uplink.refused += 1
        self.state.tally.refuse(error.code)
        effects: list[ev.Effect] = [
            ev.LogFate(
                "refused", member.name, member.incarnation, fragment, push_id, str(error.code)
            )
        ]
        round_ = self.state.rounds.get(fragment)
        incoming = round_.incoming.get(member.name) if round_ else None
        own = (member.incarnation, push_id)
        if round_ and incoming and (incoming.incarnation, incoming.push_id) == own:
            effects.append(ev.Drop(round_.drop_incoming(member.name)))
            # Nobody waits for it; while the round is open, it may answer again.
            round_.declined[member.name] = f"its push was refused: {error.code}"
        if member.presence.peer is not None:
            refuse = refusal(error, fragment=fragment, push_id=push_id)
            effects.append(ev.Send(member.peer, refuse))
        return effects

    def _is_settled(self, member: Member, fragment: int, push_id: int) -> bool:
        """True for a push whose fate is known: a late copy of it changes nothing.

        A refusal would make the learner believe that its merged push was lost.
        """
        if push_id in member.uplink.refused_pushes:
            return True
        round_ = self.state.rounds.get(fragment)
        if round_ is not None and round_.has(member.incarnation, push_id, member.name):
            return True
        return (
            fragment < len(member.participation.last_merged)
            and 0 < push_id <= member.participation.last_merged[fragment]
        )

    def repair(self, now: float) -> list[ev.Effect]:
        """Asks for the chunks that are missing from announced pushes without progress."""
        effects: list[ev.Effect] = []
        for index in sorted(self.state.rounds):
            round_ = self.state.rounds[index]
            for name in sorted(round_.incoming):
                incoming = round_.incoming[name]
                member = self.state.roster.get(name)
                quiet_s = now - max(incoming.progress_at, incoming.asked_at)
                patience_s = min(BROKER_REPAIR_S * 2.0**incoming.asks, REPAIR_MAX_S)
                if quiet_s < patience_s or incoming.here:
                    continue
                if member is None or member.presence.peer is None:
                    continue
                incoming.asked_at, incoming.asks = now, incoming.asks + 1
                missing = msg.Missing(
                    msg.DataKind.PUSH,
                    index,
                    round_.base_version,
                    incoming.push_id,
                    incoming.assembly.missing(),
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
        """Returns the open round that a push belongs to. Raises RemoteProtocolError if none is."""
        state, who = self.state, f"push of {member.name}"
        check_merged(state, member.name)
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
        assert round_.base_version == version and round_.fragment == fragment
        return round_

    def _supersede(self, round_: Round, member: Member, push_id: int) -> list[ev.Effect]:
        handles = round_.supersede(member.name, member.incarnation, push_id)
        return [ev.Drop(handles)] if handles else []

    def _settle(self, round_: Round, member: Member, now: float) -> None:
        """Turns a complete push into a contribution, and learns the learner's pace from it."""
        assert not round_.merging and now >= round_.opened_at
        incoming = round_.incoming.get(member.name)
        if incoming is not None and round_.settle_if_complete(incoming, now):
            # A learner that evaluated or was not here would seem to take as long for every push.
            is_usual = member.name in round_.expected and not incoming.declined_before
            member.participation.complete(now - round_.opened_at if is_usual else None, now)
            if not self._is_sending(member):
                member.uplink.flow.settle()

    def _expect(self, member: Member, now: float) -> None:
        """Bytes of a push are awaited: the time until they come shows the learner's rate."""
        member.uplink.flow.expect(now, anew=not self._is_sending(member))

    def _is_sending(self, member: Member) -> bool:
        return any(member.name in round_.incoming for round_ in self.state.rounds.values())
