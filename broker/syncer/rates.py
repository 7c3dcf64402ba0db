"""The learners' shares of the uplink's total: equal among those that send, never above it. [pure]

A share that is lowered is free for others only when its holder has confirmed that it keeps to the
lower rate: the sum of what learners may do at any instant never exceeds the total.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer.members import Member
from narrows.proto.timing import SHARE_DIVIDE_S, SHARE_IDLE_S

IDLE_SHARE: Final = 1 / 32
"""Of an equal share stays with a learner that has nothing to send: it can begin at once."""

TINY: Final = 1000.0
"""In bit/s: 0 would be no limit."""


@dataclass
class Shares:
    """Rates in bit/s; 0: no limit."""

    total: float
    each: float
    """Most that one learner may have."""
    _active_until: dict[str, float] = field(default_factory=dict[str, float])
    _divided_at: float = -math.inf

    def set_rates(self, total: float, each: float) -> None:
        """The next division is by these."""
        self.total, self.each, self._divided_at = total, each, -math.inf

    def admit(self, member: Member, members: Sequence[Member], now: float) -> None:
        """Sets the rate that a Welcome tells to one of the connected `members`."""
        member.up_bits_per_s = 0.0 if self.total else self.each
        if self.total:
            _Room(self.total, members).give(member, self._wanted(members, now)[member.name])

    def divide(self, members: Sequence[Member], active: set[str], now: float) -> list[Member]:
        """Sets the rates of the connected learners; returns those whose rate has changed.

        `active`: names of those that have something to send now.
        """
        if now < self._divided_at + SHARE_DIVIDE_S:
            return []
        self._divided_at = now
        for name in active:
            self._active_until[name] = now + SHARE_IDLE_S
        known = {member.name for member in members}
        self._active_until = {n: t for n, t in self._active_until.items() if n in known}
        if not self.total:
            changed = [member for member in members if member.up_bits_per_s != self.each]
            for member in changed:
                member.up_bits_per_s = self.each
            return changed
        before = {member.name: member.up_bits_per_s for member in members}
        wanted = self._wanted(members, now)
        for member in members:
            told = member.up_bits_per_s
            member.up_bits_per_s = min(told, wanted[member.name]) if told else 0.0
        room = _Room(self.total, members)
        for member in members:
            room.give(member, wanted[member.name])
        return [member for member in members if member.up_bits_per_s != before[member.name]]

    def _wanted(self, members: Sequence[Member], now: float) -> dict[str, float]:
        """What each should have: the idle a little, the others equal parts of the rest."""
        if not members:
            return {}
        names = [m.name for m in members]
        senders = {name for name in names if now < self._active_until.get(name, -1.0)}
        senders = senders or set(names)
        little = self.total / len(names) * IDLE_SHARE
        equal = (self.total - little * (len(names) - len(senders))) / len(senders)
        most = self.each or self.total
        return {name: min(most, equal if name in senders else little) for name in names}


class _Room:
    """What of the total is free, as far as learners have confirmed that they leave it."""

    def __init__(self, total: float, members: Sequence[Member]) -> None:
        self._total, self._count = total, len(members)
        self._taken = sum(_taken(member) for member in members)
        self._unlimited = sum(member.keeps_bits_per_s == 0.0 for member in members)

    def give(self, member: Member, wanted: float) -> None:
        """Raises its rate to what is wanted and free. A newcomer gets a little at once, all of
        them together one IDLE_SHARE."""
        own = _taken(member)
        others = self._taken - own
        if self._unlimited > (member.keeps_bits_per_s == 0.0):
            others = max(others, self._total)  # Somebody still knows of no limit.
        free = self._total - others
        if not member.up_bits_per_s:
            left = (IDLE_SHARE * self._total + min(free, 0.0)) / 2
            free = max(free, min(IDLE_SHARE * self._total / self._count, left), TINY)
        member.up_bits_per_s = max(member.up_bits_per_s, min(wanted, free))
        self._taken += _taken(member) - own


def _taken(member: Member) -> float:
    """What it may be sending: as told, or as it still does."""
    return max(member.up_bits_per_s, member.keeps_bits_per_s or 0.0)
