"""Says Hello until the broker answers, and gives a quiet connection up. [pure]"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from narrows.learner.session import events as ev
from narrows.proto.errors import ErrorCode, Refused
from narrows.proto.messages import ControlMessage, Refuse, Role, Welcome
from narrows.proto.refusal import error_of
from narrows.proto.timing import HELLO_MAX_S, HELLO_S, QUIET_S, REDIAL_MAX_S, REDIAL_S
from narrows.proto.units import counted

WAITS_FOR = {
    Role.FOUND: "the broker to take version 0, and for the others",
    Role.WAIT: "version 0 from another learner, and for the others",
    Role.ADOPT: "the fragments",
}
"""For the user's log: the next thing that a learner with this role waits for."""


class Connection(StrEnum):
    """State of the session with the broker. REFUSED and LEFT are final."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    LEFT = "left"


@dataclass
class Dialer:
    """Decides when to say Hello and when the broker counts as gone. Times are in seconds."""

    jitter: Callable[[], float]
    """Returns numbers in [0, 1) that spread the repeats of many learners."""
    connection: Connection = Connection.JOINING
    heard_at: float | None = None
    not_admitted: Refused | None = None
    """The broker's reason not to admit this learner for now; None if it gave none."""
    epoch_proof: str = ""
    """The broker's, of the epoch of its last Welcome."""
    _hello_at: float = 0.0
    _delay_s: float = HELLO_S
    _asked_at: float | None = None
    """Time of the first Hello without an answer on this connection; None: all are answered."""
    _redial_s: float = REDIAL_S

    @property
    def closed(self) -> bool:
        """Nothing is sent or expected any more."""
        return self.connection in (Connection.REFUSED, Connection.LEFT)

    def close(self, end: Connection) -> None:
        """The session ends for good, as `end`: REFUSED or LEFT."""
        assert not self.closed, self.connection
        self.connection = end
        assert self.closed, end

    def connected(self, now: float) -> None:
        """There is a new connection. A Hello on the old one is lost: the next is due soon."""
        if self.connection is Connection.JOINING:
            # After a restart of the broker all learners connect at the same moment.
            self._hello_at, self._delay_s = now + HELLO_S * self._spread(), HELLO_S
        self._asked_at = None

    def heard(self, message: ControlMessage, now: float) -> None:
        """A message came: the connection works. A refusal is no sign of a session."""
        assert not self.closed, "messages after the end are dropped by the session"
        # Even a refusal shows that messages get through.
        self._asked_at, self._redial_s = None, REDIAL_S
        if not isinstance(message, Refuse):
            self.heard_at = now

    def heard_data(self, now: float) -> None:
        """A data message came; only a learner with a session is sent any."""
        assert self.connection is Connection.JOINED, self.connection
        self.heard_at = now

    def joined(self, welcome: Welcome, now: float) -> None:
        """A Welcome came."""
        assert not self.closed, self.connection
        self.connection, self.heard_at, self._delay_s = Connection.JOINED, now, HELLO_S
        self.not_admitted, self.epoch_proof = None, welcome.epoch_proof

    def not_yet(self, refuse: Refuse) -> str:
        """Notes a refusal that need not last; returns the line for the user, "" for a repeat."""
        before, self.not_admitted = self.not_admitted, error_of(refuse)
        # A broker without room refuses every Hello: the user is told once.
        if before is not None and before.code == refuse.code:
            return ""
        if refuse.code == ErrorCode.UNKNOWN_SESSION:
            return "the broker does not know this session, it was restarted perhaps; joining again"
        return f"not admitted yet: {refuse.message}. {refuse.remedy}".rstrip()

    def refused(self, refuse: Refuse) -> Refused:
        """The error for a refusal that lasts."""
        return error_of(refuse)

    def lose(self, now: float) -> None:
        """The session is gone; the next Hello is due at once, later ones with back-off."""
        if self.connection is Connection.JOINED:
            self.connection, self._hello_at, self._delay_s = Connection.JOINING, now, HELLO_S
        assert self.connection is not Connection.JOINED

    def other_count(self, now: int, before: int) -> Refused:
        """The error for a broker that came back with another number of fragments."""
        # Fragments are cut by this number: nothing that is held here fits another one.
        what, remedy = f"the broker now has {counted(now, 'fragment')}", "start the learner again"
        return Refused(ErrorCode.LAYOUT_MISMATCH, what, expected=str(before), remedy=remedy)

    def silent_s(self, now: float) -> float:
        """Seconds since the broker was last heard; 0 before it ever was."""
        return now - self.heard_at if self.heard_at is not None else 0.0

    def offline_from(self, max_offline_s: float) -> float:
        """Time from which a learner that hears nothing is offline for longer than this; 0: inf."""
        # Before the broker was ever heard, joining has a time limit of its own.
        if self.heard_at is None or max_offline_s <= 0:
            return math.inf
        return self.heard_at + max_offline_s

    def is_quiet(self, now: float) -> bool:
        """True for a joined learner that has heard nothing for QUIET_S."""
        joined = self.connection is Connection.JOINED and self.heard_at is not None
        return joined and now >= (self.heard_at or 0.0) + QUIET_S

    def hello_due(self, now: float) -> bool:
        """True if a Hello is to be sent now; the next one is then scheduled."""
        if self.connection is not Connection.JOINING or now < self._hello_at:
            return False
        self._hello_at = now + self._delay_s * (1 + self._spread())
        self._delay_s = min(self._delay_s * 2, HELLO_MAX_S)
        assert self._hello_at > now, "a Hello that is due at once again would spin"
        return True

    def redial(self, now: float) -> list[ev.Effect]:
        """Call before each Hello: asks for a new connection if the old one had its time."""
        assert self.connection is Connection.JOINING, self.connection
        if self._asked_at is None:
            self._asked_at = now
        if now < self._asked_at + self._redial_s:
            return []
        self._asked_at = now
        self._redial_s = min(2 * self._redial_s, REDIAL_MAX_S)
        return [ev.Redial()]

    def next_deadline(self) -> float | None:
        """Time of the next Hello, or when the broker will count as gone; None: never."""
        if self.closed:
            return None
        if self.connection is Connection.JOINING:
            return self._hello_at
        return None if self.heard_at is None else self.heard_at + QUIET_S

    def _spread(self) -> float:
        jitter = self.jitter()
        assert 0.0 <= jitter < 1.0, jitter
        return jitter
