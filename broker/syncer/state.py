"""State that the syncer's modules share: the run, its fragments, and the effects that are due."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final

from narrows.broker.config import BrokerConfig
from narrows.broker.records import Contribution, Recovered
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member, Members
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError, printable
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import build_table, fingerprint
from narrows.proto.wire import name_of

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
    """Learners are asked; pushes that waited in the inbox count already."""
    MERGING = "merging"
    """A worker adds. A push that comes now waits for the next round."""
    COMMITTING = "committing"
    """The next version is on its way to the disk; nobody may know it."""


class Step(Enum):
    """The six moves of a round, each from one stage to another. Every other move is a bug."""

    LAUNCH = (Stage.IDLE, Stage.COLLECTING)
    DUE = (Stage.COLLECTING, Stage.MERGING)
    ABANDON = (Stage.COLLECTING, Stage.IDLE)
    """No learner is left that could push."""
    MERGED = (Stage.MERGING, Stage.COMMITTING)
    FAILED = (Stage.MERGING, Stage.IDLE)
    DURABLE = (Stage.COMMITTING, Stage.IDLE)


@dataclass
class Clock:
    """Counts the tokens of merged pushes. It keeps nothing by name, so nothing that it has counted
    can leave with a learner."""

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
        span_s = max(times, default=now) - min(times, default=now)
        if span_s <= 0 or now > times[-1] + QUIET_S + 2 * span_s / (len(times) - 1):
            return 0.0
        # The tokens of the first merge were learned before the span begins.
        counted = [tokens for _, tokens in self._samples][1:]
        return sum(counted) / self.fragments / span_s


@dataclass(eq=False)
class InboxPush:
    """A push that is here or on its way; at most one per incarnation and fragment. Its payloads are
    the pipeline's."""

    learner: str
    incarnation: str
    fragment: int
    push_id: int
    transfer: Transfer
    checked: int = 0
    """Chunks that are here, decode and are finite."""
    announcement: msg.Push | None = None
    """Its announcement; it travels on another connection and may come after the first chunks."""
    announced_at: float = 0.0

    @property
    def is_here(self) -> bool:
        """A contribution: announced, complete and checked."""
        return self.announcement is not None and self.checked == self.transfer.chunks

    @property
    def is_coming(self) -> bool:
        """Announced, and not here yet."""
        return self.announcement is not None and self.checked < self.transfer.chunks


@dataclass(eq=False)
class FragmentRound:
    """The slot of one fragment, in which its rounds follow each other, and the pushes that wait for
    the present round or for the next one."""

    merged: dict[str, int] = field(default_factory=dict[str, int])
    """Incarnation -> newest merged push id, the newest merge last."""
    stage: Stage = Stage.IDLE
    launched_at: float = 0.0
    quorum_at: float | None = None
    due_at: float = 0.0
    merged_at: float = 0.0
    inbox: dict[str, InboxPush] = field(default_factory=dict[str, InboxPush])
    """By incarnation."""
    taken: tuple[Contribution, ...] = ()
    """Pushes that the round on its way holds, without chunks."""
    reason: str = ""
    """Why the round on its way was merged when it was."""
    disk_error: str = ""
    """Why the commit is being tried again."""
    durable_at: float = 0.0
    """When its newest version became durable, or this life began."""

    def here(self) -> list[InboxPush]:
        return [waiting for waiting in self.inbox.values() if waiting.is_here]

    def newest_id(self, incarnation: str) -> int:
        """Newest push id of an incarnation that is merged or taken; 0: there is none."""
        taken = {push.incarnation: push.push_id for push in self.taken}
        return max(self.merged.get(incarnation, 0), taken.get(incarnation, 0))


