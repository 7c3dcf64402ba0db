"""The state that the parts of the syncer share. [pure]

Nothing here decides anything; `syncer`, `admission` and `intake` do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.clock import RunClock
from narrows.broker.syncer.members import Member, Roster
from narrows.broker.syncer.rates import Shares
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.tally import Tally
from narrows.proto import messages as msg
from narrows.proto.errors import NarrowsError
from narrows.proto.flow import chunks_max, least_chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.schedule import first_step, is_lockstep, snapshot_step

MergedPushes: TypeAlias = dict[tuple[str, str, int], tuple[int, int]]
"""Last merged push, and tokens of all merged ones, by learner, incarnation and fragment."""


@dataclass
class RunState:
    """One epoch of one run."""

    config: BrokerConfig
    settings: msg.RunSettings
    run_id: str
    epoch: msg.Epoch
    roster: Roster
    tally: Tally
    clock: RunClock = field(default_factory=RunClock)
    phase: msg.Phase = msg.Phase.FOUNDING
    end_told: bool = False
    """The end is durable: whoever leaves now leaves with the model that a restart has as well."""
    layout: tuple[msg.LayoutEntry, ...] = ()
    """Empty until the first learner (or the checkpoint) has brought it."""
    frozen_digest: int = 0
    table: tuple[Fragment, ...] = ()
    heads: list[msg.FragmentHead] = field(default_factory=list[msg.FragmentHead])
    """Newest version and digest per fragment; empty while founding."""
    first_kept: list[int] = field(default_factory=list[int])
    """First version published in this epoch, per fragment: older ones cannot be resent."""
    merged_pushes: MergedPushes = field(default_factory=dict[tuple[str, str, int], tuple[int, int]])
    """From all lives of the broker, of the newest process of each name."""
    rounds: dict[int, Round] = field(default_factory=dict[int, Round])
    """Open rounds by fragment."""
    least_chunk_elements: int = 0
    """The smallest cut that was told in this epoch: with it a transfer may have begun."""
    epoch_resumed: bool = False
    """The state came from a checkpoint: learners of the epoch before may still come back."""
    uplink_port: int = 0
    downlink_port: int = 0

    def __post_init__(self) -> None:
        self.least_chunk_elements = least_chunk_elements(self.settings)
        self.shares = Shares(self.config.wan.total_up, self.config.wan.up)

    def set_config(self, config: BrokerConfig, told: msg.RunSettings) -> None:
        """Other rates apply from now on."""
        self.config, self.settings = config, told
        self.least_chunk_elements = min(self.least_chunk_elements, least_chunk_elements(told))
        for index, round_ in self.rounds.items():
            round_.cut_finer(chunks_max(self.table[index].elements, self.least_chunk_elements))
        self.shares.set_rates(config.wan.total_up, config.wan.up)

    @property
    def lockstep(self) -> bool:
        """All live learners contribute at a named step."""
        return is_lockstep(self.settings)

    @property
    def told_phase(self) -> msg.Phase:
        """The phase that learners and users hear of."""
        is_early = self.phase is msg.Phase.ENDED and not self.end_told
        return msg.Phase.ENDING if is_early else self.phase

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(head.version for head in self.heads)

    @property
    def version_sum(self) -> int:
        return sum(self.versions)

    def open_rounds(self) -> tuple[msg.OpenRound, ...]:
        """The rounds that still take contributions, by fragment."""
        return tuple(
            self.rounds[index].open_round()
            for index in sorted(self.rounds)
            if not self.rounds[index].merging
        )

    def at_step(self, fragment: int) -> int:
        """Inner step of the next snapshot of a fragment in the lockstep modes."""
        return snapshot_step(self.settings, fragment, self.heads[fragment].version)

    def first_step(self) -> int:
        """Inner step at which a newcomer starts to count in the lockstep modes."""
        return first_step(self.settings, self.versions) if self.lockstep and self.heads else 0

    def told_heads(self) -> tuple[msg.FragmentHead, ...]:
        """The newest versions; none before version 0 is handed out."""
        return () if self.phase is msg.Phase.FOUNDING else tuple(self.heads)

    def tokens_per_s(self, now: float) -> float:
        live = [member.incarnation for member in self.roster.ready()]
        return self.clock.tokens_per_s(live, now)

    def beat(self, member: Member, now: float) -> msg.Beat:
        """What a learner is told on change and every second."""
        return msg.Beat(
            epoch=self.epoch,
            phase=self.told_phase,
            versions=tuple(head.version for head in self.told_heads()),
            rounds=self.open_rounds(),
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.tokens_per_s(now),
            received=tuple(member.received),
            up_bits_per_s=member.up_bits_per_s,
        )

    def welcome(self, member: Member, role: msg.Role, now: float) -> msg.Welcome:
        """Everything that the group shares, for a learner that (re)joins."""
        return msg.Welcome(
            run_id=self.run_id,
            epoch=self.epoch,
            role=role,
            settings=self.settings,
            uplink_port=self.uplink_port,
            downlink_port=self.downlink_port,
            fragments=self.told_heads(),
            rounds=self.open_rounds(),
            phase=self.told_phase,
            run_tokens=self.clock.run_tokens,
            tokens_per_s=self.tokens_per_s(now),
            step=self.first_step(),
            up_bits_per_s=member.up_bits_per_s,
        )


def refusal(error: NarrowsError, *, fragment: int = -1, push_id: int = 0) -> msg.Refuse:
    """An error as the message that its causer gets."""

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
    """Forgets what a learner has begun to push; complete contributions stay."""
    handles = [h for index in sorted(state.rounds) for h in state.rounds[index].drop_push(name)]
    return [ev.Drop(tuple(handles))] if handles else []
