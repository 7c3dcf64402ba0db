"""The syncer: hands each event to the module that decides, and lets time decide the rest. [pure]

The decisions are in `admission` (joining), `pushes` (valid contributions), `scheduler` and
`quorum` (opening and merging rounds), `serving` (the learners' copies), `credit` (rates and
acknowledgements), `lifecycle` (phases, checkpoints, the end). Events come in with `now`, effects
go out in order. There are no sockets, tensors, clocks or threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.config import BrokerConfig
from narrows.broker.shared_settings import settings
from narrows.broker.syncer import events as ev
from narrows.broker.syncer import serving
from narrows.broker.syncer.admission import Admission
from narrows.broker.syncer.credit import Allowance
from narrows.broker.syncer.ending import Waiting
from narrows.broker.syncer.founding import Founding
from narrows.broker.syncer.lifecycle import Lifecycle
from narrows.broker.syncer.member import Liveness, Member, stepped
from narrows.broker.syncer.phases import resumed_phase
from narrows.broker.syncer.pushes import Intake
from narrows.broker.syncer.roster import Roster
from narrows.broker.syncer.run import (
    MergedPushes,
    RunState,
    Tally,
    drop_pushes,
    refusal,
)
from narrows.broker.syncer.run_secret import RunSecret
from narrows.broker.syncer.scheduler import Scheduler
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.fragments import build_table
from narrows.proto.layout import fingerprint


@dataclass(frozen=True)
class Resumed:
    """State of a run that a new epoch goes on from."""

    layout: tuple[msg.LayoutEntry, ...]
    frozen_digest: int
    heads: tuple[msg.FragmentHead, ...]
    run_tokens: int
    phase: msg.Phase
    """Phase on disk."""
    merged_pushes: MergedPushes = field(default_factory=dict[tuple[str, str, int], tuple[int, int]])
    checkpoint_sum: int | None = None
    """Sum of the versions in the checkpoint; None: that of `heads`."""
    token_parts: int = 0
    """Part of the run's clock beyond run_tokens, in units of a P-th token for P fragments."""


