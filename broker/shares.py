"""The learners' shares of the uplink's total: equal among those that send, never above it. [pure]

A share that is lowered is free for others only when its holder has confirmed that it keeps to the
lower rate: the sum of what learners may do at any instant never exceeds the total.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.members import Member

IDLE_SHARE: Final = 1 / 32
"""Of an equal share stays with a learner that has nothing to send: it can begin at once."""

IDLE_S: Final = 1.0
"""Who has sent nothing for so long is idle; less would tell everybody twice in each round."""

DIVIDE_S: Final = 0.05
"""Shares are divided anew at most so often."""


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
            self._raise(member, members, self._wanted(members, now)[member.name])

    def divide(self, members: Sequence[Member], active: set[str], now: float) -> list[Member]:
        """Sets the rates of the connected learners; returns those whose rate has changed.

        `active`: names of those that have something to send now.
        """
        if now < self._divided_at + DIVIDE_S:
            return []
        self._divided_at = now
        for name in active:
            self._active_until[name] = now + IDLE_S
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
        for member in members:
            self._raise(member, members, wanted[member.name])
        return [member for member in members if member.up_bits_per_s != before[member.name]]

    def _wanted(self, members: Sequence[Member], now: float) -> dict[str, float]:
        """What each should have: the idle a little, the others equal parts of the rest."""
        if not members:
            return {}
        names = [m.name for m in members]
        senders = [name for name in names if now < self._active_until.get(name, -1.0)]
        senders = senders or names
        little = self.total / len(names) * IDLE_SHARE
        equal = (self.total - little * (len(names) - len(senders))) / len(senders)
        most = self.each or self.total
        return {name: min(most, equal if name in senders else little) for name in names}

    def _raise(self, member: Member, members: Sequence[Member], wanted: float) -> None:
        """As far as the others have confirmed that they leave room; a newcomer gets a little."""
        others = sum(max(m.up_bits_per_s, m.keeps_bits_per_s) for m in members if m is not member)
        little = self.total / len(members) * IDLE_SHARE
        room = max(self.total - others, little if not member.up_bits_per_s else 0.0)
        member.up_bits_per_s = max(member.up_bits_per_s, min(wanted, room))
