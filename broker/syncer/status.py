"""The status that `narrows status` shows: members, rounds, what the run waits for, hints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from narrows import __version__
from narrows.broker.config import BrokerConfig
from narrows.broker.records import finite
from narrows.broker.syncer.ending import Ending
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.rounds import Rounds
from narrows.broker.syncer.seeding import Seeding
from narrows.broker.syncer.state import FragmentRound, Stage, State
from narrows.broker.verdict import named
from narrows.proto.errors import ErrorCode, short
from narrows.proto.messages import (
    TEXT_CHARACTERS_MAX,
    FragmentStatus,
    LearnerState,
    LearnerStatus,
    LineStatus,
    MergeStatus,
    Mode,
    Phase,
    QuorumStatus,
    RefusalStatus,
    SettingsStatus,
    Status,
)
from narrows.proto.timing import LEAVE_S

NO_DATA_S: Final = 10.0
"""A learner that has announced a push and sent nothing for this long cannot reach the uplink. One
that has taken no version for this long, though there is one, cannot be reached by the downlink."""

OWING_S: Final = 30.0
"""A round that collects for this long, and for a period, waits for somebody: it says for whom."""

REFUSED_S: Final = 600.0
REFUSED_MAX: Final = 64
"""Refusals that a Status names: those of so many seconds, and no more of them, the newest."""

SECONDS_MAX: Final = 1e9
"""Bound of the type Seconds."""

NAMED_MAX: Final = 8
"""Most names in one line."""


def status(state: State, seeding: Seeding, rounds: Rounds, ending: Ending, now: float) -> Status:
    """All that the syncer knows of the run: the host adds what its line, disk and process tell.

    The cost is one look at each learner and one at each fragment, not at each pair of them.
    """
    settings = state.settings
    goal_tokens = settings.goal_tokens
    tokens_per_s = state.clock.tokens_per_s(now)
    run_tokens = state.clock.run_tokens
    left_s = None
    if goal_tokens and tokens_per_s:
        left_s = min(SECONDS_MAX, max(0, goal_tokens - run_tokens) / tokens_per_s)
    ends = state.phase in (Phase.ENDING, Phase.ENDED)
    announced = _announced(state, seeding)
    learners = {
        member.name: _learner(state, member, announced.get(member.incarnation), now)
        for member in state.members
    }
    uplink_port, downlink_port = state.ports
    return Status(
        narrows=__version__,
        run_id=state.run_id,
        epoch=state.epoch,
        phase=state.phase.value,
        stopping=state.stopping[:TEXT_CHARACTERS_MAX],
        uplink_port=uplink_port,
        downlink_port=downlink_port,
        uptime_s=now - state.started_at,
        run_tokens=run_tokens,
        goal_tokens=goal_tokens,
        tokens_per_s=tokens_per_s,
        left_s=left_s,
        period_s=state.period_s,
        sync_s=rounds.sync_s,
        merges=rounds.merges,
        contributions=rounds.contributions,
        waiting_for=tuple(
            line[:TEXT_CHARACTERS_MAX]
            for line in _waiting_for(state, seeding, ending, learners, now)
        ),
        awaited=tuple(member.name for member in ending.awaited(now)) if ends else (),
        last_merge=_last_merge(rounds, now),
        quorum=_quorum(state, rounds, learners.values(), now),
        settings=_settings(state.config),
        line=LineStatus(
            up_limit=float(state.config.wan.up),
            down_limit=float(state.config.wan.down),
            total_up_limit=float(state.config.wan.total_up),
            total_down_limit=float(state.config.wan.total_down),
        ),
        refused=tuple(
            RefusalStatus(name, ErrorCode.WRONG_RUN, text, now - seen_at, times)
            for name, (text, seen_at, times) in list(state.strangers.items())[-REFUSED_MAX:]
            if now < seen_at + REFUSED_S
        ),
        fragments=tuple(
            _fragment(state, fragment, slot, now) for fragment, slot in enumerate(state.rounds)
        ),
        learners=learners,
    )


def _settings(config: BrokerConfig) -> SettingsStatus:
    shared = config.shared
    return SettingsStatus(
        mode=shared.mode,
        fragments=shared.fragments,
        sync_period_steps=shared.sync_period_steps,
        overlap_steps=shared.overlap_steps,
        keep=shared.keep,
        push_codec=shared.push_codec,
        push_rho=shared.push_rho,
        publish_codec=config.codec.publish,
        streams=shared.streams,
    )


def _quorum(
    state: State, rounds: Rounds, learners: Iterable[LearnerStatus], now: float
) -> QuorumStatus:
    states = Counter(each.state for each in learners)
    training = states[LearnerState.TRAINING]
    ready = training + states[LearnerState.PAUSED] + states[LearnerState.STALLED]
    needed = state.config.merge.quorum
    runs = state.phase is Phase.RUNNING
    return QuorumStatus(
        needed=needed,
        at_start=state.config.run.learners_at_start,
        here=ready + states[LearnerState.JOINING],
        ready=ready,
        training=training,
        idle_s=now - rounds.trained_at if runs and not training else 0.0,
        short_s=now - rounds.enough_at if runs and training < needed else 0.0,
    )


def _last_merge(rounds: Rounds, now: float) -> MergeStatus | None:
    last = rounds.last_merge
    if last is None:
        return None
    names = tuple(push.learner for push in last.taken)
    return MergeStatus(last.fragment, last.version, now - last.at, last.reason, names)


def _fragment(state: State, fragment: int, slot: FragmentRound, now: float) -> FragmentStatus:
    begun_at = {
        Stage.IDLE: now,
        Stage.COLLECTING: slot.launched_at,
        Stage.MERGING: slot.due_at,
        Stage.COMMITTING: slot.merged_at,
    }
    return FragmentStatus(
        elements=state.elements[fragment] if state.elements else 0,
        version=state.heads[fragment] if state.heads else -1,
        version_s=now - slot.durable_at,
        stage=slot.stage.value,
        stage_s=now - begun_at[slot.stage],
        pushes=len(slot.here()) + len(slot.taken),
    )


def _learner(state: State, member: Member, announced_at: float | None, now: float) -> LearnerStatus:
    """`announced_at` is since when data of it are to come.

    Merged tokens are divided by the number of fragments, so that a learner whose work is all merged
    has as many of them as it has logged.
    """
    told = member.told
    merged_tokens = member.merged_tokens // state.settings.fragments
    word, since = _state(state, member, now)
    no_data_s = _no_data_s(member, announced_at, now)
    no_version_s = _no_version_s(state, member, now)
    hint = ""
    if no_data_s >= NO_DATA_S or no_version_s:
        hint = " ".join(_hints(state, member, no_data_s, no_version_s).values())
    return LearnerStatus(
        incarnation=member.incarnation,
        state=word,
        reason=short(told.paused) if told.paused else "",
        since_s=now - since,
        paused_s=None if told.paused is None else now - member.paused_at,
        heard_s=now - member.heard_at,
        stepped_s=now - member.stepped_at,
        merged_s=now - member.merged_at if member.contributions else None,
        taken_s=now - member.taken_at if member.versions_behind else 0.0,
        no_data_s=no_data_s,
        no_version_s=no_version_s,
        steps=told.steps,
        steps_per_s=1 / member.step_s if member.step_s else 0.0,
        loss=finite(told.loss),
        # A Report may be a second old: tokens that it does not count may be merged already.
        logged_tokens=max(told.tokens, merged_tokens),
        merged_tokens=merged_tokens,
        lost_tokens=told.lost_tokens,
        contributions=member.contributions,
        versions_behind=member.versions_behind,
        up_bits_per_s_granted=member.up_bits_per_s,
        hint=hint,
    )


def _state(state: State, member: Member, now: float) -> tuple[LearnerState, float]:
    """One word for a learner, and since when it is true."""
    if member.has_left:
        return LearnerState.LEFT, member.heard_at
    if not member.is_connected:
        word = LearnerState.REVOKED if member.is_revoked else LearnerState.LOST
        return word, member.heard_at
    if not member.is_heard(now):
        return LearnerState.SILENT, member.heard_at
    if not member.has_model:
        return LearnerState.JOINING, member.changed_at
    if member.told.paused is not None:
        return LearnerState.PAUSED, member.changed_at
    if state.phase is Phase.RUNNING and member.is_stalled(now):
        return LearnerState.STALLED, member.stepped_at
    return LearnerState.TRAINING, member.changed_at


def _waiting_for(
    state: State,
    seeding: Seeding,
    ending: Ending,
    learners: Mapping[str, LearnerStatus],
    now: float,
) -> list[str]:
    """Names what the run waits for, in words; empty if it just runs, or if other fields tell it:
    the disk, a stop, and those that an ended run waits for."""
    if state.phase is Phase.SEEDING:
        return [seeding.waiting_for(now)]
    lines: list[str] = []
    if state.stopping or state.closing:
        return lines
    if state.phase is not Phase.RUNNING and ending.expects_strangers(now):
        lines.append(
            "learners of the broker's last life, for another "
            f"{math.ceil(state.started_at + LEAVE_S - now)} s"
        )
    if state.phase is Phase.ENDED:
        return lines
    connected = state.members.connected()
    deaf = [member for member in connected if learners[member.name].no_version_s]
    lines += [f"new versions to reach {member.name}" for member in deaf[:NAMED_MAX]]
    for fragment in state.collecting():
        if state.phase is Phase.ENDING:
            owing = ending.owing(fragment, now)
        elif now < state.rounds[fragment].launched_at + max(OWING_S, state.period_s):
            continue  # A round that just collects is no news.
        else:
            owing = state.absent(fragment, now)
        blamed = [member for member in owing if member not in deaf]
        if blamed:
            names = named((member.name for member in blamed), NAMED_MAX)
            lines.append(f"{names} to push fragment {fragment}")
    return lines


def _announced(state: State, seeding: Seeding) -> dict[str, float]:
    """Incarnation -> since when data of it are to come: when the oldest of its pushes was
    announced, or version 0 was asked for."""
    announced: dict[str, float] = {}
    if seeding.seeder is not None and seeding.asked(seeding.seeder.incarnation):
        announced[seeding.seeder.incarnation] = seeding.asked_at
    for slot in state.rounds:
        for incarnation, waiting in slot.inbox.items():
            if waiting.is_coming:
                before = announced.get(incarnation, math.inf)
                announced[incarnation] = min(before, waiting.announced_at)
    return announced


def _hints(state: State, member: Member, no_data_s: float, no_version_s: float) -> dict[str, str]:
    """Event -> where to look, for each thing that is wrong with a learner's lines."""
    hints: dict[str, str] = {}
    if no_data_s >= NO_DATA_S:
        hints["no_data"] = (
            f"no data from {member.name} for {no_data_s:.0f} s, though it has data to send: "
            f"does a firewall close port {state.ports[0]} (uplink) of the broker?"
        )
    if no_version_s:
        hints["no_version"] = (
            f"{member.name} has taken no new version for {no_version_s:.0f} s: does a firewall "
            f"close port {state.ports[1]} (downlink) of the broker, or is its line or its relay "
            "late?"
        )
    return hints


