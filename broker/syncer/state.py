"""State that the syncer's modules share: the run, its fragments, and the effects that are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.clock import Clock
from narrows.broker.syncer.members import Member, Members
from narrows.broker.syncer.stages import RunPhase, Stage
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, printable
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import build_table, fingerprint

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
    checked: set[int] = field(default_factory=set[int])
    """Chunks that are here, decode and are finite."""
    push: msg.Push | None = None
    """The announcement; it travels on another connection and may come after the first chunks."""
    announced_at: float = 0.0

    @property
    def is_here(self) -> bool:
        """A contribution: announced, complete and checked."""
        return self.push is not None and len(self.checked) == self.transfer.chunks

    @property
    def is_coming(self) -> bool:
        """Announced, and not here yet."""
        return self.push is not None and not self.is_here


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


class State:
    """All that more than one module reads. Heads, clock and merged ids change in `Rounds.durable`
    only."""

    def __init__(
        self,
        config: BrokerConfig,
        epoch: str,
        run_id: str,
        now: float,
        published_digest: Callable[[int, int], int | None],
        resumed: ev.Resumed | None,
    ) -> None:
        self.config, self.settings = config, config.shared
        self.epoch, self.run_id, self.started_at = epoch, run_id, now
        self.published_digest = published_digest
        port = int(config.broker.listen.rpartition(":")[2])
        self.ports = (port + 1, port + 2)
        """Uplink and downlink; the process sets them when they are bound."""
        self.resumed = resumed is not None
        """The run goes on from a state directory: learners of an earlier life may come back."""
        self.phase = RunPhase.SEEDING
        self.stopping = ""
        """Why the process stops; "" while it serves."""
        self.members = Members()
        self.effects: list[ev.Effect] = []
        self.heads: list[int] = []
        """Newest durable version per fragment; empty before version 0."""
        self.rounds = [FragmentRound() for _ in range(self.settings.fragments)]
        self.clock = Clock(self.settings.fragments)
        self.merged: dict[tuple[str, int], int] = {}
        """(incarnation, fragment) -> newest merged push id."""
        self.merged_tokens: Mapping[str, int] = {}
        """Incarnation -> tokens of its merged pushes in earlier lives; for the status."""
        self.xi_s = 0.0
        """Mean seconds per inner step; 0: not known yet."""
        self.beat_wanted = False
        """A Beat goes to everybody at the end of this event."""
        self.set_layout(resumed.layout if resumed else None)
        if resumed is not None:
            self.phase, self.heads = RunPhase(resumed.phase.value), list(resumed.heads)
            self.clock.tokens, self.merged = resumed.clock, dict(resumed.merged)
            self.merged_tokens = resumed.merged_tokens
            self.xi_s = resumed.period_s / self.settings.sync_period_steps

    def set_layout(self, layout: msg.Layout | None) -> None:
        """Takes the run's layout, or forgets it. Raises ConfigError for too many fragments."""
        settings = self.settings
        table = build_table(layout.entries, settings.fragments) if layout else ()
        self.layout, self.fingerprint = layout, fingerprint(layout) if layout else ""
        self.push_chunks = [each.chunk_count(settings.chunk_elements) for each in table]
        """Chunks of a push or a publication, per fragment."""
        self.state_chunks = [each.chunk_count(settings.state_chunk_elements) for each in table]
        """Chunks of a STATE or of version 0, per fragment."""

    def turn(self, phase: RunPhase) -> None:
        assert (self.phase, phase) in pairwise(RunPhase), f"{phase.name} after {self.phase.name}"
        self.phase, self.beat_wanted = phase, True

    @property
    def is_open(self) -> bool:
        """Version 0 is handed out, so learners hold versions and push."""
        return self.phase is not RunPhase.SEEDING

    @property
    def period_s(self) -> float:
        """Seconds between two rounds of a fragment; 0: not known yet."""
        return self.settings.sync_period_steps * self.xi_s

    def in_flight(self) -> int:
        return sum(each.stage is not Stage.IDLE for each in self.rounds)

    def collecting(self) -> list[int]:
        return [f for f, each in enumerate(self.rounds) if each.stage is Stage.COLLECTING]

    def coming(self) -> list[Waiting]:
        """Announced pushes that are on their way."""
        return [each for round_ in self.rounds for each in round_.inbox.values() if each.is_coming]

    def absent(self, fragment: int, now: float) -> list[Member]:
        """Learners that a round of everybody waits for: who is awaited and has no push here.

        The first round of a fragment also waits for those who still take version 0, or it would go
        without a learner that the run has begun with.
        """
        here = [waiting.incarnation for waiting in self.rounds[fragment].here()]
        begins = self.config.merge.quorum == 0 and self.heads[fragment] == 0
        return [
            each
            for each in self.members.heard(now)
            if each.incarnation not in here and each.paused is None and (each.is_ready or begins)
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
        """Tells a peer what was wrong and what to do, and the log that it was told.

        `name` is that of a learner that is no member yet.
        """
        if not name and (member := self.members.by_peer.get(peer)):
            name = member.name
        told = (error.message, error.expected, error.got, error.remedy)
        message, expected, got, remedy = (text[: msg.TEXT_CHARACTERS_MAX] for text in told)
        code = error.code.value
        refusal = msg.Refuse(code, message, expected, got, remedy, fragment, push_id, layout)
        self.effects.append(ev.Send(peer, refusal))
        what = f"push {push_id} of fragment {fragment} from " if push_id else ""
        text = f"{what}{name or 'a peer'}: {printable(str(error))}"
        self.note("refused", text, warning=True, learner=name, code=code)

    def beat(self, member: Member, now: float) -> msg.Beat:
        return msg.Beat(
            epoch=self.epoch,
            phase=self.phase.visible,
            heads=tuple(self.heads) if self.is_open else (),
            collecting=tuple(self.collecting()),
            period_s=self.period_s,
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.clock.tokens_per_s(now),
            up_bits_per_s=member.up_bits_per_s,
        )


def fault(
    what: str, expected: str, got: str, remedy: str, code: ErrorCode = ErrorCode.BAD_MESSAGE
) -> RemoteProtocolError:
    """The fault of a peer's message, with the remedy."""
    return RemoteProtocolError(code, what, expected=expected, got=got, remedy=remedy)
