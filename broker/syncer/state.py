"""State that the syncer's modules share: the run, its fragments, and the effects that are due."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member, Members
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, printable
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import build_table, fingerprint

IN_FLIGHT_MAX: Final = 2
"""Fragments out of IDLE at a time: one is collected while another one is merged."""

SAMPLES: Final = 17
"""Merges that the run's speed is taken from, one more than the gaps between them."""

QUIET_S: Final = 2.0
"""The speed is told as 0 after this long and two usual gaps without a merge."""


class Stage(Enum):
    """Where a fragment's round stands. At most two fragments are out of IDLE."""

    IDLE = "idle"
    """Its newest version is published."""
    COLLECTING = "collecting"
    """Learners are asked; what waited in the inbox counts already."""
    MERGING = "merging"
    """A worker adds. What comes now waits for the next round."""
    COMMITTING = "committing"
    """The next version is on its way to the disk; nobody may know it."""


class Step(Enum):
    """The six moves of a round, each from one stage to another. Every other move is a bug."""

    LAUNCH = (Stage.IDLE, Stage.COLLECTING)
    DUE = (Stage.COLLECTING, Stage.MERGING)
    ABANDON = (Stage.COLLECTING, Stage.IDLE)
    """Nobody is left who could push."""
    MERGED = (Stage.MERGING, Stage.COMMITTING)
    FAILED = (Stage.MERGING, Stage.IDLE)
    DURABLE = (Stage.COMMITTING, Stage.IDLE)