def _no_data_s(member: Member, announced_at: float | None, now: float) -> float:
    """For how long a learner that is here has data to send and has sent nothing."""
    if announced_at is None or not member.is_heard(now):
        return 0.0
    return now - max(announced_at, member.data_at)


def _no_version_s(state: State, member: Member, now: float) -> float:
    """For how long a learner that trains, or fetches the model, has taken no version though there
    is one; 0 if it takes them. Nobody is suspected for being slow."""
    since_s = now - member.taken_at
    # The cheap questions first: this is asked for each learner at each Beat.
    if (
        since_s < NO_DATA_S
        or not state.is_open
        or not member.is_heard(now)
        or (member.has_model and not member.versions_behind)
        or not _expects_a_version(state, member, now)
    ):
        return 0.0
    return since_s


def _expects_a_version(state: State, member: Member, now: float) -> bool:
    """Whether a learner would have taken a version by now if its line worked."""
    if not member.is_ready:
        # It fetches the model, and repeats its questions: as long as chunks come it asks for
        # others.
        return member.asked_at > max(now - NO_DATA_S, member.taken_at + NO_DATA_S / 2)
    # A line that takes longer than a period for a publication can never keep up.
    if now - member.taken_at < state.period_s:
        return False
    # A learner that trains adopts at boundaries alone, so two have passed; in lockstep it makes no
    # step without a new version.
    return member.told.steps >= member.taken_steps + 2 or state.settings.mode is Mode.DILOCO


def warn_of_silence(state: State, seeding: Seeding, now: float) -> None:
    """Writes one line for each learner whose data do not come, or that cannot be reached."""
    announced = _announced(state, seeding)
    for member in state.members.connected():
        no_data_s = _no_data_s(member, announced.get(member.incarnation), now)
        hints = _hints(state, member, no_data_s, _no_version_s(state, member, now))
        for event, hint in hints.items():
            if event not in member.told_hints:
                state.note(event, hint, warning=True, learner=member.name)
        member.told_hints = set(hints)
