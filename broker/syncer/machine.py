"""The syncer: opens rounds, collects contributions, has them merged, publishes. [pure]

What decides stands here and in the files it names: `admission` (who joins), `intake` (what is a
valid contribution), `quorum` (when to merge), `members` (who is alive), `run_clock` (how far the
run is). Events come in with `now`, effects go out in order; no sockets, tensors, clocks, threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.config import BrokerConfig, settings
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.admission import Admission
from narrows.broker.syncer.credit import Allowance
from narrows.broker.syncer.founding import Founding
from narrows.broker.syncer.members import Liveness, Member, Roster
from narrows.broker.syncer.phases import Lifecycle
from narrows.broker.syncer.pushes import Intake
from narrows.broker.syncer.run import MergedPushes, RunState, drop_pushes, refusal
from narrows.broker.syncer.scheduler import Scheduler
from narrows.broker.syncer.tally import Tally
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.fragments import build_table
from narrows.proto.limits import PUBLICATIONS_KEPT


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint gives to a new epoch of the same run."""

    layout: tuple[msg.LayoutEntry, ...]
    frozen_digest: int
    heads: tuple[msg.FragmentHead, ...]
    run_tokens: int
    phase: msg.Phase
    merged_pushes: MergedPushes = field(default_factory=dict[tuple[str, str, int], tuple[int, int]])
    checkpoint_sum: int | None = None
    """Sum of the versions in the checkpoint; None: that of `heads`."""


