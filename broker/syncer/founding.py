"""Founding of a run: its layout, the learner that sends version 0, its chunks, failures. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.syncer import data_path
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.run import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly, chunks_max
from narrows.proto.fragments import build_table
from narrows.proto.timing import BROKER_REPAIR_S

ASKS_MAX = 3
"""Missing chunks of version 0 are asked for after BROKER_REPAIR_S without progress, then twice as
late each time, up to 2**ASKS_MAX times as late."""


@dataclass
class Founding:
    """Has version 0 made from a file, or from the first learner's parameters."""

    state: RunState
    from_file: bool = False
    """Version 0 comes from a file that the shell holds, not from the first learner."""
    founder: str = ""
    """Learner that sends version 0; empty: none does."""
    _layout_of: str = ""
    """Learner that brought the layout."""
    _assemblies: dict[int, Assembly] = field(default_factory=dict[int, Assembly])
    _making: bool = False
    """The shell is making version 0, or it stands."""
    _progress_at: float = 0.0
    _asked_at: float = 0.0
    _asks: int = 0
    """Requests for missing chunks since the last progress."""

    def take_layout(self, hello: msg.Hello) -> None:
        """Makes the first learner's layout the run's. Raises NarrowsError if that cannot be."""
        state = self.state
        if not state.layout:
            state.table = build_table(hello.layout, state.settings.fragment_count)
            state.layout, state.frozen_digest = hello.layout, hello.frozen_digest
            self._layout_of = hello.name
        assert len(state.table) == state.settings.fragment_count

    def role(self, member: Member, now: float) -> tuple[msg.Role, list[ev.Effect]]:
        """Role of a learner while version 0 is made: the first one sends it, the others wait."""
        if self._making or self.state.heads or self.founder not in ("", member.name):
            return msg.Role.WAIT, []
        if self.from_file:
            self._making = True
            return msg.Role.WAIT, [ev.Found(self.state.layout, None)]
        if self.founder:
            return msg.Role.FOUND, []
        # Only one learner sends it: parts of two learners' parameters would be no model.
        self.founder, self._progress_at = member.name, now
        chunk = self.state.least_chunk_elements
        self._assemblies = {
            f.index: Assembly(f.elements, chunks_max(f.elements, chunk)) for f in self.state.table
        }
        return msg.Role.FOUND, [ev.Note("info", f"{member.name} sends version 0", about="founder")]

    def taken_over(self, name: str) -> list[ev.Effect]:
        """Drops the chunks of a founder whose name another process has now."""
        # Once all chunks are here, version 0 no longer depends on the process that sent it.
        if name != self.founder or self._making:
            return []
        self.founder = ""
        return self._drop()

    def lost(self, member: Member) -> list[ev.Effect]:
        """Lets another learner begin if the founder is gone before all of version 0 was here."""
        effects = self.taken_over(member.name)
        if self.open and not self.state.roster.connected():
            # Nobody is left that brought this model, so the next learner may bring another.
            self._forget_layout()
        return effects

    @property
    def open(self) -> bool:
        """True while version 0 needs a learner that begins with it."""
        return not (self.founder or self._making or self.state.heads)

    def chunk(self, member: Member, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """Takes a decoded chunk of the founder's parameters in."""
        assembly = self._assemblies.get(header.fragment)
        if member.name != self.founder or self._making or assembly is None:
            return [ev.Drop((handle,))]
        self._progress_at, self._asks = now, 0
        try:
            arrival = assembly.add(header.offset, header.count, header.payload_digest, handle)
        except RemoteProtocolError as error:
            if error.code is not ErrorCode.CHUNK_CONFLICT:
                return [ev.Drop((handle,)), *self.failed(error)]
            # The founder has cut the fragment anew, for messages of another size.
            return self._begin_anew(header, handle) + self._make_if_complete()
        if arrival is Arrival.DUPLICATE:
            return [ev.Drop((handle,))]
        return self._make_if_complete()

    def _make_if_complete(self) -> list[ev.Effect]:
        if not all(self._assemblies[index].complete for index in sorted(self._assemblies)):
            return []
        # From here on late copies of chunks and failures of the founder change nothing.
        self._making = True
        handles = tuple(self._assemblies[index].handles for index in sorted(self._assemblies))
        return [ev.Found(self.state.layout, handles)]

    def _begin_anew(self, header: msg.Header, handle: int) -> list[ev.Effect]:
        elements = self.state.table[header.fragment].elements
        before = self._assemblies[header.fragment].handles
        anew = Assembly(elements, chunks_max(elements, self.state.least_chunk_elements))
        anew.add(header.offset, header.count, header.payload_digest, handle)
        self._assemblies[header.fragment] = anew
        return [ev.Drop(before)]

    def cut_finer(self) -> None:
        """Allows more chunks per fragment: messages have become smaller."""
        for assembly in self._assemblies.values():
            assembly.chunks_max = chunks_max(assembly.elements, self.state.least_chunk_elements)

    def missing(self, now: float) -> list[ev.Effect]:
        """Asks the founder again for missing chunks, once nothing arrives any more."""
        founder = self.state.roster.get(self.founder)
        if founder is None or founder.presence.peer is None or self._making:
            return []
        if now < max(self._progress_at, self._asked_at) + BROKER_REPAIR_S * 2.0**self._asks:
            return []
        self._asked_at, self._asks = now, min(self._asks + 1, ASKS_MAX)
        return data_path.silent(self.state, founder, self._progress_at, STATE_CODEC, now) + [
            ev.Send(founder.peer, msg.Missing(msg.DataKind.FOUND, index, 0, 0, assembly.missing()))
            for index, assembly in sorted(self._assemblies.items())
            if not assembly.complete
        ]

    def damaged(self, header: msg.Header, error: NarrowsError) -> list[ev.Effect]:
        """Fails for a payload that does not decode, unless all of version 0 is here already."""
        member = self.state.roster.get(header.learner)
        wanted = header.fragment in self._assemblies and not self._making
        if member is None or member.name != self.founder or not wanted:
            return []
        if member.incarnation != header.incarnation:
            return []
        return self.failed(error)

    def founded(self) -> None:
        """Version 0 stands, and the shell has dropped the chunks."""
        assert self._making and not self.state.heads
        self._assemblies = {}

    def failed(self, error: NarrowsError) -> list[ev.Effect]:
        """Starts again without the learner that brought a version 0 that cannot be made."""
        assert not self.state.heads
        by = self.founder or self._layout_of
        self.founder, self._making = "", False
        effects = self._drop()
        self._forget_layout()
        effects.append(
            ev.Note("error", f"version 0 cannot be made: {error}", about="founding failed")
        )
        # The others are refused too, but not for good: they say Hello again with their own layout.
        again = RemoteProtocolError(ErrorCode.UNKNOWN_SESSION, "founding starts again")
        for member in self.state.roster.connected():
            is_cause = member.name == by
            refuse = refusal(error if is_cause else again)
            effects += [ev.Send(member.peer, refuse), ev.Forget(member.name)]
            self.state.roster.disconnect(member, left=is_cause)
        return effects

    def held_handles(self) -> tuple[int, ...]:
        """Handles of the payloads of version 0 that have arrived."""
        return tuple(h for each in self._assemblies.values() for h in each.handles)

    def _forget_layout(self) -> None:
        assert self.state.phase is RunPhase.FOUNDING and not self.state.heads
        self.state.layout, self.state.table, self._layout_of = (), (), ""
        self.state.frozen_digest = 0

    def _drop(self) -> list[ev.Effect]:
        handles, self._assemblies = self.held_handles(), {}
        return [ev.Drop(handles)] if handles else []
