"""Pushes on their way: announcements, chunks, refusals, and questions for what is missing.

A push counts whatever its base: it waits in the inbox of its fragment until a round takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.stages import RunPhase
from narrows.broker.syncer.state import State, Waiting, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.flow.transfer import Transfer

LIVES_MAX: Final = 8
"""Incarnations of one name whose pushes of a fragment wait at a time: who starts again and again
while no round is merged must not fill the memory."""


@dataclass(eq=False)
class Pushes:
    """The inboxes: one waiting push per incarnation and fragment."""

    state: State

    # What comes in.

    def announced(self, member: Member, push: msg.Push, now: float) -> None:
        """Takes an announcement in. The same one comes again after every Welcome."""
        if self.state.phase is RunPhase.CLOSING:
            return  # Its learner cannot know yet that the last rounds are over.
        fragment, push_id = push.fragment, push.push_id
        if (error := self._push_fault(member, push)) is not None:
            self._refuse(member, fragment, push_id, error)
            return
        waiting = self._place(member, fragment, push_id, now)
        if waiting is not None and waiting.push is None:
            waiting.push, waiting.announced_at = push, now
            member.moved_at = now
            self._settle(waiting)

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if the chunk is wanted; asked before its payload is decoded. Constant time."""
        member = self.state.members.of(header.learner)
        if member is None or not member.is_connected or header.epoch != self.state.epoch:
            return False
        member.heard_at = member.data_at = now
        is_refused = header.push_id <= member.refused.get(header.fragment, 0)
        if is_refused or self.state.phase is RunPhase.CLOSING:
            return False
        if (error := self._chunk_fault(header)) is not None:
            self._refuse(member, header.fragment, header.push_id, error)
            return False
        waiting = self._place(member, header.fragment, header.push_id, now)
        if waiting is None or not waiting.transfer.add(header.chunk, now):
            return False
        member.moved_at = now
        return True

    def checked(self, header: msg.Header) -> bool:
        """A wanted chunk decodes and is finite. True if its push is now a contribution."""
        waiting = self._waiting(header)
        if waiting is None or not waiting.unchecked[header.chunk]:
            return False
        waiting.unchecked[header.chunk] = 0
        waiting.unchecked_count -= 1
        self._settle(waiting)
        return waiting.is_here

    def failed(self, header: msg.Header, error: NarrowsError) -> None:
        """A chunk does not decode, or is not finite: the push is refused."""
        member = self.state.members.of(header.learner)
        if member is None or not self.state.is_open or header.fragment >= len(self.state.heads):
            return
        is_refused = header.push_id <= member.refused.get(header.fragment, 0)
        if not is_refused and not self._is_merged(member, header.fragment, header.push_id):
            self._refuse(member, header.fragment, header.push_id, error)

    # The inbox.

    def _waiting(self, header: msg.Header) -> Waiting | None:
        if header.fragment >= len(self.state.rounds):
            return None
        waiting = self.state.rounds[header.fragment].inbox.get(header.learner)
        return waiting if waiting and waiting.push_id == header.push_id else None

    def _place(self, member: Member, fragment: int, push_id: int, now: float) -> Waiting | None:
        """The place of a push in the inbox, made if need be; None if it counts already or another
        one has displaced it."""
        state, inbox = self.state, self.state.rounds[fragment].inbox
        waiting = inbox.get(member.incarnation)
        if waiting is not None and waiting.push_id == push_id:
            return waiting
        if self._is_merged(member, fragment, push_id) or (waiting and push_id < waiting.push_id):
            return None
        lives = sum(each.learner == member.name for each in inbox.values())
        if waiting is None and lives >= LIVES_MAX:
            self._refuse(member, fragment, push_id, _too_many(member.name))
            return None
        if waiting is not None:
            self._drop(waiting)  # Its tokens are in the new push: the learner took it back.
        chunks = state.push_chunks[fragment]
        transfer = Transfer(chunks, now, unasked=True)
        unchecked = bytearray(b"\x01") * chunks
        waiting = Waiting(
            member.name, member.incarnation, fragment, push_id, transfer, unchecked, chunks
        )
        inbox[member.incarnation] = state.arriving[member.incarnation, fragment] = waiting
        return waiting

    def _is_merged(self, member: Member, fragment: int, push_id: int) -> bool:
        """True for ids up to the newest one that is merged, or that the running round has taken.

        A learner that has dialled again sends what waits once more. It needs no refusal: the
        publication tells whose pushes it holds.
        """
        newest = self.state.merged.get((member.incarnation, fragment), 0)
        for facts in self.state.rounds[fragment].taken:
            if facts.incarnation == member.incarnation:
                newest = max(newest, facts.push_id)
        return push_id <= newest

    def _settle(self, waiting: Waiting) -> None:
        if waiting.is_here:
            self.state.arriving.pop((waiting.incarnation, waiting.fragment), None)

    def _drop(self, waiting: Waiting) -> None:
        del self.state.rounds[waiting.fragment].inbox[waiting.incarnation]
        self.state.arriving.pop((waiting.incarnation, waiting.fragment), None)
        dropped = ev.Drop(waiting.fragment, waiting.incarnation, waiting.push_id)
        self.state.effects.append(dropped)

    def drop_incomplete(self, incarnation: str) -> None:
        """Its process or its connection is gone. A learner that comes back sends them again."""
        gone = [each for key, each in self.state.arriving.items() if key[0] == incarnation]
        for waiting in gone:
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

    # Refusals.

    def _fault(self, fragment: int) -> NarrowsError | None:
        """Why no push of a fragment can be taken now."""
        state, count = self.state, self.state.settings.fragments
        if not state.is_open:
            got, remedy = "a run that has not begun", "wait for a Welcome with role adopt"
            return fault("a push before version 0", "one after it", got, remedy)
        if state.phase is RunPhase.ENDED:
            got, remedy = f"one of fragment {fragment}", "adopt the final model and leave"
            return fault("a push after the last round", "none", got, remedy)
        if fragment >= count:
            remedy = "cut the model into the fragments that Welcome tells"
            return fault("fragment of a push", f"0 to {count - 1}", str(fragment), remedy)
        return None

    def _push_fault(self, member: Member, push: msg.Push) -> NarrowsError | None:
        """The fault of an announcement; None: it is fine."""
        if (error := self._fault(push.fragment)) is not None:
            return error
        head = self.state.heads[push.fragment]
        if push.base > head:
            remedy = "fetch and adopt the newest version"
            return fault("base of a push", f"at most {head}", str(push.base), remedy)
        if push.push_id <= (newest := member.refused.get(push.fragment, 0)):
            # The learner was away when its push was refused, and would wait for ever.
            remedy = "count its tokens and steps as unpushed, and push them under the next id"
            what = "a push that was refused before"
            return fault(what, f"an id above {newest}", str(push.push_id), remedy)
        return None

    def _chunk_fault(self, header: msg.Header) -> NarrowsError | None:
        """The fault of a chunk's header; None: it is fine."""
        if (error := self._fault(header.fragment)) is not None:
            return error
        codec, chunks = self.state.settings.push_codec, self.state.push_chunks[header.fragment]
        remedy, code = "encode pushes as the settings in Welcome say", ErrorCode.BAD_CHUNK
        if header.codec != codec:
            return fault("codec of a push", codec, header.codec, remedy, code)
        if header.chunk >= chunks:
            return fault("chunk of a push", f"0 to {chunks - 1}", str(header.chunk), remedy, code)
        return None

    def _refuse(self, member: Member, fragment: int, push_id: int, error: NarrowsError) -> None:
        """Refuses a push once: its later chunks are dropped silently."""
        if fragment < len(self.state.rounds):
            waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
            if waiting is not None and waiting.push_id == push_id:
                self._drop(waiting)
        member.refused[fragment] = max(push_id, member.refused.get(fragment, 0))
        if member.is_connected:
            self.state.refuse(
                member.peer, error, name=member.name, fragment=fragment, push_id=push_id
            )

    def refuse_taken(self, fragment: int, error: NarrowsError) -> None:
        """The merge of a round failed: its learners count the steps as unpushed again."""
        for facts in self.state.rounds[fragment].taken:
            self.state.effects.append(ev.Drop(fragment, facts.incarnation, facts.push_id))
            member = self.state.members.of(facts.incarnation)
            if member is not None:
                self._refuse(member, fragment, facts.push_id, error)

    # Repair.

    def ask(self, now: float) -> None:
        """Asks for the missing chunks of announced pushes."""
        state, window = self.state, self.state.settings.window_messages
        for (incarnation, fragment), waiting in state.arriving.items():
            member = state.members.of(incarnation)
            if waiting.push is None or member is None or not member.is_heard(now):
                continue
            if chunks := waiting.transfer.ask(now, member.heard_at, window):
                fetch = msg.Fetch(msg.DataKind.PUSH, fragment, 0, waiting.push_id, chunks)
                state.send(member, fetch)

    def deadline(self, now: float) -> float:
        """When `ask` may have something to ask for."""
        members = self.state.members
        return min(
            (
                each.transfer.deadline(now)
                for each in self.state.arriving.values()
                if each.push and (member := members.of(each.incarnation)) and member.is_heard(now)
            ),
            default=float("inf"),
        )


def _too_many(name: str) -> NarrowsError:
    return fault(
        "too many pushes wait for the next round",
        f"those of {LIVES_MAX} incarnations of {name}",
        "one more",
        "count its tokens and steps as unpushed, and push them when a round has been merged",
        ErrorCode.OVER_CAPACITY,
    )