@dataclass
class Clock:
    """Counts the tokens of merged pushes, and has no state by name: nothing that it counted can
    leave with a learner."""

    fragments: int
    tokens: int = 0
    """Tokens of all merged pushes, summed over fragments: each token counts once per fragment."""
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(time, tokens) of the newest merges."""

    @property
    def run_tokens(self) -> int:
        """Tokens that the run has learned."""
        return self.tokens // self.fragments

    def count(self, tokens: int, now: float) -> None:
        """A round became durable that holds these tokens."""
        # A Beat beyond TOKENS_MAX could be read by nobody.
        self.tokens = min(self.tokens + tokens, msg.TOKENS_MAX)
        self._samples.append((now, tokens))

    def tokens_per_s(self, now: float) -> float:
        """Tokens per second over the newest merges; 0 after a pause."""
        times = [at for at, _ in self._samples]
        span_s = times[-1] - times[0] if times else 0.0
        if span_s <= 0 or now > times[-1] + QUIET_S + 2 * span_s / (len(times) - 1):
            return 0.0
        counted = sum(tokens for _, tokens in self._samples) - self._samples[0][1]
        return counted / self.fragments / span_s


@dataclass(eq=False)
class Waiting:
    """A push that is here or on its way; at most one per incarnation and fragment."""

    learner: str
    incarnation: str
    fragment: int
    push_id: int
    transfer: Transfer
    checked: int = 0
    """Chunks that are here, decode and are finite."""
    push: msg.Push | None = None
    """The announcement; it travels on another connection and may come after the first chunks."""
    announced_at: float = 0.0

    @property
    def is_here(self) -> bool:
        """A contribution: announced, complete and checked."""
        return self.push is not None and self.checked == self.transfer.chunks

    @property
    def is_coming(self) -> bool:
        """Announced, and not here yet."""
        return self.push is not None and self.checked < self.transfer.chunks


@dataclass(eq=False)
class FragmentRound:
    """The round of one fragment, and the pushes that wait for it or for the next one."""

    merged: dict[str, int]
    """Incarnation -> newest merged push id; who was merged last stands last."""
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
    epoch: str
    run_id: str
    started_at: float
    resumed: ev.Resumed | None
    """The facts that the run goes on from; learners of an earlier life may come back."""
    published_digest: Callable[[int, int], int | None]
    """Asks the store: (fragment, version) -> digest of the durable row; None: there is none."""
    newest_push: Callable[[str, int], int]
    """Asks the store: (incarnation, fragment) -> newest push id in the rows; 0: there is none."""
    phase: msg.Phase = msg.Phase.SEEDING
    """SEEDING until version 0 is durable and enough learners have joined. It takes its phases in
    order, and never goes back."""
    closing: bool = False
    """In phase ENDING: the last rounds are over, but that is not on the disk yet. A broker that is
    started again now would open them anew, so no learner may leave."""
    stopping: str = ""
    """Why the process stops; "" while it serves."""
    members: Members = field(default_factory=Members)
    strangers: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    """Name -> words about it, and the time of its newest Hello: learners of another run."""
    effects: list[ev.Effect] = field(default_factory=list[ev.Effect])
    heads: list[int] = field(default_factory=list[int])
    """Newest durable version per fragment; empty before version 0."""
    xi_s: float = 0.0
    """Mean seconds per inner step; 0: not known yet."""
    beat_at: float = float("-inf")
    """When everybody was sent a Beat last; minus infinity: it is to be at the end of this event."""
    beat_wanted: bool = False
    """A round opens or closes: a Beat goes to `Members.told_at_once` at the end of this event."""
    _head_digests: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Fragment -> (version, digest) of a head, so that the store is asked once for each."""

    def __post_init__(self) -> None:
        self.settings = self.config.shared
        port = int(self.config.broker.listen.rpartition(":")[2])
        self.ports = (port + 1, port + 2)
        """Uplink and downlink; the process sets them when they are bound."""
        self.rounds = [FragmentRound({}) for _ in range(self.settings.fragments)]
        self.clock = Clock(self.settings.fragments)
        self.set_layout(self.resumed.layout if self.resumed else None)
        if (resumed := self.resumed) is not None:
            self.phase, self.heads = resumed.phase, list(resumed.heads)
            self.clock.tokens = resumed.clock
            self.xi_s = resumed.period_s / self.settings.sync_period_steps
            for (incarnation, fragment), push_id in resumed.merged.items():
                self.rounds[fragment].merged[incarnation] = push_id

    def set_layout(self, layout: msg.Layout | None) -> None:
        """Takes the run's layout, or forgets it. Raises ConfigError for too many fragments."""
        settings = self.settings
        table = build_table(layout.entries, settings.fragments) if layout else ()
        self.layout, self.fingerprint = layout, fingerprint(layout) if layout else ""
        self.push_chunks = [each.chunk_count(settings.chunk_elements) for each in table]
        """Chunks of a push or a publication, per fragment."""
        self.state_chunks = [each.chunk_count(settings.state_chunk_elements) for each in table]
        """Chunks of a STATE or of version 0, per fragment."""

    def turn(self, phase: msg.Phase) -> None:
        assert (self.phase, phase) in pairwise(msg.Phase), f"{phase.name} after {self.phase.name}"
        self.phase, self.beat_at = phase, float("-inf")

    @property
    def is_open(self) -> bool:
        """Version 0 is handed out, so learners hold versions and push."""
        return self.phase is not msg.Phase.SEEDING

    @property
    def period_s(self) -> float:
        """Seconds between two rounds of a fragment; 0: not known yet."""
        return self.settings.sync_period_steps * self.xi_s

    def in_flight(self) -> int:
        return sum(each.stage is not Stage.IDLE for each in self.rounds)

    def collecting(self) -> list[int]:
        return [f for f, each in enumerate(self.rounds) if each.stage is Stage.COLLECTING]

    def absent(self, fragment: int, now: float) -> list[Member]:
        """Learners that a round of everybody waits for: who is awaited and has no push here.

        The first round of a fragment also waits for those who still take version 0, or it would go
        without a learner that the run has begun with.
        """
        here = {waiting.incarnation for waiting in self.rounds[fragment].here()}
        begins = self.config.merge.quorum == 0 and self.heads[fragment] == 0
        trains = [each for each in self.members.heard(now) if each.told.paused is None]
        able = [each for each in trains if each.is_ready or begins]
        return [each for each in able if each.incarnation not in here]

    # Effects.

    def send(self, member: Member, message: msg.ControlMessage) -> None:
        if member.is_connected:
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
        # A learner of another run says Hello on, each second: `Joining` names it once.
        if error.code is not ErrorCode.WRONG_RUN:
            self.note("refused", text, warning=True, learner=name, code=code)

    def beat(self, member: Member, now: float, digests: tuple[int, ...] = ()) -> msg.Beat:
        """`digests` are those of the heads, or none in this Beat."""
        heads, clock = tuple(self.heads) if self.is_open else (), self.clock
        # A learner takes the final model and leaves at the first Beat or Welcome of this phase.
        digests = self.head_digests() if self.phase is msg.Phase.ENDED else digests
        return msg.Beat(
            self.epoch, self.phase, heads, tuple(self.collecting()), self.period_s,
            clock.run_tokens, clock.tokens_per_s(now), member.up_bits_per_s, digests,
        )  # fmt: skip

    def head_digests(self) -> tuple[int, ...]:
        """Digests of the published copies of the heads; empty before version 0 is handed out."""
        if not self.is_open:
            return ()
        for fragment, head in enumerate(self.heads):
            version, _ = self._head_digests.get(fragment, (-1, 0))
            if version != head:
                digest = self.published_digest(fragment, head)
                assert digest is not None, "a head is durable"
                self._head_digests[fragment] = (head, digest)
        return tuple(self._head_digests[fragment][1] for fragment in range(len(self.heads)))

    def share_uplink(self, now: float, newcomer: Member | None = None) -> None:
        """Sets the rates of all learners and tells them; the newcomer's stands in its Welcome."""
        wan = self.config.wan
        for member in self.members.share(float(wan.up), float(wan.total_up), self.period_s, now):
            if member is not newcomer:
                self.send(member, self.beat(member, now))


def fault(
    what: str, expected: str, got: str, remedy: str, code: ErrorCode = ErrorCode.BAD_MESSAGE
) -> RemoteProtocolError:
    """The fault of a peer's message, with the remedy."""
    return RemoteProtocolError(code, what, expected=expected, got=got, remedy=remedy)
