"""Pushes on their way: announcements, chunks, refusals, and questions for what is missing.

A push counts whatever its base: it waits in the inbox of its fragment until a round takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import State, Waiting, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow.transfer import Transfer
from narrows.proto.timing import REPAIR_S

LIVES_MAX: Final = 8
"""Incarnations of one name whose pushes of a fragment wait at a time: who starts again and again
while no round is merged must not fill the memory."""


@dataclass(eq=False)
class Pushes:
    """The inboxes: one waiting push per incarnation and fragment."""

    state: State
    ask_at: float = 0.0
    """When `ask` looks at the pushes on their way again, at most REPAIR_S from now: so long a new
    one has to come by itself. It does not look at each event: a thousand learners have many."""

    # What comes in.

    def announced(self, member: Member, push: msg.Push, now: float) -> None:
        """Takes an announcement in. The same one comes again after every Welcome."""
        fragment, push_id = push.fragment, push.push_id
        if self.state.closing:
            return  # Its learner cannot know yet that the last rounds are over.
        try:
            self._check_open(fragment)
            if push.base > (head := self.state.heads[fragment]):
                remedy = "fetch and adopt the newest version"
                raise fault("base of a push", f"at most {head}", str(push.base), remedy)
            if push_id <= (newest := member.refused.get(fragment, 0)):
                # The learner was away when its push was refused, and would wait for ever.
                remedy = "count its tokens and steps as unpushed, and push them under the next id"
                what = "a push that was refused before"
                raise fault(what, f"an id above {newest}", str(push_id), remedy)
            waiting = self._place(member, fragment, push_id, now)
        except RemoteProtocolError as error:
            self.refuse(member, fragment, push_id, error)
            return
        if waiting is not None and waiting.push is None:
            waiting.push, waiting.announced_at = push, now
            member.moved_at = now

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if the chunk is wanted; asked before its payload is decoded. Constant time."""
        state, fragment, push_id = self.state, header.fragment, header.push_id
        member = state.members.of(header.incarnation)
        if member is None or not member.is_connected or header.epoch != state.epoch:
            return False
        member.heard_at = member.data_at = now
        if push_id <= member.refused.get(fragment, 0) or state.closing:
            return False
        try:
            self._check_open(fragment)
            codec, chunks, code = state.settings.push_codec, state.push_chunks, ErrorCode.BAD_CHUNK
            remedy = "encode pushes as the settings in Welcome say"
            if header.codec != codec:
                raise fault("codec of a push", codec, header.codec, remedy, code)
            if header.chunk >= chunks[fragment]:
                expected = f"0 to {chunks[fragment] - 1}"
                raise fault("chunk of a push", expected, str(header.chunk), remedy, code)
            waiting = self._place(member, fragment, push_id, now)
        except RemoteProtocolError as error:
            self.refuse(member, fragment, push_id, error)
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
        if member and header.push_id > member.refused.get(header.fragment, 0):
            self.refuse(member, header.fragment, header.push_id, error)

    def _check_open(self, fragment: int) -> None:
        """Raises RemoteProtocolError if no push of a fragment can be taken now."""
        state, count = self.state, self.state.settings.fragments
        if not state.is_open:
            got, remedy = "a run that has not begun", "wait for a Welcome with role adopt"
            raise fault("a push before version 0", "one after it", got, remedy)
        if state.phase is msg.Phase.ENDED:
            got, remedy = f"one of fragment {fragment}", "adopt the final model and leave"
            raise fault("a push after the last round", "none", got, remedy)
        if fragment >= count:
            remedy = "cut the model into the fragments that Welcome tells"
            raise fault("fragment of a push", f"0 to {count - 1}", str(fragment), remedy)

    # The inbox.

    def _place(self, member: Member, fragment: int, push_id: int, now: float) -> Waiting | None:
        """The place of a push in the inbox, made if need be; None if it counts already or another
        one has displaced it. Raises RemoteProtocolError if it cannot be taken."""
        round_, who = self.state.rounds[fragment], member.incarnation
        waiting = round_.inbox.get(who)
        if waiting is not None and push_id <= waiting.push_id:
            return waiting if push_id == waiting.push_id else None
        # A learner that has dialled again sends what waits once more. If it is merged, or taken by
        # the running round, that needs no refusal: the publication tells whose pushes it holds.
        newest = round_.merged.get(who, 0)
        if push_id <= max([newest, *(each.push_id for each in round_.taken if each[1] == who)]):
            return None
        if not newest and push_id <= self.state.newest_push(who, fragment):
            # Since then so many others were merged that no STATE can tell it any more.
            remedy = "adopt the newest version: it holds this push; then push what is new"
            what = "a push that was merged long ago"
            raise fault(what, "one that no version holds", str(push_id), remedy)
        if waiting is not None:
            self._drop(waiting)  # Its tokens are in the new push: the learner took it back.
        elif sum(each.learner == member.name for each in round_.inbox.values()) >= LIVES_MAX:
            raise fault(
                "too many pushes wait for the next round",
                f"those of {LIVES_MAX} incarnations of {member.name}", "one more",
                "count its tokens and steps as unpushed, and push them when a round has been "
                "merged", ErrorCode.OVER_CAPACITY,
            )  # fmt: skip
        transfer = Transfer(self.state.push_chunks[fragment], now, unasked=True)
        round_.inbox[who] = waiting = Waiting(member.name, who, fragment, push_id, transfer)
        return waiting

    def _drop(self, waiting: Waiting) -> None:
        del self.state.rounds[waiting.fragment].inbox[waiting.incarnation]
        dropped = ev.Drop(waiting.fragment, waiting.incarnation, waiting.push_id)
        self.state.effects.append(dropped)

    def disconnect(self, member: Member) -> None:
        """Its process or its connection is gone, and what it has not pushed completely is dropped:
        a learner that comes back sends it again."""
        self.state.members.disconnect(member)
        for round_ in self.state.rounds:
            waiting = round_.inbox.get(member.incarnation)
            if waiting is not None and not waiting.is_here:
                self._drop(waiting)

    def take(self, fragment: int) -> tuple[ev.PushFacts, ...]:
        """The contributions that are here, for a round: out of the inbox, in the order of sums."""
        round_, facts = self.state.rounds[fragment], []
        # A publication that names more than LEARNERS_MAX pushes could be read by nobody.
        for waiting in round_.here()[: msg.LEARNERS_MAX]:
            push = waiting.push
            assert push is not None
            del round_.inbox[waiting.incarnation]
            who = waiting.learner, waiting.incarnation
            facts.append(ev.PushFacts(*who, push.push_id, push.base, push.tokens, push.steps))
        return tuple(sorted(facts))

    def refuse(self, member: Member, fragment: int, push_id: int, error: NarrowsError) -> None:
        """Refuses a push once: its later chunks are dropped silently."""
        if fragment < len(self.state.rounds):
            waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
            if waiting is not None and waiting.push_id == push_id:
                self._drop(waiting)
        member.refused[fragment] = max(push_id, member.refused.get(fragment, 0))
        if member.is_connected:
            self.state.refuse(member.peer, error, fragment=fragment, push_id=push_id)

    # Repair.

    def ask(self, now: float) -> None:
        """Asks learners that are heard for the missing chunks of the pushes that they announced."""
        if now < self.ask_at:
            return
        self.ask_at = now + REPAIR_S  # A learner that was silent may be heard again.
        window = self.state.settings.window_messages
        for round_ in self.state.rounds:
            for waiting in filter(lambda each: each.is_coming, round_.inbox.values()):
                member = self.state.members.of(waiting.incarnation)
                if member is None or not member.is_heard(now):
                    continue
                if chunks := waiting.transfer.ask(now, member.heard_at, window):
                    kind, push_id = msg.DataKind.PUSH, waiting.push_id
                    fetch = msg.Fetch(kind, waiting.fragment, 0, push_id, chunks)
                    self.state.send(member, fetch)
                self.ask_at = min(self.ask_at, waiting.transfer.deadline(now))
