"""The learners that this life of the broker has met: names, connections, progress, rates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from narrows.proto.messages import Report
from narrows.proto.timing import HEARD_S
from narrows.proto.wire import name_of

NAMES_MAX: Final = 1024
"""Names that are remembered; the one that was heard least lately is forgotten first."""

INTERVALS: Final = 8
"""Intervals that a step time is the median of: a change of speed is seen after five Reports, one
late Report is not."""

INTERVAL_S_MIN: Final = 1e-3
"""Shortest interval that is believed; two Reports may arrive together after a stall."""

CONFIRM_S: Final = 0.5
"""A Report that comes this long after a lower rate was told shows that it was heard; an earlier one
may have been on its way already."""

RATE_MIN: Final = 1000.0
"""Bit/s that a learner has while nothing is free for it: 0 would mean no limit."""

NOTHING_TOLD: Final = Report(0, 0, None, ())
"""The newest Report before the first."""


@dataclass(eq=False)
class Member:
    """One incarnation of a learner."""

    name: str
    incarnation: str
    fingerprint: str
    heard_at: float
    """When anything came from it, on the broker's clock as all times here."""
    moved_at: float
    """When it made progress: a step, a push, a chunk, an adoption, a request."""
    held: tuple[int, ...]
    """Version that its parameters stand on, per fragment; -1: none."""
    peer: str = ""
    """Its connection; "" while it has none."""
    has_left: bool = False
    is_revoked: bool = False
    """Its site had no key left while it was connected."""
    told: Report = NOTHING_TOLD
    """Its newest Report; but `held` is what its parameters stand on."""
    reported_at: float = float("-inf")
    merged_tokens: int = 0
    """Tokens of its merged pushes, summed over fragments."""
    contributions: int = 0
    refused: dict[int, int] = field(default_factory=dict[int, int])
    """Fragment -> newest push id that was refused. Its later chunks are dropped silently."""
    data_at: float = float("-inf")
    """When the last data message came."""
    told_no_data: bool = False
    up_bits_per_s: float = 0.0
    """Rate that it is told; 0: no limit."""
    up_in_force: float = 0.0
    """Rate that it may still be using, until its Reports show that it was told less."""
    lowered_at: float = float("-inf")
    step_s: float | None = None
    """Median seconds per inner step; None: not known yet."""
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS))
    counted: tuple[float, int] | None = None
    """Time and steps of the newest Report that counted steps; None: begin anew."""

    @property
    def is_connected(self) -> bool:
        return bool(self.peer)

    @property
    def is_ready(self) -> bool:
        """It is connected and its parameters stand on versions of this run."""
        return self.is_connected and min(self.held) >= 0

    def is_heard(self, now: float) -> bool:
        return self.is_connected and now < self.heard_at + HEARD_S

    def is_awaited(self, now: float) -> bool:
        """Rounds wait for it: it is ready, heard lately and not paused."""
        return self.is_heard(now) and self.told.paused is None and min(self.held) >= 0

    def report(self, report: Report, held: tuple[int, ...], now: float) -> None:
        """Takes progress in. Step times are taken on the broker's clock: nobody's own count of
        seconds is believed."""
        before, self.told, self.reported_at = self.told, report, now
        if (report.steps, held, report.finished) != (before.steps, self.held, before.finished):
            self.moved_at = now
        self.held = held
        if before.paused is not None or report.paused is not None or self.counted is None:
            self.counted = (now, report.steps)
        elif report.steps > self.counted[1]:
            at, steps = self.counted
            self._intervals.append(max(now - at, INTERVAL_S_MIN) / (report.steps - steps))
            self.step_s = median(self._intervals)
            self.counted = (now, report.steps)


class Members:
    """All members by name and connection."""

    def __init__(self) -> None:
        self.by_name: dict[str, Member] = {}
        self.by_peer: dict[str, Member] = {}
        """The connected ones, in the order of joining."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self.by_name.values())

    def connected(self) -> list[Member]:
        return list(self.by_peer.values())

    def heard(self, now: float) -> list[Member]:
        return [member for member in self.by_peer.values() if member.is_heard(now)]

    def awaited(self, now: float) -> list[Member]:
        return [member for member in self.by_peer.values() if member.is_awaited(now)]

    def of(self, incarnation: str) -> Member | None:
        """The member of an incarnation, unless another one has its name by now."""
        member = self.by_name.get(name_of(incarnation))
        return member if member and member.incarnation == incarnation else None

    def connect(self, member: Member, peer: str, now: float) -> None:
        """Gives a member a connection, when nobody else has its name or this connection."""
        # The member itself may still be using the rate that it was told before.
        self.by_peer.pop(member.peer, None)
        member.peer, member.heard_at, member.moved_at = peer, now, now
        member.has_left = member.is_revoked = False
        self.by_name[member.name] = self.by_peer[peer] = member
        gone = [member for member in self if not member.is_connected]
        gone.sort(key=lambda member: member.heard_at)
        for each in gone[: max(0, len(self.by_name) - NAMES_MAX)]:
            del self.by_name[each.name]

    def disconnect(self, member: Member) -> None:
        """The connection is gone, and with it the member's rate; the name is remembered."""
        self.by_peer.pop(member.peer, None)
        member.peer, member.up_bits_per_s, member.up_in_force = "", 0.0, 0.0

    def excuse(self, delay_s: float, now: float) -> None:
        """The broker itself stood still: nobody was silent for that time, or slow."""
        for member in self:
            member.heard_at = min(now, member.heard_at + delay_s)
            member.moved_at = min(now, member.moved_at + delay_s)
            member.counted = None

    def share(self, own: float, total: float, now: float) -> list[Member]:
        """Sets the rates of all connected learners in bit/s: at most `own` for each, and an equal
        share of `total`; 0: no limit. Returns those whose rate has changed.

        A share is lowered before another one is raised: at no time may the learners send more than
        the total.
        """
        members = self.connected()
        target = min(own or math.inf, (total or math.inf) / max(1, len(members)))
        if target == math.inf:
            return []
        before = [member.up_bits_per_s for member in members]
        for member in members:
            if not 0 < member.up_bits_per_s <= target:  # A newcomer, or one that has too much.
                member.up_bits_per_s = min(member.up_bits_per_s or RATE_MIN, target)
                member.up_in_force = max(member.up_in_force, member.up_bits_per_s)
                member.lowered_at = now
            elif member.reported_at >= member.lowered_at + CONFIRM_S:
                member.up_in_force = member.up_bits_per_s
        free = max(0.0, (total or math.inf) - sum(member.up_in_force for member in members))
        for member in members:
            raised = min(target, member.up_in_force + free)
            if raised > member.up_bits_per_s:
                free -= max(0.0, raised - member.up_in_force)
                member.up_bits_per_s = raised
                member.up_in_force = max(member.up_in_force, raised)
        pairs = zip(members, before, strict=True)
        return [member for member, rate in pairs if member.up_bits_per_s != rate]

    def check(self, total: float) -> None:
        for name, member in self.by_name.items():
            assert name == member.name == name_of(member.incarnation), member
            assert not member.peer or self.by_peer[member.peer] is member, member
        for peer, member in self.by_peer.items():
            assert member.peer == peer and self.by_name[member.name] is member, member
        assert len(self.by_name) <= NAMES_MAX + len(self.by_peer)
        used = sum(member.up_in_force for member in self.by_peer.values())
        assert not total or used <= total * (1 + 1e-9) + RATE_MIN * len(self.by_peer), used
