"""The run as an operator sees it. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from narrows.broker.syncer.machine import Syncer
from narrows.broker.syncer.members import Member
from narrows.proto import messages as msg


class Bytes(Protocol):
    """Bytes of ZeroMQ frames with one learner."""

    up_bytes: int
    down_bytes: int


def status_of(syncer: Syncer, traffic: Mapping[str, Bytes], now: float) -> msg.Status:
    """What `narrows status` shows."""
    state = syncer.state
    tally = state.tally
    return msg.Status(
        run_id=state.run_id,
        epoch=state.epoch,
        phase=state.told_phase,
        mode=state.settings.mode,
        uptime_s=now - tally.started_at,
        versions=state.versions,
        rounds=state.open_rounds(),
        run_tokens=state.clock.run_tokens,
        goal_tokens=state.settings.goal_tokens,
        tokens_per_s=state.tokens_per_s(now),
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
        learners=tuple(_learner(member, traffic, now) for member in state.roster),
    )


def _waiting_for(syncer: Syncer) -> str:
    """One phrase that names what the run waits for, "" if nothing holds it up."""
    state = syncer.state
    if syncer.lifecycle.journal_fails:
        return "the disk: the journal cannot be written"
    if state.phase is msg.Phase.FOUNDING and not state.heads:
        return "version 0 from the first learner"
    if state.phase is msg.Phase.FOUNDING:
        wanted = state.config.run.learners_at_start
        return f"learners, {len(state.roster.connected())} of {wanted} are here"
    if adopting := syncer.scheduler.adopting:
        return f"{', '.join(adopting)} to adopt the fragments"
    if state.phase is not msg.Phase.ENDED and not state.roster.ready():
        return "a learner"
    if state.open_rounds():
        return syncer.scheduler.waiting_for
    if state.phase is not state.told_phase:
        return "the disk: the final checkpoint"
    if state.phase is msg.Phase.ENDED and (names := syncer.lifecycle.waiting.holders_up):
        return f"{', '.join(names)} to take the final model"
    merging = ", ".join(map(str, sorted(state.rounds)))
    return f"fragment {merging}: merged, then written to disk" if merging else ""


def _state(member: Member) -> str:
    if member.left:
        return "left"
    if member.given_up and member.connected:
        return "given up"
    return str(member.state) if member.ready or not member.connected else "joining"


def _learner(member: Member, traffic: Mapping[str, Bytes], now: float) -> msg.LearnerStatus:
    entry = traffic.get(member.name)
    return msg.LearnerStatus(
        name=member.name,
        incarnation=member.incarnation,
        address=member.address,
        state=_state(member),
        last_heard_s=now - member.heard_at,
        step=member.step,
        tokens=member.tokens,
        step_s=member.step_s,
        loss=member.loss,
        contributions=member.contributions,
        refused=member.refused,
        missed_running=member.missed_running,
        ledger=member.ledger,
        up_bytes=entry.up_bytes if entry else 0,
        down_bytes=entry.down_bytes if entry else 0,
    )