@dataclass(eq=False)
class State:
    """All that more than one module reads, and the effects that more than one module makes. After
    version 0, heads, clock and merged ids change in `Rounds.durable` only."""

    config: BrokerConfig
    epoch: str
    started_at: float
    recovered: InitVar[Recovered]
    """The facts that the run goes on from. They hold whole arrays, so no field keeps them."""
    published_digest: Callable[[int, int], int | None]
    """Asks the store: (fragment, version) -> digest of the durable row; None: there is none."""
    newest_push: Callable[[str, int], int]
    """Asks the store: (incarnation, fragment) -> newest push id in the rows; 0: there is none."""
    closing: bool = False
    """In phase ENDING: the last rounds are over, but that is not on the disk yet. A broker that is
    started again now would open them anew, so no learner may leave."""
    stopping: str = ""
    """Why the process stops; "" while it serves."""
    members: Members = field(default_factory=Members)
    strangers: dict[str, tuple[str, float, int]] = field(
        default_factory=dict[str, tuple[str, float, int]]
    )
    """Name -> its refusal in words, time of its newest Hello, and their number: learners of another
    run."""
    effects: deque[ev.Effect] = field(default_factory=deque[ev.Effect])
    beat_at: float = float("-inf")
    """When everybody was sent a Beat last; minus infinity: it is to be at the end of this event."""
    beat_wanted: bool = False
    """A round opens or closes: a Beat goes to `Members.told_at_once` at the end of this event."""
    _digests: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """(fragment, version) -> digest of a head, so that the store is asked once for each."""

    def __post_init__(self, recovered: Recovered) -> None:
        self.settings = self.config.shared
        port = int(self.config.broker.listen.rpartition(":")[2])
        self.ports = (port + 1, port + 2)
        """Uplink and downlink; the process sets them when they are bound."""
        self.run_id = recovered.run_id
        self.phase = recovered.phase
        """SEEDING until version 0 is durable and enough learners have joined. It takes its phases
        in order, and never goes back."""
        self.heads = list(recovered.heads)
        """Newest durable version per fragment; empty before version 0."""
        self.xi_s = recovered.period_s / self.settings.sync_period_steps
        """Mean seconds per inner step; 0: not known yet."""
        self.clock = Clock(self.settings.fragments, recovered.clock)
        self.rounds = [
            FragmentRound(durable_at=self.started_at) for _ in range(self.settings.fragments)
        ]
        for (incarnation, fragment), push_id in recovered.merged.items():
            self.rounds[fragment].merged[incarnation] = push_id
        self.taught = frozenset(name_of(incarnation) for incarnation, _ in recovered.merged)
        """Names whose pushes an earlier life of the broker has merged: they may come back."""
        self.tokens_before = recovered.merged_tokens
        """Incarnation -> tokens of the pushes that an earlier life has merged."""
        self.set_layout(recovered.layout)

    def set_layout(self, layout: msg.Layout | None) -> None:
        """Takes the run's layout, or forgets it. Raises ConfigError for too many fragments."""
        settings = self.settings
        table = build_table(layout.entries, settings.fragments) if layout else ()
        self.layout = layout
        self.fingerprint = fingerprint(layout) if layout else ""
        self.elements = [each.elements for each in table]
        """By fragment; empty before version 0."""
        self.push_chunks = [each.chunk_count(settings.chunk_elements) for each in table]
        """Chunks of a push or a publication, per fragment."""
        self.state_chunks = [each.chunk_count(settings.state_chunk_elements) for each in table]
        """Chunks of a STATE or of version 0, per fragment."""

    def enter(self, phase: msg.Phase) -> None:
        """Goes on to the next phase, and has everybody told."""
        assert (self.phase, phase) in pairwise(msg.Phase), f"{phase.name} after {self.phase.name}"
        self.phase = phase
        self.beat_at = float("-inf")

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
        return [
            fragment for fragment, slot in enumerate(self.rounds) if slot.stage is Stage.COLLECTING
        ]

    def absent(self, fragment: int, now: float) -> list[Member]:
        """Learners that a round of everybody waits for: they train and have no push here.

        The first round of a fragment also waits for those who still fetch version 0: else it would
        be merged without a learner that the run has begun with.
        """
        is_first = self.config.merge.quorum == 0 and self.heads[fragment] == 0
        heard = self.members.heard(now)
        moving = [m for m in heard if m.told.paused is None and not m.is_stalled(now)]
        able = [each for each in moving if each.is_ready or is_first]
        here = {waiting.incarnation for waiting in self.rounds[fragment].here()}
        return [each for each in able if each.incarnation not in here]

    # Effects that more than one module makes.

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
        member = self.members.by_peer.get(peer)
        if member is not None and not name:
            name = member.name
        refusal = msg.Refuse(
            code=error.code.value,
            message=error.message[: msg.TEXT_CHARACTERS_MAX],
            expected=error.expected[: msg.TEXT_CHARACTERS_MAX],
            got=error.got[: msg.TEXT_CHARACTERS_MAX],
            remedy=error.remedy[: msg.TEXT_CHARACTERS_MAX],
            fragment=fragment,
            push_id=push_id,
            layout=layout,
        )
        self.effects.append(ev.Send(peer, refusal))
        # A learner of another run says Hello each second: `Joining` names it once.
        if error.code is not ErrorCode.WRONG_RUN:
            what = f"push {push_id} of fragment {fragment} from " if push_id else ""
            text = f"{what}{name or 'a peer'}: {printable(str(error))}"
            self.note("refused", text, warning=True, learner=name, code=refusal.code)

    def beat(self, member: Member, now: float, digests: tuple[int, ...] = ()) -> msg.Beat:
        """A Beat for one learner. `digests` are those of the heads, or none in this Beat."""
        # A learner takes the final model and leaves at the first Beat or Welcome of this phase.
        if self.phase is msg.Phase.ENDED:
            digests = self.head_digests()
        return msg.Beat(
            epoch=self.epoch,
            phase=self.phase,
            heads=tuple(self.heads) if self.is_open else (),
            collecting=tuple(self.collecting()),
            period_s=self.period_s,
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.clock.tokens_per_s(now),
            up_bits_per_s=member.up_bits_per_s,
            digests=digests,
        )

    def head_digests(self) -> tuple[int, ...]:
        """Digests of the published copies of the heads; empty before version 0 is handed out."""
        if not self.is_open:
            return ()
        digests = {}
        for fragment, head in enumerate(self.heads):
            digest = self._digests.get((fragment, head))
            if digest is None:
                digest = self.published_digest(fragment, head)
                assert digest is not None, "a head is durable"
            digests[fragment, head] = digest
        self._digests = digests
        return tuple(digests.values())

    def share_uplink(self, now: float, newcomer: Member | None = None) -> None:
        """Sets the rates of all learners, and tells each one its new rate; the newcomer's stands in
        its Welcome."""
        # In the settings 0 means no limit.
        own = float(self.config.wan.up) or math.inf
        total = float(self.config.wan.total_up) or math.inf
        for member in self.members.share(own, total, self.period_s, now):
            if member is not newcomer:
                self.send(member, self.beat(member, now))
