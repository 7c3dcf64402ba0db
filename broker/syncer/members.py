"""The learners that this life of the broker has met: names, connections, progress, rates."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import sub
from statistics import median
from typing import Final

from narrows.proto.messages import DataKind, Fetch, Report
from narrows.proto.timing import HEARD_S, REPORT_S
from narrows.proto.wire import name_of

NAMES_MAX: Final = 1024
"""Names that are remembered; the one that was heard least lately is forgotten first."""

INTERVALS: Final = 8
"""Intervals that a step time is the median of: a change of speed is seen after five Reports, one
late Report is not."""

INTERVAL_S_MIN: Final = REPORT_S / 2
"""Shortest interval that counts by itself; a Report that comes sooner counts with the next one.
After a stall of the line many Reports arrive together, and some go out at once at a change."""

COUNTS_S: Final = 60.0
COUNTS_PERIODS: Final = 4
"""A learner counts, in the pace and in the shares of the uplink, from its first merged push on: for
this long after each, or for so many periods. A name that reports and pushes nothing decides
nothing."""

CONFIRM_S: Final = 0.5
"""A Report that comes this long after a lower rate was told shows that it was heard; an earlier one
may have been on its way already."""

TOLD_AT_ONCE: Final = 8
"""Learners of a site that do not count and hear at once that a round opens or closes. With all of
them 512 idle names multiply every Beat, which costs the line that the others fetch on; with none a
newcomer would meet open rounds by luck."""

RATE_MIN: Final = 1000.0
"""Bit/s that a learner has while nothing is free for it: 0 would mean no limit."""

STALLED_S: Final = 60.0
STALLED_STEPS: Final = 20
"""A learner that is to make steps, and makes none for so long and for the time of so many of its
own, is told as one without steps, and no round waits for it."""

FIRST_STEP_S: Final = 600.0
"""The same before its step time is known: the first step may compile the model."""

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
    bases: tuple[int, ...] = ()
    """Version that its parameters stand on, per fragment; -1: none. Set by `stand_on`."""
    has_model: bool = False
    """No base is -1."""
    versions_behind: int = 0
    """Versions of the fragment that it lacks most of, when its bases were told."""
    changed_at: float = float("-inf")
    """When it was connected or heard again, had the model, or began or ended a pause."""
    paused_at: float = float("-inf")
    """When it said that it pauses."""
    stepped_at: float = float("-inf")
    """When it last told of a new step, or could not be expected to make any."""
    peer: str = ""
    """Its connection; "" while it has none."""
    has_left: bool = False
    is_revoked: bool = False
    """Its site had no key left while it was connected."""
    told: Report = NOTHING_TOLD
    """Its newest Report. The field `bases` above, unlike the Report's, is never ahead of the
    heads."""
    reported_at: float = float("-inf")
    merged_at: float = float("-inf")
    """When a push of it was merged last; while it sends version 0: when a chunk came."""
    merged_tokens: int = 0
    """Tokens of its merged pushes, summed over fragments."""
    contributions: int = 0
    refused: Counter[int] = field(default_factory=Counter[int])
    """Fragment -> newest push id that was refused. Its later chunks are dropped silently."""
    data_at: float = float("-inf")
    """When the last data message came."""
    taken_at: float = float("-inf")
    """When it last took a version, lacked none, was paused, or asked a STATE's next chunks."""
    taken_steps: int = 0
    """Its steps then."""
    asked_at: float = float("-inf")
    """When it last asked for chunks."""
    _asked: dict[int, int] = field(default_factory=dict[int, int])
    """Fragment -> hash of the chunks of a STATE that it asked for last; whole they may be large."""
    told_hints: set[str] = field(default_factory=set[str])
    """Events of the hints that hold, and were logged when they began to."""
    up_bits_per_s: float = 0.0
    """Rate that it is told; 0: no limit."""
    up_in_force: float = 0.0
    """Rate that it may still be using, until its Reports show that it was told less."""
    lowered_at: float = float("-inf")
    step_s: float = 0.0
    """Median seconds per inner step; 0: not known yet."""
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS))
    counted: tuple[float, int] | None = None
    """Time and steps of the newest Report that counted steps; None: begin anew."""

    @property
    def site(self) -> str:
        """The part of its name before the slash. With keys, the key of this site speaks for it."""
        return self.name.partition("/")[0]

    @property
    def is_connected(self) -> bool:
        return bool(self.peer)

    @property
    def is_ready(self) -> bool:
        """It is connected and its parameters stand on versions of this run."""
        return self.is_connected and self.has_model

    def is_heard(self, now: float) -> bool:
        return self.is_connected and now < self.heard_at + HEARD_S

    def is_awaited(self, now: float) -> bool:
        """Rounds wait for it: it is ready, heard lately and not paused, and makes steps."""
        is_able = self.is_heard(now) and self.has_model and self.told.paused is None
        return is_able and not self.is_stalled(now)

    def is_stalled(self, now: float) -> bool:
        """It makes no steps, though it is here, has the model, and has not said that it pauses: one
        of its processes hangs, or somebody has stopped them."""
        patience_s = max(STALLED_S, STALLED_STEPS * self.step_s) if self.step_s else FIRST_STEP_S
        return now >= self.stepped_at + patience_s

    def hears(self, now: float) -> None:
        """A message of it came."""
        if not self.is_heard(now):
            self.changed_at = now
        self.heard_at = now

    def stand_on(self, bases: tuple[int, ...], heads: Sequence[int]) -> None:
        """Takes in which versions its parameters stand on."""
        self.bases = bases
        self.has_model = min(bases) >= 0
        self.versions_behind = max(map(sub, heads, bases), default=0) if self.has_model else 0

    def counts(self, period_s: float, now: float) -> bool:
        """It contributes: a push of it was merged lately."""
        return now < self.merged_at + max(COUNTS_S, COUNTS_PERIODS * period_s)

    def asks(self, fetch: Fetch, now: float) -> None:
        """Takes a question in. To ask for other chunks of a STATE than before shows that some have
        come; the version may move on without any."""
        self.moved_at = self.asked_at = now
        asked = hash(fetch.chunks)
        if fetch.kind is DataKind.STATE and self._asked.get(fetch.fragment) != asked:
            self._asked[fetch.fragment] = asked
            self.taken_at = now

    def report(
        self, report: Report, bases: tuple[int, ...], heads: tuple[int, ...], now: float
    ) -> None:
        """Takes progress in. The broker measures step times on its own clock: it believes no
        learner's count of seconds."""
        before = self.told
        is_paused = report.paused is not None or before.paused is not None
        if is_paused or bases == heads or bases != self.bases:
            self.taken_at = now
            self.taken_steps = report.steps
        if (report.steps, bases, report.finished) != (before.steps, self.bases, before.finished):
            self.moved_at = now
        if is_paused or not self.has_model or report.steps > before.steps:
            self.stepped_at = now
        was = before.paused is None, self.has_model
        self.told = report
        self.reported_at = now
        self.stand_on(bases, heads)
        if was != (report.paused is None, self.has_model):
            self.changed_at = now
        if before.paused is None:
            self.paused_at = now

        if is_paused or self.counted is None:
            self.counted = (now, report.steps)
            return
        at, steps = self.counted
        if report.steps > steps and now >= at + INTERVAL_S_MIN:
            self._intervals.append((now - at) / (report.steps - steps))
            self.step_s = median(self._intervals)
            self.counted = (now, report.steps)


