"""Pushes on their way: announcements, chunks, refusals, and questions for what is missing.

A push counts whatever its base: it waits in the inbox of its fragment until a round takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.stages import RunPhase
from narrows.broker.syncer.state import State, Waiting, fault
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
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
        fragment, push_id = push.fragment, push.push_id
        if self.state.phase is RunPhase.CLOSING:
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
            self._refuse(member, fragment, push_id, error)
            return
        if waiting is not None and waiting.push is None:
            waiting.push, waiting.announced_at = push, now
            member.moved_at = now

    def chunk(self, header: msg.Header, now: float) -> bool:
        """True if the chunk is wanted; asked before its payload is decoded. Constant time."""
        state, member, fragment = (
            self.state,
            self.state.members.of(header.incarnation),
            header.fragment,
        )
        if member is None or not member.is_connected or header.epoch != state.epoch:
            return False
        member.heard_at = member.data_at = now
        is_refused = header.push_id <= member.refused.get(fragment, 0)
        if is_refused or state.phase is RunPhase.CLOSING:
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
            waiting = self._place(member, fragment, header.push_id, now)
        except RemoteProtocolError as error:
            self._refuse(member, fragment, header.push_id, error)
            return False
        if waiting is None or not waiting.transfer.add(header.chunk, now):
            return False
        member.moved_at = now
        return True

    def checked(self, header: msg.Header) -> bool:
        """A wanted chunk decodes and is finite. True if its push is now a contribution."""
        waiting = self.state.rounds[header.fragment].inbox.get(header.incarnation)
        if waiting is None or waiting.push_id != header.push_id:
            return False
        waiting.checked.add(header.chunk)
        return waiting.is_here

    def failed(self, header: msg.Header, error: NarrowsError) -> None:
        """A wanted chunk does not decode, or is not finite: the push is refused."""
        member = self.state.members.of(header.incarnation)
        fragment, push_id = header.fragment, header.push_id
        if member is None or push_id <= member.refused.get(fragment, 0):
            return
        if not self._is_merged(member, fragment, push_id):
            self._refuse(member, fragment, push_id, error)

    def _check_open(self, fragment: int) -> None:
        """Raises RemoteProtocolError if no push of a fragment can be taken now."""
        state, count = self.state, self.state.settings.fragments
        if not state.is_open:
            got, remedy = "a run that has not begun", "wait for a Welcome with role adopt"
            raise fault("a push before version 0", "one after it", got, remedy)
        if state.phase is RunPhase.ENDED:
            got, remedy = f"one of fragment {fragment}", "adopt the final model and leave"
            raise fault("a push after the last round", "none", got, remedy)
        if fragment >= count:
            remedy = "cut the model into the fragments that Welcome tells"
            raise fault("fragment of a push", f"0 to {count - 1}", str(fragment), remedy)

    # The inbox.

    def _place(self, member: Member, fragment: int, push_id: int, now: float) -> Waiting | None:
        """The place of a push in the inbox, made if need be; None if it counts already or another
        one has displaced it. Raises RemoteProtocolError if too many wait."""
        inbox = self.state.rounds[fragment].inbox
        waiting = inbox.get(member.incarnation)
        if waiting is not None and waiting.push_id == push_id:
            return waiting
        if self._is_merged(member, fragment, push_id) or (waiting and push_id < waiting.push_id):
            return None
        if waiting is not None:
            self._drop(waiting)  # Its tokens are in the new push: the learner took it back.
        elif sum(each.learner == member.name for each in inbox.values()) >= LIVES_MAX:
            raise fault(
                "too many pushes wait for the next round",
                f"those of {LIVES_MAX} incarnations of {member.name}", "one more",
                "count its tokens and steps as unpushed, and push them when a round has been "
                "merged", ErrorCode.OVER_CAPACITY,
            )  # fmt: skip
        transfer = Transfer(self.state.push_chunks[fragment], now, unasked=True)
        waiting = Waiting(member.name, member.incarnation, fragment, push_id, transfer)
        inbox[member.incarnation] = waiting
        return waiting

    def _is_merged(self, member: Member, fragment: int, push_id: int) -> bool:
        """True for ids up to the newest one that is merged, or that the running round has taken.

        A learner that has dialled again sends what waits once more. It needs no refusal: the
        publication tells whose pushes it holds.
        """
        newest = self.state.merged.get((member.incarnation, fragment), 0)
        taken = self.state.rounds[fragment].taken
        ids = [facts.push_id for facts in taken if facts.incarnation == member.incarnation]
        return push_id <= max([newest, *ids])

    def _drop(self, waiting: Waiting) -> None:
        del self.state.rounds[waiting.fragment].inbox[waiting.incarnation]
        dropped = ev.Drop(waiting.fragment, waiting.incarnation, waiting.push_id)
        self.state.effects.append(dropped)

    def drop_incomplete(self, incarnation: str) -> None:
        """Its process or its connection is gone. A learner that comes back sends them again."""
        for round_ in self.state.rounds:
            waiting = round_.inbox.get(incarnation)
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

    def refuse_taken(self, fragment: int, error: NarrowsError) -> None:
        """The merge of a round failed: its learners count the steps as unpushed again."""
        for facts in self.state.rounds[fragment].taken:
            self.state.effects.append(ev.Drop(fragment, facts.incarnation, facts.push_id))
            if member := self.state.members.of(facts.incarnation):
                self._refuse(member, fragment, facts.push_id, error)

    def _refuse(self, member: Member, fragment: int, push_id: int, error: NarrowsError) -> None:
        """Refuses a push once: its later chunks are dropped silently."""
        if fragment < len(self.state.rounds):
            waiting = self.state.rounds[fragment].inbox.get(member.incarnation)
            if waiting is not None and waiting.push_id == push_id:
                self._drop(waiting)
        member.refused[fragment] = max(push_id, member.refused.get(fragment, 0))
        if member.is_connected:
            self.state.refuse(member.peer, error, fragment=fragment, push_id=push_id)

    # Repair.

    def _asked(self, now: float) -> Iterator[tuple[Waiting, Member]]:
        """Announced pushes on their way whose learner can be asked."""
        for waiting in self.state.coming():
            member = self.state.members.of(waiting.incarnation)
            if member is not None and member.is_heard(now):
                yield waiting, member

    def ask(self, now: float) -> None:
        """Asks for the missing chunks of announced pushes."""
        window = self.state.settings.window_messages
        for waiting, member in self._asked(now):
            if chunks := waiting.transfer.ask(now, member.heard_at, window):
                kind, push_id = msg.DataKind.PUSH, waiting.push_id
                fetch = msg.Fetch(kind, waiting.fragment, 0, push_id, chunks)
                self.state.send(member, fetch)

    def deadline(self, now: float) -> float:
        """When `ask` may have something to ask for."""
        deadlines = (waiting.transfer.deadline(now) for waiting, _ in self._asked(now))
        return min(deadlines, default=float("inf"))