class Syncer:
    """The state machine of the broker: one epoch of one run (of one shard)."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        run_id: str,
        epoch: msg.Epoch,
        secret: RunSecret,
        now: float,
        resumed: Resumed | None = None,
        from_file: bool = False,
        uplink_port: int = 0,
        downlink_port: int = 0,
    ) -> None:
        """`from_file`: version 0 comes from a file, not from the first learner. The ports are those
        of the data sockets, for learners; 0 in a simulation, which has none."""
        roster = Roster(config.liveness.late, config.liveness.lost)
        self.state = RunState(
            config, settings(config), run_id, epoch, roster, Tally(now), secret,
            uplink_port=uplink_port, downlink_port=downlink_port,
        )  # fmt: skip
        self.founding = Founding(self.state, from_file)
        self.admission = Admission(self.state, self.founding)
        self.intake = Intake(self.state)
        self.allowance = Allowance(self.state, self.founding)
        waiting = Waiting(self.state, started_at=now)
        self.scheduler = Scheduler(self.state, waiting, launched_at=now)
        self.lifecycle = Lifecycle(self.state, self.scheduler, waiting, started_at=now)
        #: Phase and rounds in the last Beat.
        self._last_beat = (msg.Phase.FOUNDING, frozenset[msg.OpenRound]())
        self._beat_at = self._now = now
        if resumed is not None:
            self._resume(resumed)

    # The three methods of a state machine.

    def handle(self, event: ev.Event, *, now: float, more: bool = False) -> list[ev.Effect]:
        """Takes one event in; returns the effects to perform, in order.

        `more`: more events wait already. Decisions that depend on time are left to the last of
        them: a shell that was held up would charge its own delay to every learner whose message
        comes after the first.
        """
        assert now >= self._now, "time does not run backwards"
        self._now = now
        effects: list[ev.Effect] = []
        match event:
            case ev.Received():
                effects = self._received(event, now)
            case ev.PeerLost(peer):
                member = self.state.roster.by_peer(peer)
                effects = self._lose(member, "its connection closed", now) if member else []
            case ev.ChunkArrived(header, handle, size_bytes):
                effects = self.intake.arrived(header, handle, size_bytes, now)
                effects += self.allowance.arrived(header, size_bytes, now)
            case ev.ChunkUnpacked(header, handle):
                effects = self._unpacked(header, handle, now)
            case ev.ChunkDamaged(header, handle, code, reason):
                error = RemoteProtocolError(ErrorCode(code), reason)
                effects = self._damaged(header, handle, error)
            case ev.Founded(digests):
                self.founding.founded()
                self.lifecycle.founded(digests)
            case ev.FoundingFailed(reason):
                error = RemoteProtocolError(ErrorCode.LAYOUT_MISMATCH, reason)
                effects = self.founding.failed(error)
            case ev.Merged():
                effects = self.scheduler.merged(event, now)
            case ev.MergeFailed(fragment, reason):
                effects = self.scheduler.merge_failed(fragment, reason, now)
            case ev.CheckpointWritten(version_sum):
                effects = self.lifecycle.checkpoint_written(version_sum)
            case ev.CheckpointFailed(reason):
                effects = self.lifecycle.checkpoint_failed(reason, now)
            case ev.JournalFailed(reason):
                effects = self.lifecycle.journal_failed(reason)
            case ev.JournalGap(reason):
                effects = self.lifecycle.journal_gap(reason)
            case ev.JournalWorks():
                effects = self.lifecycle.journal_works()
            case ev.StopRequested(reason):
                effects = self.lifecycle.stop(reason)
            case ev.ConfigRead(config):
                effects = self.allowance.reload(config, now) + self.admission.welcome_all(now)
            case ev.DeadlineReached():
                pass
        return effects if more else effects + self._advance(now)

    def next_deadline(self) -> float | None:
        """Time at which `handle(DeadlineReached())` is due if nothing else happens; None: it is
        over."""
        if self.lifecycle.finished:
            return None
        times: list[float | None] = [
            self._beat_at + self.state.config.broker.beat,
            self.state.roster.next_deadline(),
            self.admission.next_deadline(),
            self.allowance.next_deadline(),
            self.scheduler.next_deadline(),
            self.lifecycle.next_deadline(),
        ]
        return min(time for time in times if time is not None)

    def check(self) -> None:
        """Asserts the invariants that need a loop; tests run it after each event."""
        state = self.state
        assert len(state.rounds) <= state.config.merge.rounds_in_flight
        assert state.heads or not state.rounds
        for index, round_ in state.rounds.items():
            assert round_.fragment == index
            assert round_.base_version == state.heads[index].version
            if round_.merging:
                assert len(round_.contributed) >= round_.quorum
                assert not round_.incoming
            for name, contribution in round_.contributed.items():
                assert contribution.learner == name
                assert contribution.tokens > 0
                assert name not in round_.incoming
        for member in state.roster:
            for held, head in zip(member.copies.held, state.heads, strict=False):
                assert held <= head.version
            if member.connected:
                assert state.roster.by_peer(member.peer) is member
        total = state.config.wan.total_up
        assert not total or all(m.up_bits_per_s <= total for m in state.roster.connected())

    # Decisions that any event may have made possible.

    def _advance(self, now: float) -> list[ev.Effect]:
        if self.lifecycle.finished:
            return []
        effects = self.admission.expire(now)
        for member in self.state.roster.age(now):
            effects += self._aged(member, now)
        # The order matters: liveness decides who is awaited, the phase which rounds are opened, and
        # a round that is closed frees its place for the next one.
        if begun := self.lifecycle.begin(now):
            effects += begun + self.admission.welcome_all(now)
        effects += self.lifecycle.reach_goal(now)
        effects += self.scheduler.decide(now)
        self.scheduler.launch(now)
        effects += self.lifecycle.end(now)
        effects += self.lifecycle.checkpoint(now)
        effects += self.lifecycle.stop_if_durable()
        effects += self.allowance.advance(now)
        effects += self._beat(now)
        return effects

    def _beat(self, now: float) -> list[ev.Effect]:
        """Sends the state to everybody on change, and every second."""
        state = self.state
        due = now >= self._beat_at + state.config.broker.beat
        phase, rounds = state.phase.visible, frozenset(state.open_rounds())
        # A round that is over needs no Beat of its own: its publication tells the version.
        if phase is self._last_beat[0] and rounds <= self._last_beat[1] and not due:
            return []
        self._last_beat = phase, rounds
        effects: list[ev.Effect] = []
        if due:
            self._beat_at = now
            effects += self.intake.repair(now) + self.founding.missing(now)
            effects += self._adapt(now)
        for member in state.roster.connected():
            effects += self._beat_to(member, now)
        return effects

    def _adapt(self, now: float) -> list[ev.Effect]:
        effects = self.allowance.adapt()
        if any(isinstance(effect, ev.RatesChanged) for effect in effects):
            effects += self.admission.welcome_all(now)
        return effects

    def _beat_to(self, member: Member, now: float) -> list[ev.Effect]:
        self.allowance.acknowledged(member, now)
        return [ev.Send(member.peer, self.state.beat(member, now))]

    # Messages and chunks.

    def _received(self, event: ev.Received, now: float) -> list[ev.Effect]:
        message = event.message
        if isinstance(message, msg.Hello):
            # A broker that stops admits nobody, but still gives way to its successor.
            answer = self.admission.hello(event, now) if not self.lifecycle.stopping else []
            return answer + self.lifecycle.give_way(message)
        if (told := self.admission.layouts.answer(event, now)) is not None:
            return told
        member = self.state.roster.by_peer(event.peer)
        if member is None:
            error = RemoteProtocolError(
                ErrorCode.UNKNOWN_SESSION, "no session on this connection", remedy="say Hello first"
            )
            return [ev.Send(event.peer, refusal(error))]
        effects: list[ev.Effect] = []
        if self.state.roster.heard(member, now):
            effects.append(
                ev.Note("info", f"{member.name} is heard from again", about=f"heard {member.name}")
            )
        match message:
            case msg.Report():
                self._report(member, message, now)
                serving.acknowledge(member, message.received, event.sent, now)
                effects.append(ev.Acknowledge(member.name, message.received))
            case msg.Push():
                effects += self.intake.push(member, message, now)
            case msg.Decline():
                effects += self.intake.decline(member, message)
            case msg.Adopted(fragment, version):
                if serving.adopt(self.state, member, fragment, version, now):
                    self.scheduler.adopted(fragment, version, now)
            case msg.Fetch(fragment, have_version):
                effects += serving.fetch(self.state, member, fragment, have_version)
            case msg.Missing():
                effects += serving.resend(self.state, member, message)
            case msg.Alive(nonce):
                effects += self.admission.alive(member, nonce, now)
            case msg.LayoutPart():
                effects += self.admission.layout_part(member, message, now)
            case msg.Bye(reason):
                effects += self._lose(member, f"said Bye ({reason})", now, left=True)
            case _:
                error = RemoteProtocolError(
                    ErrorCode.BAD_MESSAGE,
                    f"{member.name} sent a message that only a broker sends",
                    got=type(message).__name__,
                )
                self.state.tally.refuse(error.code)
                effects.append(ev.Send(event.peer, refusal(error)))
        return effects

    def _report(self, member: Member, report: msg.Report, now: float) -> None:
        member.report = report
        member.stepping = stepped(member.stepping, report.step, now)

    def _unpacked(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        self.intake.decoded(header)
        if header.kind is msg.DataKind.PUSH:
            return self.intake.unpacked(header, handle, now)
        # The learner may have been replaced while its chunk was decoded.
        member = self.state.roster.get(header.learner)
        if member is None or member.incarnation != header.incarnation:
            return [ev.Drop((handle,))]
        return self.founding.chunk(member, header, handle, now)

    def _damaged(
        self, header: msg.Header, handle: int, error: RemoteProtocolError
    ) -> list[ev.Effect]:
        self.intake.decoded(header)
        if header.kind is msg.DataKind.PUSH:
            return self.intake.damaged(header, handle, error)
        return [ev.Drop((handle,)), *self.founding.damaged(header, error)]

    def _lose(
        self, member: Member, reason: str, now: float, *, left: bool = False
    ) -> list[ev.Effect]:
        """A learner is gone: its unfinished pushes go, its complete contributions stay."""
        self.state.roster.disconnect(member, left=left)
        return [
            ev.Forget(member.name),
            ev.Note("info", f"{member.name} left: {reason}", about=f"left {member.name}"),
            ev.LogFate("left", member.name, member.incarnation, reason=reason),
            *drop_pushes(self.state, member.name),
            *self.admission.lost(member, now),
        ]

    def _aged(self, member: Member, now: float) -> list[ev.Effect]:
        quiet = f"nothing heard for {now - member.presence.heard_at:.1f} s"
        if member.presence.liveness is Liveness.LOST:
            return self._lose(member, quiet, now)
        text = f"{member.name} is late: {quiet}"
        return [ev.Note("warning", text, about=f"late {member.name}")]

    def _resume(self, resumed: Resumed) -> None:
        state = self.state
        assert resumed.run_tokens >= 0 and all(head.version >= 0 for head in resumed.heads)
        state.layout, state.frozen_digest = resumed.layout, resumed.frozen_digest
        state.fingerprint = fingerprint(resumed.layout, resumed.frozen_digest)
        state.table = build_table(resumed.layout, state.settings.fragment_count)
        state.heads = list(resumed.heads)
        count, now = len(state.table), state.tally.started_at
        assert len(state.heads) == count and 0 <= resumed.token_parts < count
        state.clock.begin(count, now, resumed.run_tokens * count + resumed.token_parts)
        state.phase, state.epoch_resumed = resumed_phase(resumed.phase), True
        # Publications of earlier lives are gone with the memory that kept them.
        state.first_kept = [head.version + 1 for head in resumed.heads]
        state.merged_pushes = dict(resumed.merged_pushes)
        names = sorted({name for name, _, _ in resumed.merged_pushes})
        # They count as gone since the start, or names that never return would be kept for ever.
        state.roster.remember(names, now)
        for name in names:
            state.clock.expect(name, now)
        self.lifecycle.resumed(resumed.checkpoint_sum)
