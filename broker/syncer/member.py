"""One learner as the syncer knows it: one object per concern, each written by one module. [pure]

Everybody may read all of a member. The docstring of each object names the only module of the
syncer that writes to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from narrows.broker.syncer.events import Peer
from narrows.broker.syncer.participation import Participation
from narrows.proto.flow import Flow
from narrows.proto.key_holder import KeyHolder
from narrows.proto.messages import Report

STEP_S_MIN: Final = 1e-6
"""Shortest inner step that is believed."""


class Liveness(StrEnum):
    """Time since the learner was heard, in three steps; operators see green, yellow and red."""

    LIVE = "live"
    LATE = "late"
    LOST = "lost"


@dataclass
class Presence:
    """The connection and its signs of life. Written by `roster`."""

    peer: Peer | None
    """None once the connection is gone or the name was taken over."""
    address: str
    heard_at: float
    joined_at: float
    """Time at which this incarnation joined first; a reconnection does not change it."""
    liveness: Liveness = Liveness.LIVE
    holder: KeyHolder | None = None
    """Holder of the connection's key; None: the broker has no keys."""
    left: bool = False
    """The learner said Bye or was refused, so nobody waits for its return."""


@dataclass
class Copies:
    """The learner's copies of the fragments. Written by `serving`."""

    held: list[int]
    """Version adopted per fragment; -1: none yet."""
    flow: Flow = field(default_factory=Flow)
    """Bytes that the learner has acknowledged, of those that were sent."""
    received: dict[int, int] = field(default_factory=dict[int, int])
    """The highest position of each stream that it has acknowledged."""
    newest_adopted: int = 0
    """Times that it adopted the version of a fragment that was the newest then."""
    adopted_at: list[float | None] = field(default_factory=list[float | None])
    """Time at which its adoption of that version was heard, per fragment; None: it had adopted it
    in an earlier session, or has none."""
    is_new: bool = True
    """Its process had no session before this incarnation of the broker knew it."""
    adopting_since: float | None = None
    """Time at which it was first asked to adopt."""


@dataclass
class Uplink:
    """Data that has come from the learner. Written by `pushes`."""

    positions: list[int]
    """Position that the headers claim on each stream; the learner may send one window beyond it."""
    flow: Flow = field(default_factory=Flow)
    """Bytes of its pushes that have come and were wanted."""
    refused: int = 0
    """Pushes refused since it joined."""
    refused_pushes: deque[int] = field(default_factory=lambda: deque[int](maxlen=16))
    """Ids of the newest refused pushes: one Refuse per push, not one per chunk."""


@dataclass
class Credit:
    """Acknowledgement of the uplink's positions. Written by `credit`."""

    acknowledged_bytes: int = 0
    """Sum of the positions in the last Beat or Progress."""
    acknowledged_at: float = 0.0
    due_at: float | None = None
    """Time of the next acknowledgement; None: nothing has come since the last one."""


@dataclass
class Silence:
    """Announced pushes without data, in one session. Written by `data_path`."""

    announced: int = 0
    """Pushes announced since data has come."""
    since: float = 0.0
    """Time of the first of these announcements."""
    named: bool = False
    """The operator's log has the warning."""


@dataclass(frozen=True)
class Stepping:
    """Steps as the Reports count them, with the times at which the broker heard of them."""

    first_steps: int
    """Steps in the first Report that had any: the first step may have taken a compilation."""
    first_at: float
    steps: int
    at: float
    """Time of the first Report with `steps`."""

    @property
    def step_s(self) -> float:
        """Seconds per inner step since the first Report; 0: unknown."""
        steps, seconds = self.steps - self.first_steps, self.at - self.first_at
        return max(seconds / steps, STEP_S_MIN) if steps > 0 and seconds > 0.0 else 0.0


def stepped(before: Stepping | None, steps: int, now: float) -> Stepping | None:
    """The steps after a Report that counts so many."""
    if before is None:
        return Stepping(steps, now, steps, now) if steps > 0 else None
    return replace(before, steps=steps, at=now) if steps > before.steps else before


@dataclass
class Member:
    """One learner, from its first Hello on; it stays in the roster after it is lost."""

    name: str
    incarnation: str
    presence: Presence
    copies: Copies
    uplink: Uplink
    participation: Participation
    """Contributions to rounds. Written by `participation`."""
    credit: Credit = field(default_factory=Credit)
    silence: Silence = field(default_factory=Silence)
    report: Report | None = None
    """Newest report of this incarnation; None: the first has not come. Written by `machine`."""
    stepping: Stepping | None = None
    """Steps that it has reported; None: none yet. Written by `machine`."""
    up_bits_per_s: float = 0.0
    """Uplink rate granted; 0: no limit. Written by `rates`."""
    charged_bits_per_s: float = 0.0
    """Uplink rate that its bytes may have: the granted one, or a higher one before it that it may
    still not have heard of. 0: no limit. Written by `rates`."""
    fingerprint: str = ""
    """The layout's, from its Hello. Written by `admission`."""
    given_up: bool = False
    """The end of the run goes on without this learner. Written by `ending`."""

    @property
    def connected(self) -> bool:
        return self.presence.peer is not None and self.presence.liveness is not Liveness.LOST

    @property
    def ready(self) -> bool:
        """Connected and holding every fragment: the learner can contribute."""
        return self.connected and -1 not in self.copies.held

    @property
    def peer(self) -> Peer:
        """Routing id of a learner that has a connection."""
        assert self.presence.peer is not None, f"{self.name} has no connection"
        return self.presence.peer

    @property
    def organisation(self) -> str:
        """Organisation that the learner's key belongs to. Empty: it has no key, or none is known.

        A key that names none is an organisation of its own: nobody has said whom it belongs to.
        """
        holder = self.presence.holder
        # No organisation's name has a colon.
        return holder.organisation or f"key: {self.name}" if holder is not None else ""

    @property
    def tokens_per_s_max(self) -> float:
        """Most tokens per second that count by the key ring; 0: the ring sets no bound."""
        holder = self.presence.holder
        return holder.tokens_per_s_max if holder is not None else 0.0

    @property
    def kept_bits_per_s(self) -> float | None:
        """Uplink rate that the learner has confirmed; 0: it knows of no limit; None: it is new and
        sends nothing yet."""
        return self.report.up_bits_per_s if self.report is not None else None
