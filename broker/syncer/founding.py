"""Version 0: who sends it, what has arrived of it, and what if it cannot be made. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.syncer import data_path
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.run import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly, chunks_max
from narrows.proto.fragments import build_table
from narrows.proto.timing import BROKER_REPAIR_S

ASKS_MAX = 3
"""Missing chunks of version 0 are asked for after BROKER_REPAIR_S without progress, then twice as
late each time, up to 2**ASKS_MAX times."""


@dataclass
class Founding:
    """Has version 0 made: of a file, or of the first learner's parameters."""

    state: RunState
    from_file: bool = False
    """Version 0 comes from a file that the shell holds, not from the first learner."""
    founder: str = ""
    """Learner that sends version 0."""
    _layout_of: str = ""
    """Learner that brought the layout."""
    _parts: dict[int, Assembly] = field(default_factory=dict[int, Assembly])
    _making: bool = False
    """The shell is making version 0, or it stands."""
    _progress_at: float = 0.0
    _asked_at: float = 0.0
    _asks: int = 0
    """Since the last progress."""

    def take_layout(self, hello: msg.Hello) -> None:
        """The first learner's layout becomes the run's. Raises NarrowsError if it cannot."""
        state = self.state
        if not state.layout:
            state.table = build_table(hello.layout, state.settings.fragment_count)
            state.layout, state.frozen_digest = hello.layout, hello.frozen_digest
            self._layout_of = hello.name

    def role(self, member: Member, now: float) -> tuple[msg.Role, list[ev.Effect]]:
        """Who sends version 0: the file, or the first learner; the others wait."""
        if self._making or self.state.heads or self.founder not in ("", member.name):
            return msg.Role.WAIT, []
        if self.from_file:
            self._making = True
            return msg.Role.WAIT, [ev.Found(self.state.layout, None)]
        if self.founder:
            return msg.Role.FOUND, []
        self.founder, self._progress_at = member.name, now
        chunk = self.state.least_chunk_elements
        self._parts = {
            f.index: Assembly(f.elements, chunks_max(f.elements, chunk)) for f in self.state.table
        }
        return msg.Role.FOUND, [ev.Note("info", f"{member.name} sends version 0")]

    def taken_over(self, name: str) -> list[ev.Effect]:
        """A new process has this name: what the old one sent of version 0 counts no more."""
        if name != self.founder or self._making:
            return []
        self.founder = ""
        return self._drop()

    def lost(self, member: Member) -> list[ev.Effect]:
        """The founder is gone before all of version 0 was here: another one may begin."""
        effects = self.taken_over(member.name)
        if self.open and not self.state.roster.connected():
            # Nobody is left of those who brought this model: the next one may bring another.
            self._forget_layout()
        return effects

    @property
    def open(self) -> bool:
        """Somebody has to begin with version 0."""
        return not (self.founder or self._making or self.state.heads)

    def chunk(self, member: Member, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """A decoded chunk of the founder's parameters."""
        assembly = self._parts.get(header.fragment)
        if member.name != self.founder or self._making or assembly is None:
            return [ev.Drop((handle,))]
        self._progress_at, self._asks = now, 0
        try:
            arrival = assembly.add(header.offset, header.count, header.payload_digest, handle)
        except RemoteProtocolError as error:
            if error.code is not ErrorCode.CHUNK_CONFLICT:
                return [ev.Drop((handle,)), *self.failed(error)]
            # The founder has cut it anew, for messages of another size.
            return self._begin_anew(header, handle)
        if arrival is Arrival.DUPLICATE:
            return [ev.Drop((handle,))]
        if not all(self._parts[index].complete for index in sorted(self._parts)):
            return []
        self._making = True
        handles = tuple(self._parts[index].handles for index in sorted(self._parts))
        return [ev.Found(self.state.layout, handles)]

    def _begin_anew(self, header: msg.Header, handle: int) -> list[ev.Effect]:
        elements = self.state.table[header.fragment].elements
        before = self._parts[header.fragment].handles
        anew = Assembly(elements, chunks_max(elements, self.state.least_chunk_elements))
        anew.add(header.offset, header.count, header.payload_digest, handle)
        self._parts[header.fragment] = anew
        return [ev.Drop(before)]

    def cut_finer(self) -> None:
        """Messages have become smaller: transfers may come in more chunks."""
        for assembly in self._parts.values():
            assembly.chunks_max = chunks_max(assembly.elements, self.state.least_chunk_elements)

    def missing(self, now: float) -> list[ev.Effect]:
        """Asks the founder again for what has not arrived, once nothing arrives any more."""
        founder = self.state.roster.get(self.founder)
        if founder is None or founder.peer is None or self._making:
            return []
        if now < max(self._progress_at, self._asked_at) + BROKER_REPAIR_S * 2.0**self._asks:
            return []
        self._asked_at, self._asks = now, min(self._asks + 1, ASKS_MAX)
        return data_path.silent(self.state, founder, self._progress_at, STATE_CODEC, now) + [
            ev.Send(founder.peer, msg.Missing(msg.DataKind.FOUND, index, 0, 0, assembly.missing()))
            for index, assembly in sorted(self._parts.items())
            if not assembly.complete
        ]

    def damaged(self, header: msg.Header, error: NarrowsError) -> list[ev.Effect]:
        """A payload of version 0 that does not decode; once all is here it says nothing."""
        member = self.state.roster.get(header.learner)
        wanted = header.fragment in self._parts and not self._making
        if member is None or member.name != self.founder or not wanted:
            return []
        if member.incarnation != header.incarnation:
            return []
        return self.failed(error)

    def founded(self) -> None:
        """Version 0 stands; the shell has let go of the chunks."""
        self._parts = {}

    def failed(self, error: NarrowsError) -> list[ev.Effect]:
        """Version 0 cannot be made: who brought the layout is refused, the others start again."""
        by = self.founder or self._layout_of
        self.founder, self._making = "", False
        effects = self._drop()
        self._forget_layout()
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
        return tuple(h for part in self._parts.values() for h in part.handles)

    def _forget_layout(self) -> None:
        self.state.layout, self.state.table, self._layout_of = (), (), ""
        self.state.frozen_digest = 0

    def _drop(self) -> list[ev.Effect]:
        handles, self._parts = self.held_handles(), {}
        return [ev.Drop(handles)] if handles else []