@dataclass(eq=False)
class Members:
    """All members by name and connection."""

    by_name: dict[str, Member] = field(default_factory=dict[str, Member])
    by_peer: dict[str, Member] = field(default_factory=dict[str, Member])
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

    def told_at_once(self, turn: int, period_s: float, now: float) -> list[Member]:
        """Learners that hear at once that a round opens or closes: all that count, and a few others
        of each site. These take turns in the order of joining: some may never push, and must not
        keep the rest of their site from hearing. `turn` is to rise by one from round to round.

        Nobody starves. All others hear of it within BEAT_S: the Beat to everybody repeats which
        rounds are open, and they push to those. A learner counts once a push of it is merged.
        """
        told: list[Member] = []
        others: dict[str, list[Member]] = {}
        for member in self.by_peer.values():
            if member.counts(period_s, now):
                told.append(member)
            else:
                others.setdefault(member.site, []).append(member)
        for site in others.values():
            first = turn * TOLD_AT_ONCE % len(site)
            told += [*site, *site][first : first + min(TOLD_AT_ONCE, len(site))]
        return told

    def connect(self, member: Member, peer: str, now: float) -> None:
        """Gives a member a connection, when nobody else has its name or this connection."""
        # Its rate in force stays: it may still be sending at the rate that it was told before.
        self.by_peer.pop(member.peer, None)
        member.peer = peer
        member.heard_at = member.moved_at = member.taken_at = now
        member.changed_at = member.stepped_at = now
        member.has_left = member.is_revoked = False
        self.by_name[member.name] = self.by_peer[peer] = member

        gone = sorted(
            (each for each in self if not each.is_connected), key=lambda each: each.heard_at
        )
        for each in gone[: max(0, len(self.by_name) - NAMES_MAX)]:
            del self.by_name[each.name]

    def disconnect(self, member: Member) -> None:
        """The connection is gone, and with it the member's rate; the name is remembered."""
        self.by_peer.pop(member.peer, None)
        member.peer = ""
        member.up_bits_per_s = member.up_in_force = 0.0

    def excuse(self, delay_s: float, now: float) -> None:
        """The broker itself stood still: nobody was silent for that time, or slow."""
        for member in self:
            member.heard_at = min(now, member.heard_at + delay_s)
            member.moved_at = min(now, member.moved_at + delay_s)
            member.taken_at = min(now, member.taken_at + delay_s)
            member.stepped_at = min(now, member.stepped_at + delay_s)
            member.counted = None

    # Rates of the uplink.

    def share(self, own: float, total: float, period_s: float, now: float) -> list[Member]:
        """Sets the rates of all connected learners in bit/s: at most `own` for each, and a share of
        `total`; inf: no limit. Returns those whose rate has changed.

        A share is lowered before another one is raised: at no time may the learners send more than
        the total. Until a learner's Reports show that it has heard of less, the rate that it was
        told before is in force.
        """
        if own == total == math.inf:
            return []
        before = {member: member.up_bits_per_s for member in self.connected()}
        targets = self._targets(own, total, period_s, now)
        self._lower(targets, now)
        self._raise(targets, total)
        return [member for member, rate in before.items() if member.up_bits_per_s != rate]

    def _targets(
        self, own: float, total: float, period_s: float, now: float
    ) -> dict[Member, float]:
        """The rate that each connected learner should have in the end.

        Every learner that counts has an equal share. All others of a site have one share together:
        enough for a first push, and no more for two hundred names than for one.
        """
        members = self.connected()
        others = Counter(each.site for each in members if not each.counts(period_s, now))
        parts = {
            each: 1.0 if each.counts(period_s, now) else 1 / others[each.site] for each in members
        }
        whole = total / max(1.0, sum(parts.values()))
        return {member: min(own, whole * part) for member, part in parts.items()}

    def _lower(self, targets: dict[Member, float], now: float) -> None:
        """Begins newcomers at the least rate, and tells those less that have too much."""
        for member, target in targets.items():
            is_new = member.up_bits_per_s == 0
            if is_new or member.up_bits_per_s > target:
                member.up_bits_per_s = min(RATE_MIN, target) if is_new else target
                member.up_in_force = max(member.up_in_force, member.up_bits_per_s)
                member.lowered_at = now
            elif member.reported_at >= member.lowered_at + CONFIRM_S:
                member.up_in_force = member.up_bits_per_s

    def _raise(self, targets: dict[Member, float], total: float) -> None:
        """Hands out the free part of the total, in the order of joining."""
        free = max(0.0, total - sum(member.up_in_force for member in targets))
        for member, target in targets.items():
            raised = min(target, member.up_in_force + free)
            if raised > member.up_bits_per_s:
                free -= max(0.0, raised - member.up_in_force)
                member.up_bits_per_s = raised
                member.up_in_force = max(member.up_in_force, raised)

    def check(self, total: float) -> None:
        for name, member in self.by_name.items():
            assert name == member.name == name_of(member.incarnation), member
            assert not member.peer or self.by_peer[member.peer] is member, member
        for peer, member in self.by_peer.items():
            assert member.peer == peer and self.by_name[member.name] is member, member
        assert len(self.by_name) <= NAMES_MAX + len(self.by_peer)
        used = sum(member.up_in_force for member in self.by_peer.values())
        assert not total or used <= total * (1 + 1e-9) + RATE_MIN * len(self.by_peer), used
