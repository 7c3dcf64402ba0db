"""Who takes part: names, incarnations, liveness, what each learner has and has done. [pure]"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from narrows.broker.syncer.events import Peer
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow import Flow
from narrows.proto.limits import LEARNERS_MAX, NAME_PATTERN
from narrows.proto.messages import TokenLedger
from narrows.proto.smoothing import Smoothed

INCARNATION_PATTERN = r"\A[0-9a-f]{32}\Z"


class Liveness(StrEnum):
    """Green, yellow, red: by the time since anything was heard from a learner."""

    LIVE = "live"
    LATE = "late"
    LOST = "lost"


@dataclass
class Member:
    """One learner, from its first Hello on; it stays in the roster after it is lost."""

    name: str
    incarnation: str
    peer: Peer | None
    """None once the connection is gone or the name was taken over."""
    address: str
    heard_at: float
    joined_at: float
    held: list[int]
    """Version adopted per fragment, -1: none yet."""
    last_merged: list[int]
    """Last merged push id per fragment of this incarnation, 0: none."""
    state: Liveness = Liveness.LIVE
    step: int = 0
    tokens: int = 0
    step_s: float = 0.0
    loss: float | None = None
    ledger: TokenLedger = field(default_factory=TokenLedger)
    received: list[int] = field(default_factory=list[int])
    """Uplink stream positions seen: the credit that we give."""
    up: Flow = field(default_factory=Flow)
    """Bytes of its pushes."""
    down: Flow = field(default_factory=Flow)
    """Bytes that it has acknowledged."""
    acknowledged: int = 0
    """Sum of the positions that were told last."""
    acknowledged_at: float = 0.0
    acknowledge_at: float | None = None
    """When the next positions are due; None: nothing has come since."""
    up_bits_per_s: float = 0.0
    """What it may send, as told."""
    keeps_bits_per_s: float | None = None
    """What it has confirmed; 0: it knows of no limit; None: it is new and sends nothing yet."""
    arrival: Smoothed = field(default_factory=Smoothed)
    """Seconds from the opening of a round to this learner's complete contribution."""
    contributions: int = 0
    refused: int = 0
    refused_pushes: deque[int] = field(default_factory=lambda: deque[int](maxlen=16))
    """Push ids refused lately: one Refuse per push, not one per chunk."""
    announced: int = 0
    """Pushes announced since data has come."""
    silent_since: float = 0.0
    """When the first of them was."""
    silence_named: bool = False
    """The operator has been told that no data comes."""
    missed_running: int = 0
    """Rounds missed in a row."""
    missed_named: bool = False
    """The operator has been told of them."""
    adopting_since: float | None = None
    """When it was first told to adopt."""
    contributed_at: float = 0.0
    """When its last contribution was complete, or it joined."""
    left: bool = False
    """It said Bye, or was refused: nobody waits for its return."""
    given_up: bool = False
    """The end of the run goes on without it."""

    @property
    def connected(self) -> bool:
        return self.peer is not None and self.state is not Liveness.LOST

    @property
    def ready(self) -> bool:
        """Connected and holding every fragment: it can contribute."""
        return self.connected and -1 not in self.held

    def predicted_s(self) -> float | None:
        """Seconds from the opening of a round within which a contribution is to be expected.

        Mean plus three deviations, but at least a step more than the mean: a learner answers at
        its next step, so that a few quick answers say little about the next one.
        """
        if not self.arrival.samples:
            return None
        return max(self.arrival.upper(), self.arrival.mean + self.step_s)


def check_name(name: str, incarnation: str) -> None:
    """Raises RemoteProtocolError BAD_NAME unless both follow their grammar."""
    if not re.match(NAME_PATTERN, name):
        raise RemoteProtocolError(
            ErrorCode.BAD_NAME,
            "learner name",
            expected="1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit",
            got=repr(name[:80]),
            remedy="choose another --name",
        )
    if not re.match(INCARNATION_PATTERN, incarnation):
        raise RemoteProtocolError(
            ErrorCode.BAD_NAME, "incarnation", expected="32 hex digits", got=repr(incarnation[:80])
        )


def median_step_s(members: Sequence[Member]) -> float:
    """Median step time of these learners, 0 if none has reported one."""
    times = [member.step_s for member in members if member.step_s > 0]
    return median(times) if times else 0.0


