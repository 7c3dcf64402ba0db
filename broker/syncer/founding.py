"""Founding of a run: its layout in parts, version 0 in chunks, and who sends them. [pure]"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import data_path
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.layouts import other_layout, refuse_stray
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.run import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly, chunks_max
from narrows.proto.fragments import build_table
from narrows.proto.layout import JoinedLayout, check_layout, fingerprint, split_layout
from narrows.proto.limits import NAME_PATTERN
from narrows.proto.timing import BROKER_REPAIR_S

ASKS_MAX = 3
"""Missing chunks of version 0 are asked for after BROKER_REPAIR_S without progress, then twice as
late each time, up to 2**ASKS_MAX times as late."""


def check_founder(config: BrokerConfig) -> None:
    """Raises ConfigError for a new run whose beginning anybody with a key could decide, and for a
    founder that no learner can be.

    Without keys nobody is told from anybody, so the first learner founds.
    """
    founder = config.run.founder
    if founder and not re.search(NAME_PATTERN, founder):
        raise ConfigError("run.founder: no name", expected="a learner's name", got=repr(founder))
    # A file of --init does not replace the founder: it has neither merge rules nor an order.
    if config.security.keys and not founder:
        raise ConfigError(
            "this run has no founder, and its learners have keys",
            expected="the name of the learner whose model the run begins with",
            got="none",
            remedy="narrows broker --founder NAME, also with --init FILE",
        )


@dataclass
class Founding:
    """Has version 0 made from a file, or from the first learner's parameters."""

    state: RunState
    from_file: bool = False
    """Version 0 comes from a file that the shell holds, not from a learner."""
    _layout_of: str = ""
    """Learner that brings the layout, or has brought it; empty: none."""
    _parts: JoinedLayout = field(default_factory=JoinedLayout)
    """The layout as far as it has come."""
    _assemblies: dict[int, Assembly] = field(default_factory=dict[int, Assembly])
    _making: bool = False
    """The shell is making version 0, or it stands."""
    _progress_at: float = 0.0
    _asked_at: float = 0.0
    _asks: int = 0
    """Requests for missing chunks since the last progress."""

    def may_found(self, name: str) -> bool:
        """True for the founder that the operator named, or for anybody if there is none."""
        return self.state.config.run.founder in ("", name)

    def begin(self, member: Member) -> list[ev.Effect]:
        """Makes the layout of a learner that may found the run's, unless there is one already.

        Learners that wait with another one are refused: they came before the founder.
        """
        state = self.state
        if state.phase is not RunPhase.FOUNDING or self._layout_of:
            return []
        if not self.may_found(member.name):
            return []
        self._layout_of, self._parts = member.name, JoinedLayout()
        state.fingerprint = member.fingerprint
        effects: list[ev.Effect] = []
        for other in state.roster.connected():
            if other.fingerprint != state.fingerprint:
                error = other_layout(state, other.name, other.fingerprint)
                effects += self._dismiss(other, error, left=True)
        return effects

    def ask(self, member: Member, now: float) -> list[ev.Effect]:
        """Asks the learner that brings the layout for the next part. It is welcomed after the last
        one: nothing that it sends can be checked before."""
        if member.name != self._layout_of or self.state.layout:
            return []
        self._asked_at = now
        return [ev.Send(member.peer, msg.AskLayout(self._parts.next_part))]

    def take_part(self, member: Member, part: msg.LayoutPart, now: float) -> list[ev.Effect]:
        """Takes a part of the layout in, and asks for the next one."""
        if member.name != self._layout_of:
            return refuse_stray(self.state, member, "a part of the layout")
        if self.state.layout:
            return []  # A part that was asked for twice.
        try:
            if not self._parts.take(part):
                return []
            self._asks = 0
            if self._parts.complete:
                self._take_layout()
        except NarrowsError as error:
            return self.failed(error)
        return self.ask(member, now)

    def _take_layout(self) -> None:
        """Makes the layout the run's. Raises NarrowsError if that cannot be."""
        state, joined = self.state, self._parts
        layout = tuple(joined.entries)
        check_layout(layout)
        told = fingerprint(layout, joined.frozen_digest)
        if told != state.fingerprint:
            raise RemoteProtocolError(
                ErrorCode.BAD_MESSAGE,
                f"layout of {self._layout_of}",
                expected=f"the fingerprint {state.fingerprint} of its Hello",
                got=told,
            )
        # Its own parts may be smaller: the run has to tell it to others as well.
        split_layout(layout, joined.frozen_digest)
        state.table = build_table(layout, state.settings.fragment_count)
        state.layout, state.frozen_digest = layout, joined.frozen_digest
        self._parts = JoinedLayout()

    def role(self, member: Member, now: float) -> tuple[msg.Role, list[ev.Effect]]:
        """Role of a learner while version 0 is made: the first one sends it, the others wait."""
        if self._making or self.state.heads or self.state.founder not in ("", member.name):
            return msg.Role.WAIT, []
        if not self.state.layout or not self.may_found(member.name):
            return msg.Role.WAIT, []
        if self.from_file:
            self._making = True
            return msg.Role.WAIT, [ev.Found(self.state.layout, None)]
        if self.state.founder:
            return msg.Role.FOUND, []
        # Only one learner sends it: parts of two learners' parameters would be no model.
        self.state.founder, self._progress_at = member.name, now
        chunk = self.state.least_chunk_elements
        self._assemblies = {
            f.index: Assembly(f.elements, chunks_max(f.elements, chunk)) for f in self.state.table
        }
        return msg.Role.FOUND, [ev.Note("info", f"{member.name} sends version 0", about="founder")]

    def taken_over(self, name: str) -> list[ev.Effect]:
        """Drops the parts or the chunks of a founder whose name another process has now."""
        if name == self._layout_of and not self.state.layout:
            self._layout_of, self._parts = "", JoinedLayout()
        # Once all chunks are here, version 0 no longer depends on the process that sent it.
        if name != self.state.founder or self._making:
            return []
        self.state.founder = ""
        return self._drop()

    def lost(self, member: Member) -> list[ev.Effect]:
        """Lets another learner begin if the founder is gone before all of version 0 was here."""
        effects = self.taken_over(member.name)
        named = bool(self.state.config.run.founder) and self.may_found(member.name)
        if self.open and (named or not self.state.roster.connected()):
            # Nobody is left that brought this model, so the next learner may bring another.
            self._forget_layout()
        return effects

    def next_founder(self) -> Member | None:
        """The connected learner that is asked for version 0 now, the first in name order."""
        able = [each for each in self.state.roster.connected() if self.may_found(each.name)]
        return able[0] if able and self.open else None

    @property
    def open(self) -> bool:
        """True while version 0 needs a learner that begins with it."""
        brings = self._layout_of and not self.state.layout
        return not (brings or self.state.founder or self._making or self.state.heads)

    def chunk(self, member: Member, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        """Takes a decoded chunk of the founder's parameters in."""
        assembly = self._assemblies.get(header.fragment)
        if member.name != self.state.founder or self._making or assembly is None:
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
        brings = self._layout_of if not self.state.layout else self.state.founder
        founder = self.state.roster.get(brings)
        if founder is None or founder.presence.peer is None or self._making:
            return []
        if now < max(self._progress_at, self._asked_at) + BROKER_REPAIR_S * 2.0**self._asks:
            return []
        self._asked_at, self._asks = now, min(self._asks + 1, ASKS_MAX)
        if not self.state.layout:
            return self.ask(founder, now)
        return data_path.silent(self.state, founder, self._progress_at, STATE_CODEC, now) + [
            ev.Send(founder.peer, msg.Missing(msg.DataKind.FOUND, index, 0, 0, assembly.missing()))
            for index, assembly in sorted(self._assemblies.items())
            if not assembly.complete
        ]

    def damaged(self, header: msg.Header, error: NarrowsError) -> list[ev.Effect]:
        """Fails for a payload that does not decode, unless all of version 0 is here already."""
        member = self.state.roster.get(header.learner)
        wanted = header.fragment in self._assemblies and not self._making
        if member is None or member.name != self.state.founder or not wanted:
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
        by = self.state.founder or self._layout_of
        self.state.founder, self._making = "", False
        effects = self._drop()
        self._forget_layout()
        effects.append(
            ev.Note("error", f"version 0 cannot be made: {error}", about="founding failed")
        )
        # The others are refused too, but not for good: they say Hello again with their own layout.
        again = RemoteProtocolError(ErrorCode.UNKNOWN_SESSION, "founding starts again")
        for member in self.state.roster.connected():
            is_cause = member.name == by
            effects += self._dismiss(member, error if is_cause else again, left=is_cause)
        return effects

    def _dismiss(self, member: Member, error: NarrowsError, *, left: bool) -> list[ev.Effect]:
        refuse = ev.Send(member.peer, refusal(error))
        self.state.roster.disconnect(member, left=left)
        return [refuse, ev.Forget(member.name)]

    def held_handles(self) -> tuple[int, ...]:
        """Handles of the payloads of version 0 that have arrived."""
        return tuple(h for each in self._assemblies.values() for h in each.handles)

    def _forget_layout(self) -> None:
        assert self.state.phase is RunPhase.FOUNDING and not self.state.heads
        self.state.layout, self.state.table, self._layout_of = (), (), ""
        self.state.frozen_digest, self.state.fingerprint = 0, ""
        self._parts = JoinedLayout()

    def _drop(self) -> list[ev.Effect]:
        handles, self._assemblies = self.held_handles(), {}
        return [ev.Drop(handles)] if handles else []
