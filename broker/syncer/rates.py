"""Division of the uplink's total rate: equal among senders, never above it in sum. [pure]

A lowered share is free for others only when its holder has confirmed the lower rate. So the sum of
the rates that learners may use never exceeds the total. This module alone writes
`Member.up_bits_per_s`. All rates are in bit/s; 0 means no limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer.member import Member
from narrows.proto.timing import SHARE_DIVIDE_S, SHARE_IDLE_S

IDLE_SHARE: Final = 1 / 32
"""Fraction of an equal share reserved for an idle learner, so that it can start immediately."""

TINY: Final = 1000.0
"""Least rate in bit/s: 0 would mean no limit."""


@dataclass
class Shares:
    """Divides the total among the connected learners."""

    total: float
    each: float
    """Highest rate of one learner."""
    _active_until: dict[str, float] = field(default_factory=dict[str, float])
    _divided_at: float = -math.inf

    def set_rates(self, total: float, each: float) -> None:
        """Takes other limits; the next division is by these."""
        assert total >= 0.0 and each >= 0.0
        self.total, self.each, self._divided_at = total, each, -math.inf

    def admit(self, member: Member, members: Sequence[Member], now: float) -> None:
        """Sets the rate of a new learner, which is one of the connected `members`."""
        assert any(each is member for each in members)
        member.up_bits_per_s = 0.0 if self.total else self.each
        if self.total:
            _Room(self.total, members).give(member, self._wanted(members, now)[member.name])

    def divide(self, members: Sequence[Member], active: set[str], now: float) -> list[Member]:
        """Sets the rates of the connected learners; returns the learners whose rate has changed.

        `active` names the learners that have something to send now.
        """
        if now < self._divided_at + SHARE_DIVIDE_S:
            return []
        self._divided_at = now
        for name in active:
            self._active_until[name] = now + SHARE_IDLE_S
        # Names that left are dropped, or the table would grow with every learner that ever was.
        known = {member.name for member in members}
        self._active_until = {n: t for n, t in self._active_until.items() if n in known}
        if not self.total:
            changed = [member for member in members if member.up_bits_per_s != self.each]
            for member in changed:
                member.up_bits_per_s = self.each
            return changed
        before = {member.name: member.up_bits_per_s for member in members}
        wanted = self._wanted(members, now)
        # All are lowered before any is raised: only then is it known what is free.
        for member in members:
            granted = member.up_bits_per_s
            member.up_bits_per_s = min(granted, wanted[member.name]) if granted else 0.0
        room = _Room(self.total, members)
        for member in members:
            room.give(member, wanted[member.name])
            assert 0.0 < member.up_bits_per_s <= wanted[member.name]
        return [member for member in members if member.up_bits_per_s != before[member.name]]

    def _wanted(self, members: Sequence[Member], now: float) -> dict[str, float]:
        """Rate that each should have: the idle a little, the others equal parts of the rest."""
        if not members:
            return {}
        names = [m.name for m in members]
        senders = {name for name in names if now < self._active_until.get(name, -1.0)}
        # Where nobody sends, everybody may begin: all get the same.
        senders = senders or set(names)
        little = self.total / len(names) * IDLE_SHARE
        equal = (self.total - little * (len(names) - len(senders))) / len(senders)
        most = self.each or self.total
        wanted = {name: min(most, equal if name in senders else little) for name in names}
        assert sum(wanted.values()) <= self.total * (1 + 1e-9), "the shares are within the total"
        return wanted


class _Room:
    """Free part of the total: learners have confirmed that they do not use it."""

    def __init__(self, total: float, members: Sequence[Member]) -> None:
        assert total > 0.0
        self._total, self._count = total, len(members)
        self._taken = sum(_taken(member) for member in members)
        self._unlimited = sum(member.kept_bits_per_s == 0.0 for member in members)

    def give(self, member: Member, wanted: float) -> None:
        """Raises a learner's rate as far as it is wanted and free.

        A newcomer gets a little at once; all newcomers together get one IDLE_SHARE of the total.
        """
        assert 0.0 < wanted <= self._total
        own = _taken(member)
        others = self._taken - own
        if self._unlimited > (member.kept_bits_per_s == 0.0):
            others = max(others, self._total)  # One that knows of no limit may use all of it.
        # Negative where others still use more than their shares: then only a newcomer gets a bit.
        free = self._total - others
        if not member.up_bits_per_s:
            left = (IDLE_SHARE * self._total + min(free, 0.0)) / 2
            free = max(free, min(IDLE_SHARE * self._total / self._count, left), TINY)
        member.up_bits_per_s = max(member.up_bits_per_s, min(wanted, free))
        self._taken += _taken(member) - own


def _taken(member: Member) -> float:
    """Rate that a learner may be using: the granted one, or a higher one that it still keeps."""
    return max(member.up_bits_per_s, member.kept_bits_per_s or 0.0)