@dataclass
class Roster:
    """All members by name; iteration is in name order, so that no result depends on arrival."""

    late_s: float
    lost_s: float
    _members: dict[str, Member] = field(default_factory=dict[str, Member])
    _present: dict[str, Member] = field(default_factory=dict[str, Member])
    """Those with a connection: a thousand that are gone must not slow every event down."""
    _gone: dict[str, float] = field(default_factory=dict[str, float])
    """Names whose learner is gone, longest first, and when they were heard from last; those too
    that only a life of the broker before this one has met."""
    _names: dict[Peer, str] = field(default_factory=dict[Peer, str])
    _superseded: dict[str, deque[str]] = field(default_factory=dict[str, deque[str]])

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def by_peer(self, peer: Peer) -> Member | None:
        name = self._names.get(peer)
        return self._members[name] if name is not None else None

    def connected(self) -> list[Member]:
        return [member for member in self._present.values() if member.connected]

    def ready(self) -> list[Member]:
        return [member for member in self._present.values() if member.ready]

    def counted_on(self) -> list[Member]:
        """Who is waited for in a round."""
        return [member for member in self.ready() if not member.given_up]

    def step_s(self) -> float:
        """Median step time of the ready learners, 0 if none has reported one."""
        return median_step_s(self.ready())

    def is_superseded(self, name: str, incarnation: str) -> bool:
        return incarnation in self._superseded.get(name, ())

    def admit(self, member: Member) -> Member | None:
        """Enters a member and returns the one it replaces (same name), if any."""
        self._check_room(member.name)
        before = self._members.get(member.name)
        if before is not None and before is not member:
            self.disconnect(before)
            if before.incarnation != member.incarnation:
                old = self._superseded.setdefault(member.name, deque(maxlen=64))
                old.append(before.incarnation)
        assert member.peer is not None
        self._members[member.name] = member
        if before is None:
            self._members = dict(sorted(self._members.items()))
        self._present = dict(sorted({**self._present, member.name: member}.items()))
        self._gone.pop(member.name, None)
        self._names[member.peer] = member.name
        return before

    def _check_room(self, name: str) -> None:
        if name not in self._present and len(self._present) >= LEARNERS_MAX:
            raise RemoteProtocolError(
                ErrorCode.OVER_CAPACITY,
                "too many learners",
                expected=f"at most {LEARNERS_MAX}",
                got=f"{LEARNERS_MAX} and {name}",
                remedy="wait until one leaves",
            )

    def move(self, member: Member, peer: Peer, address: str, now: float) -> None:
        """The same process is back on this connection."""
        self._check_room(member.name)
        self.disconnect(member)
        member.peer, member.address, member.heard_at = peer, address, now
        member.state, member.left = Liveness.LIVE, False
        member.announced, member.silence_named = 0, False
        self.admit(member)

    def disconnect(self, member: Member) -> None:
        """The connection is gone or taken; the member stays known."""
        if member.peer is not None:
            self._names.pop(member.peer, None)
        member.peer = None
        member.state = Liveness.LOST
        if self._members.get(member.name) is member:
            self._present.pop(member.name, None)
            self.remember([member.name], member.heard_at)

    def heard(self, member: Member, now: float) -> bool:
        """Notes a sign of life; returns True if the member was late before."""
        was_late = member.state is Liveness.LATE
        member.heard_at = now
        if member.connected:
            member.state = Liveness.LIVE
        return was_late

    def age(self, now: float) -> list[Member]:
        """Updates every state by the clock; returns those that changed."""
        changed: list[Member] = []
        for member in self.connected():
            # The same sums as in next_deadline, so that no rounding makes it come too early.
            state = Liveness.LIVE
            if now >= member.heard_at + self.lost_s:
                state = Liveness.LOST
            elif now >= member.heard_at + self.late_s:
                state = Liveness.LATE
            if state is not member.state:
                member.state = state
                changed.append(member)
        return changed

    def next_deadline(self) -> float | None:
        """When the next member turns late or lost if nothing is heard from it."""
        times = [
            member.heard_at + (self.late_s if member.state is Liveness.LIVE else self.lost_s)
            for member in self.connected()
        ]
        return min(times, default=None)

    # Who is gone.

    def remember(self, names: Iterable[str], heard_at: float) -> None:
        """Their learners are gone since."""
        for name in names:
            self._gone.pop(name, None)
            self._gone[name] = heard_at

    @property
    def gone(self) -> Mapping[str, float]:
        """Names and when they were heard from, the longest gone first."""
        return self._gone

    def forget(self, name: str) -> None:
        """Nothing is kept of a learner that is gone."""
        del self._gone[name]
        self._members.pop(name, None)
        self._superseded.pop(name, None)
