"""Division of the uplink's total rate: equal among senders, never above it in sum. [pure]

A lowered share is free for others once its holder has confirmed the lower rate. So the sum of the
rates that learners may use never exceeds the total. A holder that does not confirm in time is
counted by what arrives from it: its word alone takes nothing from the others. This module alone
writes `Member.up_bits_per_s`. All rates are in bit/s; 0 means no limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer.member import Member
from narrows.proto.timing import RATE_CONFIRM_S, SHARE_DIVIDE_S, SHARE_IDLE_S

IDLE_SHARE: Final = 1 / 32
"""Fraction of an equal share reserved for an idle learner, so that it can start immediately."""

TINY: Final = 1000.0
"""Least rate in bit/s: 0 would mean no limit."""


@dataclass
class _Use:
    """The rate that one learner may be using, and the rate at which its bytes arrive."""

    told: float = 0.0
    """Highest rate that it was told since it confirmed one; infinite: no limit."""
    lowered_at: float | None = None
    """Time of the oldest lower rate that it has not confirmed; None: it has confirmed all."""
    lowered_to: float = 0.0
    """That rate, or the highest that it was told since."""
    sampled_at: float = -math.inf
    sample_bits: float = 0.0
    seen_bits_per_s: float = 0.0

    def arrive(self, size_bytes: int, now: float) -> None:
        """Samples the rate at which bytes come, one sample in RATE_CONFIRM_S."""
        assert now >= self.sampled_at, "time does not run backwards"
        if (elapsed_s := now - self.sampled_at) >= RATE_CONFIRM_S:
            self.seen_bits_per_s = self.sample_bits / elapsed_s
            self.sampled_at, self.sample_bits = now, 0.0
        self.sample_bits += 8 * size_bytes

    def counted(self, member: Member, now: float) -> float:
        """Rate that a learner may be using; infinite: it knows of no limit."""
        granted, kept = member.up_bits_per_s, member.kept_bits_per_s
        self.told = max(self.told, granted)
        # It may keep to no more than it was told, whatever it reports.
        claimed = granted if kept is None else min(kept or math.inf, self.told)
        if claimed <= granted:
            self.told, self.lowered_at = granted, None
            return granted
        if self.lowered_at is None or claimed <= self.lowered_to:
            # It has confirmed the lower rate before this one.
            self.lowered_at, self.lowered_to = now, granted
        if now < self.lowered_at + RATE_CONFIRM_S:
            return claimed
        self.arrive(0, now)
        return min(claimed, max(granted, self.seen_bits_per_s))

    def tell(self, member: Member, now: float) -> None:
        """Notes the rate that it is told, and charges it by the one that it may have had before."""
        rate = member.up_bits_per_s or math.inf
        self.told, self.lowered_to = max(self.told, rate), max(self.lowered_to, rate)
        in_time = self.lowered_at is None or now < self.lowered_at + RATE_CONFIRM_S
        charged = self.told if in_time else rate
        member.charged_bits_per_s = 0.0 if math.isinf(charged) else charged


@dataclass
class Shares:
    """Divides the total among the connected learners."""

    total: float
    each: float
    """Highest rate of one learner."""
    _active_until: dict[str, float] = field(default_factory=dict[str, float])
    _uses: dict[str, _Use] = field(default_factory=dict[str, _Use])
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
            self._room(members, now).give(member, self._wanted(members, now)[member.name])
        self._tell(member, now)

    def arrive(self, name: str, size_bytes: int, now: float) -> None:
        """Data of a learner has come."""
        if (use := self._uses.get(name)) is not None:
            use.arrive(size_bytes, now)

    def counted(self, member: Member, now: float) -> float:
        """Rate that a learner may be using; infinite: it knows of no limit."""
        return self._uses.setdefault(member.name, _Use()).counted(member, now)

    def _tell(self, member: Member, now: float) -> None:
        self._uses.setdefault(member.name, _Use()).tell(member, now)

    def _room(self, members: Sequence[Member], now: float) -> _Room:
        taken = {member.name: self.counted(member, now) for member in members}
        return _Room(self.total, taken)

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
        self._uses = {name: use for name, use in self._uses.items() if name in known}
        if not self.total:
            changed = [member for member in members if member.up_bits_per_s != self.each]
            for member in members:
                member.up_bits_per_s = self.each
                self._tell(member, now)
            return changed
        before = {member.name: member.up_bits_per_s for member in members}
        wanted = self._wanted(members, now)
        # All are lowered before any is raised: only then is it known what is free.
        for member in members:
            granted = member.up_bits_per_s
            member.up_bits_per_s = min(granted, wanted[member.name]) if granted else 0.0
        room = self._room(members, now)
        for member in members:
            room.give(member, wanted[member.name])
            self._tell(member, now)
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

    def __init__(self, total: float, taken: dict[str, float]) -> None:
        assert total > 0.0
        # One that knows of no limit may use all of it.
        self._total = total
        self._taken = {name: min(rate, total) for name, rate in taken.items()}

    def give(self, member: Member, wanted: float) -> None:
        """Raises a learner's rate as far as it is wanted and free.

        A newcomer gets a little at once; all newcomers together get one IDLE_SHARE of the total.
        """
        assert 0.0 < wanted <= self._total
        own = self._taken[member.name]
        # Negative where others still use more than their shares: then only a newcomer gets a bit.
        free = self._total - (sum(self._taken.values()) - own)
        if not member.up_bits_per_s:
            left = (IDLE_SHARE * self._total + min(free, 0.0)) / 2
            free = max(free, min(IDLE_SHARE * self._total / len(self._taken), left), TINY)
        member.up_bits_per_s = max(member.up_bits_per_s, min(wanted, free))
        self._taken[member.name] = max(own, member.up_bits_per_s)
