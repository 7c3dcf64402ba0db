"""The view of a run that operators get: counts, phase, learners, and what holds it up. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from narrows.broker.syncer.machine import Syncer
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.run import RunState
from narrows.proto import messages as msg
from narrows.proto.key_holder import KeyHolder, KeyRole


class Bytes(Protocol):
    """Bytes of ZeroMQ frames exchanged with one learner."""

    up_bytes: int
    down_bytes: int


def status_of(syncer: Syncer, traffic: Mapping[str, Bytes], now: float) -> msg.Status:
    """Status message that `narrows status` shows."""
    assert now >= syncer.state.tally.started_at
    state = syncer.state
    tally = state.tally
    return msg.Status(
        run_id=state.run_id,
        epoch=state.epoch,
        phase=state.phase.visible,
        mode=state.settings.mode,
        uptime_s=now - tally.started_at,
        versions=state.versions,
        rounds=state.open_rounds(),
        run_tokens=state.clock.run_tokens,
        goal_tokens=state.settings.goal_tokens,
        tokens_per_s=state.clock.tokens_per_s(now),
        merges=tally.merges,
        contributions_merged=tally.contributions_merged,
        contributions_refused=dict(sorted(tally.refused.items())),
        mean_contributors_per_merge=tally.mean_contributors,
        longest_merge_gap_s=tally.longest_gap_s,
        norms_clipped=tally.norms_clipped,
        up_bytes=sum(entry.up_bytes for entry in traffic.values()),
        down_bytes=sum(entry.down_bytes for entry in traffic.values()),
        checkpoint_version=syncer.lifecycle.checkpoint_sum,
        waiting_for=_waiting_for(syncer),
        learners=tuple(_learner(state, member, traffic, now) for member in state.roster),
    )


def status_for(holder: KeyHolder | None, status: msg.Status) -> msg.Status:
    """As much of a status as the holder of a key may read; None: there are no keys."""
    if holder is None or holder.role is KeyRole.OPERATOR:
        return status
    own = tuple(each for each in status.learners if holder.speaks_for(each.name))
    # The phrase names other learners, and what they say.
    return msgspec.structs.replace(status, learners=own, waiting_for="")


def _waiting_for(syncer: Syncer) -> str:
    """One phrase that names what the run waits for; empty if nothing holds it up."""
    state = syncer.state
    # The most urgent reason comes first: a reader sees one line only.
    if syncer.lifecycle.journal_fails:
        return "the disk: the journal cannot be written"
    if state.phase is RunPhase.FOUNDING and not state.heads:
        return "version 0 from the first learner"
    if state.phase is RunPhase.FOUNDING:
        wanted = state.config.run.learners_at_start
        return f"learners, {len(state.roster.connected())} of {wanted} are here"
    if adopting := syncer.scheduler.adopting:
        return f"{', '.join(adopting)} to adopt the fragments"
    if not state.phase.is_over and not state.roster.ready():
        return "a learner"
    if state.open_rounds():
        return syncer.scheduler.waiting_for
    if state.phase is RunPhase.CLOSING:
        return "the disk: the final checkpoint"
    if state.phase is RunPhase.ENDED and (names := syncer.lifecycle.waiting.holders_up):
        return f"{', '.join(names)} to take the final model"
    merging = ", ".join(map(str, sorted(state.rounds)))
    return f"fragment {merging}: merged, then written to disk" if merging else ""


def _status_text(state: RunState, member: Member) -> str:
    """Word for a learner's state in the status table."""
    if member.connected and (suspect := state.suspects.get(member.name)) is not None:
        return "quarantined" if suspect.is_excluded else "suspected"
    if member.presence.left:
        return "left"
    if member.given_up and member.connected:
        return "given up"
    return str(member.presence.liveness) if member.ready or not member.connected else "joining"


def _learner(
    state: RunState, member: Member, traffic: Mapping[str, Bytes], now: float
) -> msg.LearnerStatus:
    entry, report = traffic.get(member.name), member.report
    return msg.LearnerStatus(
        name=member.name,
        incarnation=member.incarnation,
        address=member.presence.address,
        state=_status_text(state, member),
        last_heard_s=now - member.presence.heard_at,
        step=report.step if report else 0,
        tokens=report.tokens if report else 0,
        step_s=report.step_s if report else 0.0,
        loss=report.loss if report else None,
        contributions=member.participation.contributions,
        refused=member.uplink.refused,
        missed_running=member.participation.missed_running,
        ledger=report.ledger if report else msg.TokenLedger(),
        up_bytes=entry.up_bytes if entry else 0,
        down_bytes=entry.down_bytes if entry else 0,
    )
