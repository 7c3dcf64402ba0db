"""The connection to the broker: Hello until somebody answers, given up when it is quiet. [pure]"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from narrows.learner.session import events as ev
from narrows.proto.codec import codec_names
from narrows.proto.errors import ErrorCode, Refused
from narrows.proto.frames import encode_control
from narrows.proto.limits import PROTOCOL, RATE_MIN
from narrows.proto.messages import ControlMessage, Epoch, Hello, LayoutEntry, Refuse, Role
from narrows.proto.timing import HELLO_MAX_S, HELLO_S, QUIET_S, REDIAL_MAX_S, REDIAL_S
from narrows.proto.units import counted

WAITS_FOR = {
    Role.FOUND: "the broker to take version 0, and for the others",
    Role.WAIT: "version 0 from another learner, and for the others",
    Role.ADOPT: "the fragments",
}
"""What a learner with this role waits for, for its user."""


@dataclass(frozen=True)
class Identity:
    """Who the learner is, fixed for the life of the process."""

    name: str
    incarnation: str
    layout: tuple[LayoutEntry, ...]
    frozen_digest: int
    contribute_after_steps: int = 0
    """No contribution before so many own steps (the ramp of a newcomer)."""

    def hello(
        self,
        run_id: str,
        epoch: Epoch,
        steps: int,
        tokens: int,
        versions: tuple[int, ...] = (),
    ) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            name=self.name,
            incarnation=self.incarnation,
            run_id=run_id,
            epoch=epoch,
            layout=self.layout,
            frozen_digest=self.frozen_digest,
            codecs=codec_names(),
            step=steps,
            tokens=tokens,
            versions=versions,
        )

    @property
    def hello_s(self) -> float:
        """Time that a Hello takes on the slowest line that a budget can name."""
        return 8 * len(encode_control(self.hello("", (0, 0, 0), 0, 0))) / RATE_MIN


def error_of(refuse: Refuse) -> Refused:
    """A refusal of the session as the error that the user of the learner sees."""
    known = refuse.code in set(ErrorCode)
    return Refused(
        ErrorCode(refuse.code) if known else ErrorCode.BAD_MESSAGE,
        refuse.message,
        expected=refuse.expected,
        got=refuse.got,
        remedy=refuse.remedy,
    )


class Connection(StrEnum):
    """Where the session stands with the broker."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    LEFT = "left"


@dataclass
class Dialer:
    """When to say Hello, and when the broker counts as gone. Times in seconds."""

    jitter: Callable[[], float]
    """Numbers in [0, 1) that spread the repeats of many learners."""
    connection: Connection = Connection.JOINING
    heard_at: float | None = None
    not_admitted: Refused | None = None
    """Why the broker does not admit this learner for now."""
    _hello_at: float = 0.0
    _delay_s: float = HELLO_S
    _asked_at: float | None = None
    """When the first Hello without an answer was said on this connection."""
    _redial_s: float = REDIAL_S

    @property
    def closed(self) -> bool:
        """Nothing is sent or expected any more."""
        return self.connection in (Connection.REFUSED, Connection.LEFT)

    def connected(self, now: float) -> None:
        """A Hello that was sent before is lost: the next one is due, spread over HELLO_S."""
        if self.connection is Connection.JOINING:
            self._hello_at, self._delay_s = now + HELLO_S * self.jitter(), HELLO_S
        self._asked_at = None

    def heard(self, message: ControlMessage, now: float) -> None:
        """A message came: the connection works; a refusal is no sign of a session."""
        self._asked_at, self._redial_s = None, REDIAL_S
        if not isinstance(message, Refuse):
            self.heard_at = now

    def joined(self, now: float) -> None:
        """A Welcome came."""
        self.connection, self.heard_at, self._delay_s = Connection.JOINED, now, HELLO_S
        self.not_admitted = None

    def not_yet(self, refuse: Refuse) -> str:
        """A refusal that need not last: what to tell the user, "" if that has been told."""
        told, self.not_admitted = self.not_admitted, error_of(refuse)
        if told is not None and told.code == refuse.code:
            return ""
        if refuse.code == ErrorCode.UNKNOWN_SESSION:
            return "the broker does not know this session, it was restarted perhaps; joining again"
        return f"not admitted yet: {refuse.message}. {refuse.remedy}".rstrip()

    def lose(self, now: float) -> None:
        """The session is gone; the next Hello is due at once, later ones with back-off."""
        if self.connection is Connection.JOINED:
            self.connection, self._hello_at, self._delay_s = Connection.JOINING, now, HELLO_S

    def other_count(self, now: int, before: int) -> Refused:
        """The broker came back with another number of fragments."""
        what, remedy = f"the broker now has {counted(now, 'fragment')}", "start the learner again"
        return Refused(ErrorCode.LAYOUT_MISMATCH, what, expected=str(before), remedy=remedy)

    def silent_s(self, now: float) -> float:
        """For how long the broker was not heard; 0 before it ever was."""
        return now - self.heard_at if self.heard_at is not None else 0.0

    def is_quiet(self, now: float) -> bool:
        """Joined, and yet nothing was heard for QUIET_S."""
        joined = self.connection is Connection.JOINED and self.heard_at is not None
        return joined and now >= (self.heard_at or 0.0) + QUIET_S

    def hello_due(self, now: float) -> bool:
        """True if a Hello is to be sent now; the next one is then scheduled."""
        if self.connection is not Connection.JOINING or now < self._hello_at:
            return False
        self._hello_at = now + self._delay_s * (1 + self.jitter())
        self._delay_s = min(self._delay_s * 2, HELLO_MAX_S)
        return True

    def redial(self, identity: Identity, now: float) -> list[ev.Effect]:
        """Comes before each Hello: is it to be said on a new connection?"""
        if self._asked_at is None:
            self._asked_at = now
        if now < self._asked_at + self._redial_s:
            return []
        self._asked_at = now
        self._redial_s = min(2 * self._redial_s, max(REDIAL_MAX_S, 2 * identity.hello_s))
        return [ev.Redial()]

    def next_deadline(self) -> float | None:
        if self.closed:
            return None
        if self.connection is Connection.JOINING:
            return self._hello_at
        return None if self.heard_at is None else self.heard_at + QUIET_S
