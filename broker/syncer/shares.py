"""Rates of the uplink: each learner's own limit, and its share of what all may send together.

A share is lowered before another one is raised: at no time may the learners send more than the
total.
"""

from __future__ import annotations

import math
from typing import Final

from narrows.broker.syncer.members import Member
from narrows.broker.syncer.state import State

CONFIRM_S: Final = 0.5
"""A Report that comes this long after a lower rate was told shows that it was heard; an earlier one
may have been on its way already."""

RATE_MIN: Final = 1000.0
"""Bit/s that a learner has while nothing is free for it: 0 would mean no limit."""


def advance(state: State, now: float, newcomer: Member | None = None) -> None:
    """Sets the rates of all connected learners, and tells them; the newcomer's stands in its
    Welcome."""
    wan, members = state.config.wan, state.members.connected()
    if not members:
        return
    own, total = float(wan.up) or math.inf, float(wan.total_up) or math.inf
    target = min(own, total / len(members))
    if target == math.inf:
        return  # Nobody has a limit.
    before = [member.up_bits_per_s for member in members]
    for member in members:
        _lower(member, target, now)
    _raise(members, target, total)
    for member, rate in zip(members, before, strict=True):
        if member.up_bits_per_s != rate and member is not newcomer:
            state.send(member, state.beat(member, now))


def _lower(member: Member, target: float, now: float) -> None:
    """Lowers a rate at once. The old one is in force until a Report shows that it was heard."""
    if member.up_bits_per_s == 0:
        member.up_bits_per_s = min(RATE_MIN, target)
        member.up_in_force = max(member.up_in_force, member.up_bits_per_s)
        member.lowered_at = now
    elif member.up_bits_per_s > target:
        member.up_bits_per_s, member.lowered_at = target, now
    elif member.reported_at >= member.lowered_at + CONFIRM_S:
        member.up_in_force = member.up_bits_per_s


def _raise(members: list[Member], target: float, total: float) -> None:
    """Raises rates, in the order of joining, as far as the total has room."""
    free = max(0.0, total - sum(member.up_in_force for member in members))
    for member in members:
        raised = min(target, member.up_in_force + free)
        if raised > member.up_bits_per_s:
            free -= max(0.0, raised - member.up_in_force)
            member.up_bits_per_s = raised
            member.up_in_force = max(member.up_in_force, raised)


def check(state: State) -> None:
    """Asserts that what is in force is within the total."""
    members, total = state.members.connected(), float(state.config.wan.total_up)
    used = sum(member.up_in_force for member in members)
    assert not total or used <= total * (1 + 1e-9) + RATE_MIN * len(members), (used, total)
