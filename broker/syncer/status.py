"""The status that `narrows status` shows: members, rounds, what the run waits for, hints."""

from __future__ import annotations

import math
from typing import Final

from narrows.broker.syncer.ending import Ending
from narrows.broker.syncer.joining import STRANGER_S
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.rounds import Rounds
from narrows.broker.syncer.seeding import Seeding
from narrows.broker.syncer.state import Stage, State
from narrows.proto.errors import short
from narrows.proto.messages import Mode, Phase
from narrows.proto.timing import LEAVE_S

NO_DATA_S: Final = 10.0
"""A learner that has announced a push and sent nothing for this long cannot reach the uplink. One
that has taken no version for this long, though there is one, cannot be reached by the downlink."""

NAMED_MAX: Final = 8
"""Most names in one line."""


def status(
    state: State, seeding: Seeding, rounds: Rounds, ending: Ending, now: float
) -> dict[str, object]:
    """Everything that `narrows status` shows, except the bytes, which only the sockets know.

    Tokens of a learner are those of its newest incarnation. Merged tokens are divided by the number
    of fragments, so that a learner whose work is all merged has as many of them as it has logged.
    """
    return {
        "run_id": state.run_id,
        "epoch": state.epoch,
        "phase": state.phase.value,
        "mode": state.settings.mode.value,
        "downlink_port": state.ports[1],
        "streams": state.settings.streams,
        "uptime_s": round(now - state.started_at, 1),
        "run_tokens": state.clock.run_tokens,
        "goal_tokens": state.settings.goal_tokens,
        "tokens_per_s": round(state.clock.tokens_per_s(now), 1),
        "versions": list(state.heads),
        "period_s": round(state.period_s, 3),
        "sync_s": round(rounds.sync_s, 3),
        "merges": rounds.merges,
        "contributions": rounds.contributions,
        "waiting_for": waiting_for(state, seeding, ending, now),
        "rounds": [
            {
                "fragment": fragment,
                "stage": each.stage.value,
                "pushes": len(each.here()) + len(each.taken),
                "since_s": round(now - each.launched_at, 1),
            }
            for fragment, each in enumerate(state.rounds)
            if each.stage is not Stage.IDLE
        ],
        "learners": {member.name: _learner(state, member, now) for member in state.members},
    }


def _learner(state: State, member: Member, now: float) -> dict[str, object]:
    told = member.told
    merged_tokens = member.merged_tokens // state.settings.fragments
    behind = [head - base for head, base in zip(state.heads, member.bases, strict=False)]
    return {
        "incarnation": member.incarnation,
        "state": _state(member, now),
        "heard_s": round(now - member.heard_at, 1),
        "steps": told.steps,
        "steps_per_s": round(1 / member.step_s, 3) if member.step_s else 0.0,
        "loss": told.loss if told.loss is not None and math.isfinite(told.loss) else None,
        # A Report may be a second old: tokens that it does not count may be merged already.
        "logged_tokens": max(told.tokens, merged_tokens),
        "merged_tokens": merged_tokens,
        "contributions": member.contributions,
        "versions_behind": max(behind, default=0),
        "up_bits_per_s_granted": round(member.up_bits_per_s),
        "hint": " ".join(_hints(state, member, now).values()),
    }


def _state(member: Member, now: float) -> str:
    """One word, and the reason of a pause."""
    if member.has_left:
        return "left"
    if not member.is_connected:
        return "key revoked" if member.is_revoked else "lost"
    if not member.is_heard(now):
        return "silent"
    if not member.is_ready:
        return "joining"
    paused = member.told.paused
    return f"paused: {short(paused)}" if paused is not None else "training"


