"""State that the syncer's modules share: the run, its fragments, and the effects that are due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.clock import Clock
from narrows.broker.syncer.members import Member, Members
from narrows.broker.syncer.stages import RunPhase, Stage, Turn, next_phase
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, printable
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import Fragment, build_table, fingerprint

IN_FLIGHT_MAX: Final = 2
"""Fragments out of IDLE at a time: one is collected while another one is merged."""


@dataclass(eq=False)
class Waiting:
    """A push that is here or on its way; at most one per incarnation and fragment."""

    learner: str
    incarnation: str
    fragment: int
    push_id: int
    transfer: Transfer
    unchecked: bytearray
    """One byte per chunk: 1 until it is here, decodes and is finite."""
    unchecked_count: int
    push: msg.Push | None = None
    """The announcement; it travels on another connection and may come after the first chunks."""
    announced_at: float = 0.0

    @property
    def is_here(self) -> bool:
        """A contribution: announced, complete and checked."""
        return self.push is not None and self.unchecked_count == 0

    @property
    def is_coming(self) -> bool:
        """Announced, and not here yet."""
        return self.push is not None and self.unchecked_count > 0


@dataclass(eq=False)
class FragmentRound:
    """The round of one fragment, and the pushes that wait for it or for the next one."""

    stage: Stage = Stage.IDLE
    launched_at: float = 0.0
    quorum_at: float | None = None
    due_at: float = 0.0
    inbox: dict[str, Waiting] = field(default_factory=dict[str, Waiting])
    """By incarnation."""
    taken: tuple[ev.PushFacts, ...] = ()
    """Pushes that the round on its way holds."""
    disk_error: str = ""
    """Why the commit is being tried again."""

    def here(self) -> list[Waiting]:
        return [waiting for waiting in self.inbox.values() if waiting.is_here]


@dataclass(eq=False)
class State:
    """All that more than one module reads. Heads, clock and merged ids change in `Rounds.durable`
    only."""

    config: BrokerConfig
    settings: msg.RunSettings
    epoch: str
    run_id: str
    started_at: float
    published_digest: Callable[[int, int], int | None]
    ports: tuple[int, int]
    """Uplink and downlink."""
    clock: Clock
    resumed: bool = False
    """The run goes on from a state directory: learners of an earlier life may come back."""
    phase: RunPhase = RunPhase.SEEDING
    stopping: str = ""
    """Why the process stops; "" while it serves."""
    members: Members = field(default_factory=Members)
    effects: list[ev.Effect] = field(default_factory=list[ev.Effect])
    layout: msg.Layout | None = None
    fingerprint: str = ""
    table: tuple[Fragment, ...] = ()
    push_chunks: tuple[int, ...] = ()
    """Chunks of a push or a publication, per fragment."""
    state_chunks: tuple[int, ...] = ()
    """Chunks of a STATE or of version 0, per fragment."""
    heads: list[int] = field(default_factory=list[int])
    """Newest durable version per fragment; empty before version 0."""
    merged: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """(incarnation, fragment) -> newest merged push id."""
    merged_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Incarnation -> tokens of its merged pushes in earlier lives; for the status."""
    rounds: list[FragmentRound] = field(default_factory=list[FragmentRound])
    arriving: dict[tuple[str, int], Waiting] = field(default_factory=dict)
    """The pushes of all inboxes that are not here yet, by (incarnation, fragment)."""
    xi_s: float = 0.0
    """Mean seconds per inner step; 0: not known yet."""
    beat_wanted: bool = False
    """A Beat goes to everybody at the end of this event."""

    def set_layout(self, layout: msg.Layout | None) -> None:
        """Takes the run's layout, or forgets it. Raises ConfigError for too many fragments."""
        table = build_table(layout.entries, self.settings.fragments) if layout else ()
        self.layout, self.table = layout, table
        self.fingerprint = fingerprint(layout) if layout else ""
        self.push_chunks = tuple(f.chunk_count(self.settings.chunk_elements) for f in table)
        self.state_chunks = tuple(f.chunk_count(self.settings.state_chunk_elements) for f in table)

    def set_heads(self, heads: list[int]) -> None:
        assert len(heads) == len(self.table) == self.settings.fragments
        self.heads = heads
        self.rounds = [FragmentRound() for _ in heads]

    def turn(self, turn: Turn) -> None:
        self.phase = next_phase(self.phase, turn)
        self.beat_wanted = True

    @property
    def is_open(self) -> bool:
        """Version 0 is handed out, so learners hold versions and push."""
        return self.phase is not RunPhase.SEEDING

    def in_flight(self) -> int:
        return sum(each.stage is not Stage.IDLE for each in self.rounds)

    def collecting(self) -> list[int]:
        return [f for f, each in enumerate(self.rounds) if each.stage is Stage.COLLECTING]

    def absent(self, fragment: int, now: float) -> list[Member]:
        """Learners that a round of everybody waits for: who is awaited and has no push here.

        The first round of a fragment also waits for those who still take version 0, or it would go
        without a learner that the run has begun with.
        """
        here = [waiting.incarnation for waiting in self.rounds[fragment].here()]
        begins = self.config.merge.quorum == 0 and self.heads[fragment] == 0
        return [
            member
            for member in self.members.connected()
            if member.incarnation not in here
            and (member.is_awaited(now) or (begins and member.is_joining(now)))
        ]

    # Effects.

    def send(self, member: Member, message: msg.ControlMessage) -> None:
        if member.peer:
            self.effects.append(ev.Send(member.peer, message))

    def note(self, event: str, text: str, *, warning: bool = False, **fields: object) -> None:
        self.effects.append(ev.Note(event, text, fields, warning))

    def refuse(
        self,
        peer: str,
        error: NarrowsError,
        *,
        name: str = "",
        fragment: int = 0,
        push_id: int = 0,
        layout: bytes = b"",
    ) -> None:
        """Tells a peer what was wrong and what to do, and the log that it was told."""
        cut = msg.TEXT_CHARACTERS_MAX
        refusal = msg.Refuse(
            code=error.code.value,
            message=error.message[:cut],
            expected=error.expected[:cut],
            got=error.got[:cut],
            remedy=error.remedy[:cut],
            fragment=fragment,
            push_id=push_id,
            layout=layout,
        )
        self.effects.append(ev.Send(peer, refusal))
        what = f"push {push_id} of fragment {fragment} from " if push_id else ""
        text = f"{what}{name or 'a peer'}: {printable(str(error))}"
        self.note("refused", text, warning=True, learner=name, code=error.code.value)

    def beat(self, member: Member, now: float) -> msg.Beat:
        is_open = self.is_open
        return msg.Beat(
            epoch=self.epoch,
            phase=self.phase.visible,
            heads=tuple(self.heads) if is_open else (),
            collecting=tuple(self.collecting()) if is_open else (),
            period_s=self.settings.sync_period_steps * self.xi_s,
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.clock.tokens_per_s(now),
            up_bits_per_s=member.up_bits_per_s,
        )


def fault(
    what: str, expected: str, got: str, remedy: str, code: ErrorCode = ErrorCode.BAD_MESSAGE
) -> RemoteProtocolError:
    """The fault of a peer's message, with the remedy."""
    return RemoteProtocolError(code, what, expected=expected, got=got, remedy=remedy)
