"""Pushes on their way: announcements, chunks, refusals, and questions for what is missing.

A push counts whatever its base: it waits in the inbox of its fragment until a round takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from narrows.broker.records import Contribution, finite
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import FragmentRound, InboxPush, State
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, fault
from narrows.proto.flow.transfer import Transfer
from narrows.proto.timing import REPAIR_S

LIVES_MAX: Final = 8
"""Incarnations of one name whose pushes of a fragment wait at a time: a learner that starts again
and again while no round is merged must not fill the memory."""


@dataclass(eq=False)
class Pushes:
    """The inboxes: one waiting push per incarnation and fragment."""

    state: State
    ask_at: float = 0.0
    """When `ask` looks at the pushes on their way again, at most REPAIR_S after it last did: a new
    push has so long to come by itself. To look at each event would cost too much with a thousand
    learners."""

    # Announcements and chunks.

    def announced(self, member: Member, push: msg.Push, now: float) -> None:
        """Takes an announcement in. The same one comes again after every Welcome,
        and every 10 s without an outcome."""
        if self.state.closing:
            return  # Its learner cannot know yet that the last rounds are over.
        try:
            self._check_takes_pushes(push.fragment)
            if push.base > self.state.heads[push.fragment]:
                raise fault(
                    "base of a push",
                    expected=f"at most {self.state.heads[push.fragment]}",
                    got=str(push.base),
                    remedy="fetch and adopt the newest version",
                )
            if push.push_id <= member.refused[push.fragment]:
                # The learner was away when its push was refused, and would wait for ever.
                raise fault(
                    "a push that was refused before",
                    expected=f"an id above {member.refused[push.fragment]}",
                    got=str(push.push_id),
                    remedy="count its tokens and steps as unpushed, and push them under the next "
                    "id",
                )
            waiting = self._place(member, push.fragment, push.push_id, now)
        except RemoteProtocolError as error:
            self.refuse(member, push.fragment, push.push_id, error)
            return
        # Else the push counts already, or was announced before.
        if waiting is not None and waiting.announcement is None:
            waiting.announcement = push
            waiting.announced_at = now
            member.moved_at = now

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if a chunk of this life's epoch is wanted; asked before its payload is decoded.
        Constant time."""
        member = self.state.members.of(header.incarnation)
        if member is None or not member.is_connected:
            return False
        member.heard_at = member.data_at = now
        # After a refusal the rest of the push may be on its way still: its learner knows, or will.
        if self.state.closing or header.push_id <= member.refused[header.fragment]:
            return False
        try:
            self._check_takes_pushes(header.fragment)
            self._check_coding(header)
            waiting = self._place(member, header.fragment, header.push_id, now)
        except RemoteProtocolError as error:
            self.refuse(member, header.fragment, header.push_id, error)
            return False
        if waiting is None or not waiting.transfer.add(header.chunk, now):
            return False
        self.ask_at = min(self.ask_at, waiting.transfer.deadline(now))
        member.moved_at = now
        return True

    def checked(self, header: msg.Header) -> bool:
        """A wanted chunk decodes and is finite. True if its push is now a contribution."""
        waiting = self.state.rounds[header.fragment].inbox.get(header.incarnation)
        if waiting is None or waiting.push_id != header.push_id:
            return False
        waiting.checked += 1
        return waiting.is_here

    def failed(self, header: msg.Header, error: NarrowsError) -> None:
        """A wanted chunk does not decode, or is not finite: the push is refused."""
        member = self.state.members.of(header.incarnation)
        if member is not None and header.push_id > member.refused[header.fragment]:
            self.refuse(member, header.fragment, header.push_id, error)

    def _check_takes_pushes(self, fragment: int) -> None:
        """Raises RemoteProtocolError if no push of a fragment can be taken now."""
        if not self.state.is_open:
            raise fault(
                "a push before version 0",
                expected="one after it",
                got="a run that has not begun",
                remedy="wait for a Welcome with role adopt",
            )
        if self.state.phase is msg.Phase.ENDED:
            raise fault(
                "a push after the last round",
                expected="none",
                got=f"one of fragment {fragment}",
                remedy="adopt the final model and leave",
            )
        if fragment >= len(self.state.rounds):
            raise fault(
                "fragment of a push",
                expected=f"0 to {len(self.state.rounds) - 1}",
                got=str(fragment),
                remedy="cut the model into the fragments that Welcome tells",
            )

    def _check_coding(self, header: msg.Header) -> None:
        """Raises RemoteProtocolError for a chunk that is not cut or coded as Welcome told."""
        codec = self.state.settings.push_codec
        chunks = self.state.push_chunks[header.fragment]
        if header.codec != codec or header.chunk >= chunks:
            raise fault(
                "chunk of a push",
                expected=f"chunk 0 to {chunks - 1} with codec {codec}",
                got=f"chunk {header.chunk} with codec {header.codec}",
                remedy="encode pushes as the settings in Welcome say",
                code=ErrorCode.BAD_CHUNK,
            )

    # The inbox.

    def _place(self, member: Member, fragment: int, push_id: int, now: float) -> InboxPush | None:
        """The place of a push in the inbox, made if need be. None: it counts already, or a newer
        push has displaced it. Raises RemoteProtocolError if it cannot be taken."""
        slot = self.state.rounds[fragment]
        waiting = slot.inbox.get(member.incarnation)
        if waiting is not None and push_id == waiting.push_id:
            return waiting
        if waiting is not None and push_id < waiting.push_id:
            return None
        # A learner that has dialled again sends its waiting push once more. If it is merged, or
        # taken by the running round, that needs no refusal: the publication names its pushes.
        newest = slot.newest_id(member.incarnation)
        if push_id <= newest:
            return None
        if newest == 0:
            self._check_not_in_rows(member, fragment, push_id)
        if waiting is not None:
            self._drop(waiting)  # Its tokens are in the new push: the learner took it back.
        else:
            self._check_room(member, slot)
        waiting = InboxPush(
            member.name,
            member.incarnation,
            fragment,
            push_id,
            Transfer(self.state.push_chunks[fragment], now, unasked=True),
        )
        slot.inbox[member.incarnation] = waiting
        return waiting

    def _check_not_in_rows(self, member: Member, fragment: int, push_id: int) -> None:
        """Raises RemoteProtocolError for a push that was merged so long ago, and so many others
        since then, that no STATE can tell its learner."""
        if push_id <= self.state.newest_push(member.incarnation, fragment):
            raise fault(
                "a push that was merged long ago",
                expected="one that no version holds",
                got=str(push_id),
                remedy="adopt the newest version: it holds this push; then push what is new",
            )

    def _check_room(self, member: Member, slot: FragmentRound) -> None:
        """Raises RemoteProtocolError if too many lives of one learner have a push waiting."""
        if sum(each.learner == member.name for each in slot.inbox.values()) >= LIVES_MAX:
            raise fault(
                "too many pushes wait for the next round",
                expected=f"those of {LIVES_MAX} incarnations of {member.name}",
                got="one more",
                remedy="count its tokens and steps as unpushed, and push them when a round has "
                "been merged",
                code=ErrorCode.OVER_CAPACITY,
            )

    def _drop(self, waiting: InboxPush) -> None:
        del self.state.rounds[waiting.fragment].inbox[waiting.incarnation]
        self.state.effects.append(ev.Drop(waiting.fragment, waiting.incarnation, waiting.push_id))

    def disconnect(self, member: Member) -> None:
        """Ends a learner's connection, and drops its pushes that are not complete: a learner that
        comes back sends them again."""
        self.state.members.disconnect(member)
        for slot in self.state.rounds:
            waiting = slot.inbox.get(member.incarnation)
            if waiting is not None and not waiting.is_here:
                self._drop(waiting)

    def take(self, fragment: int) -> tuple[Contribution, ...]:
        """Takes the contributions that are here out of the inbox, for a round; in the order of
        sums."""
        slot = self.state.rounds[fragment]
        taken: list[Contribution] = []
        # A publication that names more than LEARNERS_MAX pushes could be read by nobody.
        for waiting in slot.here()[: msg.LEARNERS_MAX]:
            push = waiting.announcement
            assert push is not None, "a push that is here was announced"
            del slot.inbox[waiting.incarnation]
            taken.append(
                Contribution(
                    learner=waiting.learner,
                    incarnation=waiting.incarnation,
                    push_id=push.push_id,
                    base=push.base,
                    tokens=push.tokens,
                    steps=push.steps,
                    codec=self.state.settings.push_codec,
                    chunk_elements=self.state.settings.chunk_elements,
                    loss=finite(push.loss),
                )
            )
        return tuple(sorted(taken, key=lambda each: each.order))

    def refuse(self, member: Member, fragment: int, push_id: int, error: NarrowsError) -> None:
        """Refuses a push once: its later chunks are dropped silently."""
        if fragment < len(self.state.rounds):
            waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
            if waiting is not None and waiting.push_id == push_id:
                self._drop(waiting)
        member.refused[fragment] = max(push_id, member.refused[fragment])
        if member.is_connected:
            self.state.refuse(member.peer, error, fragment=fragment, push_id=push_id)

    # Repair.

    def ask(self, now: float) -> None:
        """Asks learners that are heard for the missing chunks of the pushes that they announced."""
        if now < self.ask_at:
            return
        self.ask_at = now + REPAIR_S  # A learner that was silent may be heard again.
        for slot in self.state.rounds:
            for waiting in slot.inbox.values():
                member = self.state.members.of(waiting.incarnation)
                if member is None or not waiting.is_coming or not member.is_heard(now):
                    continue
                window = self.state.settings.window_messages
                if missing := waiting.transfer.ask(now, member.heard_at, window):
                    self.state.send(
                        member,
                        msg.Fetch(msg.DataKind.PUSH, waiting.fragment, 0, waiting.push_id, missing),
                    )
                self.ask_at = min(self.ask_at, waiting.transfer.deadline(now))