def waiting_for(state: State, seeding: Seeding, ending: Ending, now: float) -> list[str]:
    """Names what the run waits for, in words; empty if it just runs."""
    lines = [
        f"the disk: fragment {fragment} cannot be written ({slot.disk_error})"
        for fragment, slot in enumerate(state.rounds)
        if slot.disk_error
    ]
    newest = list(state.strangers.values())[-NAMED_MAX:]
    lines += [f"its operator: {text}" for text, seen_at in newest if now < seen_at + STRANGER_S]
    if state.stopping:
        return [*lines, f"nobody: the broker stops ({state.stopping})"]
    if state.phase is Phase.SEEDING:
        return [*lines, seeding.waiting_for(now)]
    if state.closing:
        return [*lines, "the disk: the end of the run is being written"]
    if state.phase is not Phase.RUNNING and ending.expects_strangers(now):
        lines.append(
            "learners of the broker's last life, for another "
            f"{math.ceil(state.started_at + LEAVE_S - now)} s"
        )
    if state.phase is Phase.ENDED:
        lacking = ending.awaited(now)
        return [*lines, f"{_listed(lacking)} to adopt the final model"] if lacking else lines

    connected = state.members.connected()
    deaf = [member for member in connected if _no_version(state, member, now)]
    lines += [f"new versions to reach {member.name}" for member in deaf[:NAMED_MAX]]
    if not state.members.awaited(now):
        return [*lines, f"learners: {_why_nobody_trains(connected)}"]
    for fragment in state.collecting():
        owing = state.absent(fragment, now)
        if state.phase is Phase.ENDING:
            owing = ending.owing(fragment, now)
        blamed = [member for member in owing if member not in deaf]
        if blamed:
            lines.append(f"{_listed(blamed)} to push fragment {fragment}")
    return lines


def _why_nobody_trains(connected: list[Member]) -> str:
    paused = [member for member in connected if member.told.paused is not None]
    if paused:
        return f"{_listed(paused)} paused"
    fetching = [member for member in connected if not member.is_ready]
    return f"{_listed(fetching)} to fetch the model" if fetching else "none is here"


def _listed(members: list[Member]) -> str:
    names = ", ".join(member.name for member in members[:NAMED_MAX])
    more = len(members) - NAMED_MAX
    return f"{names} and {more} more" if more > 0 else names


def _hints(state: State, member: Member, now: float) -> dict[str, str]:
    """Event -> where to look, for each thing that is wrong with a learner's lines."""
    hints = {
        "no_data": _no_data(state, member, now),
        "no_version": _no_version(state, member, now),
    }
    return {event: hint for event, hint in hints.items() if hint}


def _no_data(state: State, member: Member, now: float) -> str:
    """A hint where to look if a learner's pushes are announced and bring no data; "" if they do."""
    waiting = [slot.inbox.get(member.incarnation) for slot in state.rounds]
    announced_at = [each.announced_at for each in waiting if each and each.is_coming]
    if not announced_at or not member.is_heard(now):
        return ""
    since = max(min(announced_at), member.data_at)
    if now < since + NO_DATA_S:
        return ""
    return (
        f"no data from {member.name} for {now - since:.0f} s, though it has announced a push: "
        f"does a firewall close port {state.ports[0]} (uplink) of the broker?"
    )


def _no_version(state: State, member: Member, now: float) -> str:
    """A hint where to look if a learner trains, or fetches the model, and takes no version though
    there is one; "" if it takes them. Nobody is suspected for being slow."""
    since_s = now - member.taken_at
    # The cheap questions first: this is asked for each learner at each Beat.
    if (
        since_s < NO_DATA_S
        or not state.is_open
        or not member.is_heard(now)
        or member.bases == tuple(state.heads)
        or not _expects_a_version(state, member, now)
    ):
        return ""
    return (
        f"{member.name} has taken no new version for {since_s:.0f} s: does a firewall close port "
        f"{state.ports[1]} (downlink) of the broker, or is its line or its relay late?"
    )


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


def warn_of_silence(state: State, now: float) -> None:
    """Writes one line for each learner whose data do not come, or that cannot be reached."""
    for member in state.members.connected():
        hints = _hints(state, member, now)
        for event, hint in hints.items():
            if event not in member.told_hints:
                state.note(event, hint, warning=True, learner=member.name)
        member.told_hints = set(hints)
