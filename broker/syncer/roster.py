"""The roster of all learners: names, incarnations, connections, liveness. [pure]

This module alone writes `Member.presence`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from narrows.broker.syncer.events import Peer
from narrows.broker.syncer.member import Liveness, Member, Presence
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.key_holder import KeyHolder
from narrows.proto.limits import LEARNERS_MAX, NAME_PATTERN

INCARNATION_PATTERN = r"\A[0-9a-f]{32}\Z"


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


@dataclass
class Roster:
    """All members by name; iteration is in name order, so that no result depends on arrival."""

    late_s: float
    """Silence in seconds after which a member counts as late."""
    lost_s: float
    """Silence in seconds after which a member counts as lost."""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])
    _present: dict[str, Member] = field(default_factory=dict[str, Member])
    """Members with a connection: a thousand that are gone must not slow every event down."""
    _gone: dict[str, float] = field(default_factory=dict[str, float])
    """Names whose learner is gone, and when it was heard last; the longest gone comes first. Names
    from the journal that only an earlier life of the broker has met are in it too."""
    _names: dict[Peer, str] = field(default_factory=dict[Peer, str])
    _superseded: dict[str, deque[str]] = field(default_factory=dict[str, deque[str]])

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def by_peer(self, peer: Peer) -> Member | None:
        """Member that speaks on this connection."""
        name = self._names.get(peer)
        if name is None:
            return None
        member = self._members[name]
        assert member.presence.peer == peer
        return member

    def connected(self) -> list[Member]:
        return [member for member in self._present.values() if member.connected]

    def ready(self) -> list[Member]:
        return [member for member in self._present.values() if member.ready]

    def counted_on(self) -> list[Member]:
        """Ready learners that a round waits for."""
        return [member for member in self.ready() if not member.given_up]

    def is_superseded(self, name: str, incarnation: str) -> bool:
        return incarnation in self._superseded.get(name, ())

    def admit(self, member: Member) -> Member | None:
        """Enters a connected member; returns the one that it replaces (same name), if any.

        Raises RemoteProtocolError OVER_CAPACITY if there is no room for one more.
        """
        self._check_room(member.name)
        before = self._members.get(member.name)
        if before is not None and before is not member:
            self.disconnect(before)
            if before.incarnation != member.incarnation:
                old = self._superseded.setdefault(member.name, deque(maxlen=64))
                old.append(before.incarnation)
        assert member.peer not in self._names, "one connection speaks for one learner"
        self._members[member.name] = member
        if before is None:
            self._members = dict(sorted(self._members.items()))
        self._present = dict(sorted({**self._present, member.name: member}.items()))
        self._gone.pop(member.name, None)
        self._names[member.peer] = member.name
        assert len(self._names) == len(self._present) <= LEARNERS_MAX
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

    def move(
        self,
        member: Member,
        peer: Peer,
        address: str,
        now: float,
        holder: KeyHolder | None = None,
    ) -> None:
        """Gives a member whose process is back its new connection."""
        self._check_room(member.name)
        self.disconnect(member)
        joined_at = member.presence.joined_at
        member.presence = Presence(peer, address, now, joined_at, holder=holder)
        self.admit(member)
        assert member.connected

    def disconnect(self, member: Member, *, left: bool = False) -> None:
        """Ends the session of a member, which stays known; `left`: it does not come back."""
        presence = member.presence
        if presence.peer is not None:
            self._names.pop(presence.peer, None)
        presence.peer, presence.liveness = None, Liveness.LOST
        presence.left |= left
        if self._members.get(member.name) is member:
            self._present.pop(member.name, None)
            self.remember([member.name], presence.heard_at)
        assert not member.connected

    def heard(self, member: Member, now: float) -> bool:
        """Notes a sign of life; returns True if the member was late before."""
        assert now >= member.presence.heard_at, "time does not run backwards"
        was_late = member.presence.liveness is Liveness.LATE
        member.presence.heard_at = now
        if member.connected:
            member.presence.liveness = Liveness.LIVE
        return was_late

    def age(self, now: float) -> list[Member]:
        """Updates every liveness by the clock; returns the members whose liveness changed."""
        changed: list[Member] = []
        for member in self.connected():
            # The same sums as in next_deadline, so that no rounding makes it come too early.
            liveness = Liveness.LIVE
            if now >= member.presence.heard_at + self.lost_s:
                liveness = Liveness.LOST
            elif now >= member.presence.heard_at + self.late_s:
                liveness = Liveness.LATE
            if liveness is not member.presence.liveness:
                member.presence.liveness = liveness
                changed.append(member)
        return changed

    def next_deadline(self) -> float | None:
        """Time at which the next member turns late or lost if nothing is heard from it."""
        times = [
            member.presence.heard_at
            + (self.late_s if member.presence.liveness is Liveness.LIVE else self.lost_s)
            for member in self.connected()
        ]
        return min(times, default=None)

    # Learners that are gone.

    def remember(self, names: Iterable[str], heard_at: float) -> None:
        """Notes that the learners of these names are gone and were heard last then."""
        for name in names:
            self._gone.pop(name, None)
            self._gone[name] = heard_at

    @property
    def gone(self) -> Mapping[str, float]:
        """Names and when each was heard last, the longest gone first."""
        return self._gone

    def forget(self, name: str) -> None:
        """Erases all that is known of a learner that is gone."""
        assert name not in self._present
        del self._gone[name]
        self._members.pop(name, None)
        self._superseded.pop(name, None)