class Syncer:
    """The state machine that merges: one epoch of one run (of one shard)."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        run_id: str,
        epoch: msg.Epoch,
        now: float,
        resumed: Resumed | None = None,
        from_file: bool = False,
    ) -> None:
        roster = Roster(config.liveness.late, config.liveness.lost)
        self.state = RunState(config, settings(config), run_id, epoch, roster, Tally(now))
        self.founding = Founding(self.state, from_file)
        self.admission = Admission(self.state, self.founding)
        self.intake = Intake(self.state)
        self.allowance = Allowance(self.state, self.founding)
        self.scheduler = Scheduler(self.state, launched_at=now)
        self.lifecycle = Lifecycle(self.state, self.scheduler, started_at=now)
        #: Phase and rounds that the last Beat told.
        self._told = (msg.Phase.FOUNDING, frozenset[msg.OpenRound]())
        self._beat_at = now
        if resumed is not None:
            self._resume(resumed)

    # The three methods of a state machine.

    def handle(self, event: ev.Event, *, now: float, more: bool = False) -> list[ev.Effect]:
        """Takes one event in; returns what is to be done, in order.

        `more`: others wait already. What time decides is left to the last of them, or a shell
        that was held up would charge its own delay to all whose messages come after the first.
        """
        effects: list[ev.Effect] = []
        match event:
            case ev.Received():
                effects = self._received(event, now)
            case ev.PeerLost(peer):
                member = self.state.roster.by_peer(peer)
                effects = self._lose(member, "its connection closed", now) if member else []
            case ev.ChunkArrived(header, handle):
                effects = self.intake.arrived(header, handle, now)
                effects += self.allowance.arrived(header, now)
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
        """When `handle(DeadlineReached())` is due if nothing else happens; None: it is over."""
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
        """Asserts every invariant; cheap enough to run after each event in tests."""
        state = self.state
        assert len(state.rounds) <= state.config.merge.rounds_in_flight
        assert state.heads or not state.rounds
        for index, round_ in state.rounds.items():
            assert round_.fragment == index
            assert round_.base_version == state.heads[index].version
            if round_.merging:
                assert len(round_.contributed) >= round_.quorum
                assert not round_.incoming
            for name, done in round_.contributed.items():
                assert done.learner == name
                assert done.tokens > 0
                assert name not in round_.incoming
        for member in state.roster:
            for held, head in zip(member.held, state.heads, strict=False):
                assert held <= head.version

    # What every event may have made possible.

    def _advance(self, now: float) -> list[ev.Effect]:
        if self.lifecycle.finished:
            return []
        effects = self.admission.expire(now)
        for member in self.state.roster.age(now):
            effects += self._aged(member, now)
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
        """Tells the state to everybody on change, and every second."""
        state = self.state
        due = now >= self._beat_at + state.config.broker.beat
        # A round that is over needs no Beat of its own: its publication tells the version.
        told = (state.told_phase, frozenset(state.open_rounds()))
        if told[0] is self._told[0] and told[1] <= self._told[1] and not due:
            return []
        self._told = told
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
        assert member.peer is not None
        self.allowance.told(member, now)
        return [ev.Send(member.peer, self.state.beat(member, now))]

    # Messages and chunks.

    def _received(self, event: ev.Received, now: float) -> list[ev.Effect]:
        message = event.message
        if isinstance(message, msg.Hello):
            answer = self.admission.hello(event, now) if not self.lifecycle.stopping else []
            return answer + self._give_way(message)
        member = self.state.roster.by_peer(event.peer)
        if member is None:
            error = RemoteProtocolError(
                ErrorCode.UNKNOWN_SESSION, "no session on this connection", remedy="say Hello first"
            )
            return [ev.Send(event.peer, refusal(error))]
        effects: list[ev.Effect] = []
        if self.state.roster.heard(member, now):
            effects.append(ev.Note("info", f"{member.name} is heard from again"))
        match message:
            case msg.Report():
                self._report(member, message, now)
                effects.append(ev.Acknowledge(member.name, message.received))
            case msg.Push():
                effects += self.intake.push(member, message, now)
            case msg.Decline():
                effects += self.intake.decline(member, message)
            case msg.Adopted(fragment, version):
                self._adopted(member, fragment, version, now)
            case msg.Fetch(fragment, have_version):
                effects += self._fetch(member, fragment, have_version)
            case msg.Missing():
                effects += self._resend(member, message)
            case msg.Alive(nonce):
                effects += self.admission.alive(member, nonce, now)
            case msg.Bye(reason):
                member.left = True
                effects += self._lose(member, f"said Bye ({reason})", now)
            case _:
                error = RemoteProtocolError(
                    ErrorCode.BAD_MESSAGE,
                    f"{member.name} sent a message that only a broker sends",
                    got=type(message).__name__,
                )
                self.state.tally.refuse(error.code)
                effects.append(ev.Send(event.peer, refusal(error)))
        return effects

    def _give_way(self, hello: msg.Hello) -> list[ev.Effect]:
        """Ends a broker that another one has replaced: two that serve would make two models."""
        state = self.state
        if hello.run_id != state.run_id or hello.epoch[0] <= state.epoch[0]:
            return []
        reason = (
            f"a broker of term {hello.epoch[0]} serves this run now, {hello.name} has met it;"
            f" this one is of term {state.epoch[0]}"
        )
        return [ev.Note("error", reason), *self.lifecycle.stop(reason)]

    def _report(self, member: Member, report: msg.Report, now: float) -> None:
        member.step, member.tokens = report.step, report.tokens
        member.step_s, member.loss, member.ledger = report.step_s, report.loss, report.ledger
        member.keeps_bits_per_s = report.up_bits_per_s
        member.down.move(report.received, now)
        self.state.clock.report(member.incarnation, report.tokens, now)

    def _adopted(self, member: Member, fragment: int, version: int, now: float) -> None:
        if fragment < len(self.state.heads) and version <= self.state.heads[fragment].version:
            if version > member.held[fragment]:  # It is told again after each Welcome.
                self.scheduler.adopted(fragment, version, now)
            member.held[fragment] = version

    def _unpacked(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        if header.kind is msg.DataKind.PUSH:
            return self.intake.unpacked(header, handle, now)
        member = self.state.roster.get(header.learner)
        if member is None or member.incarnation != header.incarnation:
            return [ev.Drop((handle,))]
        return self.founding.chunk(member, header, handle, now)

    def _damaged(
        self, header: msg.Header, handle: int, error: RemoteProtocolError
    ) -> list[ev.Effect]:
        if header.kind is msg.DataKind.PUSH:
            return self.intake.damaged(header, handle, error)
        return [ev.Drop((handle,)), *self.founding.damaged(header, error)]

    def _lose(self, member: Member, reason: str, now: float) -> list[ev.Effect]:
        """A learner is gone: its unfinished pushes go, its complete contributions stay."""
        self.state.roster.disconnect(member)
        return [
            ev.Forget(member.name),
            ev.Note("info", f"{member.name} left: {reason}"),
            ev.LogFate("left", member.name, member.incarnation, reason=reason),
            *drop_pushes(self.state, member.name),
            *self.admission.lost(member, now),
        ]

    def _aged(self, member: Member, now: float) -> list[ev.Effect]:
        quiet_s = now - member.heard_at
        if member.state is Liveness.LOST:
            return self._lose(member, f"nothing heard for {quiet_s:.0f} s", now)
        return [ev.Note("warning", f"{member.name} is late: nothing heard for {quiet_s:.1f} s")]

    # What learners ask for.

    def _fetch(self, member: Member, fragment: int, have_version: int) -> list[ev.Effect]:
        """Fills a small gap with the publications that were kept, a large one with the State."""
        state = self.state
        if fragment >= len(state.told_heads()):
            return []
        head = state.heads[fragment].version
        if have_version >= head:
            return []
        push_id = member.last_merged[fragment]
        oldest = max(state.first_kept[fragment], head - PUBLICATIONS_KEPT + 1)
        if have_version + 1 >= oldest:
            return [
                ev.Publish(member.name, fragment, version, push_id)
                for version in range(have_version + 1, head + 1)
            ]
        return [ev.Publish(member.name, fragment, head, push_id, (), msg.DataKind.STATE)]

    def _resend(self, member: Member, missing: msg.Missing) -> list[ev.Effect]:
        state = self.state
        down = (msg.DataKind.PUBLICATION, msg.DataKind.STATE)
        if missing.fragment >= len(state.told_heads()) or missing.kind not in down:
            return []
        elements = state.table[missing.fragment].elements
        ranges = tuple((o, min(c, elements - o)) for o, c in missing.ranges if c and o < elements)
        head = state.heads[missing.fragment].version
        oldest = max(state.first_kept[missing.fragment], head - PUBLICATIONS_KEPT + 1)
        kept = oldest <= missing.version <= head
        if missing.kind is msg.DataKind.PUBLICATION and not kept:
            return self._fetch(member, missing.fragment, missing.version - 1)
        push_id = member.last_merged[missing.fragment]
        kind = missing.kind
        return [ev.Publish(member.name, missing.fragment, missing.version, push_id, ranges, kind)]

    def _resume(self, resumed: Resumed) -> None:
        state = self.state
        state.layout, state.frozen_digest = resumed.layout, resumed.frozen_digest
        state.table = build_table(resumed.layout, state.settings.fragment_count)
        state.heads = list(resumed.heads)
        state.clock.run_tokens = resumed.run_tokens
        state.phase, state.epoch_resumed = resumed.phase, True
        state.first_kept = [head.version + 1 for head in resumed.heads]
        state.merged_pushes = dict(resumed.merged_pushes)
        names = sorted({name for name, _, _ in resumed.merged_pushes})
        state.roster.remember(names, state.tally.started_at)
        self.lifecycle.resumed(resumed.checkpoint_sum)
