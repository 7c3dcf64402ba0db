"""The state that the modules of the syncer share. [pure]

Nothing here decides anything: `machine` and the modules that it names do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.clock import RunClock
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.pace import RunPace
from narrows.broker.syncer.phases import RunPhase, Turn, next_phase
from narrows.broker.syncer.rates import Shares
from narrows.broker.syncer.roster import Roster
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run_secret import RunSecret
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.flow import chunks_max, least_chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.schedule import first_step, is_lockstep, snapshot_step

MergedPushes: TypeAlias = dict[tuple[str, str, int], tuple[int, int]]
"""Last merged push and tokens of all merged pushes, by learner, incarnation and fragment."""


_UNDER_WAY: Final = frozenset(
    {
        ErrorCode.OLD_INCARNATION,
        ErrorCode.WRONG_EPOCH,
        ErrorCode.UNKNOWN_SESSION,
        ErrorCode.QUOTA,
    }
)
"""Codes of messages that nobody can be blamed for, or that a quota has counted already."""


@dataclass
class Tally:
    """Counts since the broker started, for operators and benches. Times on the caller's clock."""

    started_at: float
    merges: int = 0
    contributions_merged: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Refused messages by error code."""
    faults: int = 0
    """Refused messages but those that were under way when a session or an epoch ended."""
    norms_clipped: int = 0
    longest_gap_s: float = 0.0
    last_merge_at: float | None = None

    def merged(self, contributors: int, clipped: int, now: float) -> None:
        """Counts one merge."""
        assert contributors >= 1 and clipped >= 0
        if self.last_merge_at is not None:
            assert now >= self.last_merge_at
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_merge_at)
        self.last_merge_at = now
        self.merges += 1
        self.contributions_merged += contributors
        self.norms_clipped += clipped

    def refuse(self, code: str) -> None:
        """Counts one refused message."""
        self.refused[code] = self.refused.get(code, 0) + 1
        self.faults += code not in _UNDER_WAY

    @property
    def mean_contributors(self) -> float:
        return self.contributions_merged / self.merges if self.merges else 0.0


@dataclass(frozen=True)
class Suspect:
    """A learner that may poison the model."""

    reason: str
    is_excluded: bool
    """Its pushes are refused."""


@dataclass
class RunState:
    """One epoch of one run."""

    config: BrokerConfig
    settings: msg.RunSettings
    run_id: str
    epoch: msg.Epoch
    roster: Roster
    tally: Tally
    secret: RunSecret
    clock: RunClock = field(default_factory=RunClock)
    pace: RunPace = field(default_factory=RunPace)
    phase: RunPhase = RunPhase.FOUNDING
    """Written by `turn`, and by a restart before the first event."""
    layout: tuple[msg.LayoutEntry, ...] = ()
    """Empty until the first learner (or the checkpoint) has brought it."""
    frozen_digest: int = 0
    fingerprint: str = ""
    """The layout's; the founder's Hello tells it, before the layout comes."""
    founder: str = ""
    """Learner that sends version 0; empty: none does."""
    table: tuple[Fragment, ...] = ()
    heads: list[msg.FragmentHead] = field(default_factory=list[msg.FragmentHead])
    """Newest version and digest per fragment; empty until version 0 stands."""
    first_kept: list[int] = field(default_factory=list[int])
    """First version published in this epoch, per fragment: older ones cannot be resent."""
    merged_pushes: MergedPushes = field(default_factory=dict[tuple[str, str, int], tuple[int, int]])
    """Pushes of the newest process of each name, in all lives of the broker."""
    suspects: dict[str, Suspect] = field(default_factory=dict[str, Suspect])
    """By name. Written by `suspicion`, and by `forgetting`."""
    rounds: dict[int, Round] = field(default_factory=dict[int, Round])
    """Open rounds by fragment."""
    least_chunk_elements: int = 0
    """The smallest chunk size announced in this epoch: a transfer may have begun with it."""
    epoch_resumed: bool = False
    """The state came from a checkpoint: learners of the epoch before may still come back."""
    uplink_port: int = 0
    """TCP port of the uplink; 0 in a simulation."""
    downlink_port: int = 0
    """TCP port of the downlink; 0 in a simulation."""

    def __post_init__(self) -> None:
        self.epoch_proof = self.secret.proof(self.run_id, self.epoch)
        self.least_chunk_elements = least_chunk_elements(self.settings)
        self.shares = Shares(self.config.wan.total_up, self.config.wan.up)
        self.clock.limit = float(self.config.merge.tokens_per_s_max)
        self.clock.limit_of = self._tokens_per_s_max

    def set_config(self, config: BrokerConfig, settings: msg.RunSettings) -> None:
        """Takes other rates and message sizes, which apply from now on."""
        assert settings.fragment_count == self.settings.fragment_count
        self.config, self.settings = config, settings
        # Never above the old one: transfers that began with smaller chunks may still come.
        self.least_chunk_elements = min(self.least_chunk_elements, least_chunk_elements(settings))
        for index, round_ in self.rounds.items():
            round_.cut_finer(chunks_max(self.table[index].elements, self.least_chunk_elements))
        self.clock.limit = float(config.merge.tokens_per_s_max)
        self.shares.set_rates(config.wan.total_up, config.wan.up)

    def is_proven(self, hello: msg.Hello) -> bool:
        """True if a broker of this run has admitted the learner to the epoch that it names."""
        told = hello.run_id == self.run_id and hello.epoch_proof
        return bool(told) and self.secret.proves(self.run_id, hello.epoch, hello.epoch_proof)

    def turn(self, turn: Turn) -> None:
        """Goes on to the next phase; nothing else changes the phase of a run."""
        self.phase = next_phase(self.phase, turn)

    @property
    def lockstep(self) -> bool:
        """True in the modes in which all live learners contribute at a named step."""
        return is_lockstep(self.settings)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(head.version for head in self.heads)

    @property
    def organisations(self) -> int:
        """Organisations of the learners that are known, at least 1."""
        return max(1, len({member.organisation for member in self.roster}))

    def is_excluded(self, name: str) -> bool:
        """True if nothing of this learner is merged."""
        return name in self.suspects and self.suspects[name].is_excluded

    @property
    def version_sum(self) -> int:
        return sum(self.versions)

    def open_rounds(self) -> tuple[msg.OpenRound, ...]:
        """Rounds that still take contributions, in the order of fragments."""
        # A round that is being merged takes nothing more, so learners need not answer it.
        return tuple(
            self.rounds[index].open_round()
            for index in sorted(self.rounds)
            if not self.rounds[index].merging
        )

    def at_step(self, fragment: int) -> int:
        """Inner step of the next snapshot of a fragment in the lockstep modes."""
        assert self.lockstep
        return snapshot_step(self.settings, fragment, self.heads[fragment].version)

    def first_step(self) -> int:
        """Inner step at which a newcomer starts to count in the lockstep modes."""
        return first_step(self.settings, self.versions) if self.lockstep and self.heads else 0

    def visible_heads(self) -> tuple[msg.FragmentHead, ...]:
        """Newest versions as learners may know them; none before version 0 is handed out."""
        return () if self.phase is RunPhase.FOUNDING else tuple(self.heads)

    def _tokens_per_s_max(self, name: str) -> float:
        """Tokens per second that may count of this learner, by its key; 0: its key says nothing."""
        member = self.roster.get(name)
        return member.tokens_per_s_max if member is not None else 0.0

    def step_s(self) -> float:
        """Seconds of an inner step of the run, xi_step; 0: unknown."""
        return self.pace.step_s(self.roster.ready())

    def beat(self, member: Member, now: float) -> msg.Beat:
        """Beat for one learner, sent on change and every second."""
        assert member.connected
        return msg.Beat(
            epoch=self.epoch,
            phase=self.phase.visible,
            versions=tuple(head.version for head in self.visible_heads()),
            rounds=self.open_rounds(),
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.clock.tokens_per_s(now),
            received=tuple(member.uplink.positions),
            up_bits_per_s=member.up_bits_per_s,
        )

    def welcome(self, member: Member, role: msg.Role, now: float) -> msg.Welcome:
        """Welcome for one learner: everything that the group shares."""
        assert member.connected
        return msg.Welcome(
            run_id=self.run_id,
            epoch=self.epoch,
            role=role,
            settings=self.settings,
            uplink_port=self.uplink_port,
            downlink_port=self.downlink_port,
            fragments=self.visible_heads(),
            rounds=self.open_rounds(),
            phase=self.phase.visible,
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.clock.tokens_per_s(now),
            step=self.first_step(),
            up_bits_per_s=member.up_bits_per_s,
            epoch_proof=self.epoch_proof,
        )


def refusal(error: NarrowsError, *, fragment: int = -1, push_id: int = 0) -> msg.Refuse:
    """Turns an error into the message for its sender."""

    # Texts may repeat what the peer sent: their length on the wire must not be its choice.
    def cut(text: str) -> str:
        return text[:1000]

    return msg.Refuse(
        error.code,
        cut(error.message),
        cut(error.expected),
        cut(error.got),
        cut(error.remedy),
        fragment,
        push_id,
    )


def drop_pushes(state: RunState, name: str) -> list[ev.Effect]:
    """Drops the unfinished pushes of a learner; its complete contributions stay."""
    handles = [h for index in sorted(state.rounds) for h in state.rounds[index].drop_incoming(name)]
    return [ev.Drop(tuple(handles))] if handles else []
