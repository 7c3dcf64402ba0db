"""The holder of a key: its name, its role, and what it may say.

Name, role and organisation come from the key that a connection has proved, never from a message.
Without keys there are no holders: whoever reaches the broker may say everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class KeyRole(StrEnum):
    """Purpose of a key."""

    LEARNER = "learner"
    """Trains under its own name."""
    RELAY = "relay"
    """Carries the messages of the learners that its grant names."""
    STANDBY = "standby"
    """Follows the run, to take the broker's place."""
    OPERATOR = "operator"
    """Reads the whole status, addresses and incarnations included."""
    MONITOR = "monitor"
    """Reads the totals of the status."""
    ENROL = "enrol"
    """Hands over a public key for the name of its invitation, once."""


_TRAINS: Final = frozenset(
    {
        "hello", "report", "push", "decline", "adopted", "fetch", "missing", "alive", "bye",
        "asklayout", "layoutpart", "askstatus", "enrol",
    }
)  # fmt: skip
_ASKS: Final = frozenset({"askstatus", "enrol"})

MAY_SAY: Final[Mapping[KeyRole, frozenset[str]]] = {
    KeyRole.LEARNER: _TRAINS,
    KeyRole.RELAY: _TRAINS,
    KeyRole.STANDBY: _ASKS,
    KeyRole.OPERATOR: _ASKS,
    KeyRole.MONITOR: _ASKS,
    KeyRole.ENROL: frozenset({"enrol"}),
}
"""Control messages that each role may send, by the tag of the message. A holder may enrol its own
next key."""

assert MAY_SAY.keys() == set(KeyRole), "each role has its messages"


@dataclass(frozen=True)
class KeyHolder:
    """The holder of an admitted key."""

    name: str
    role: KeyRole = KeyRole.LEARNER
    organisation: str = ""
    """Learners of one organisation trust what each of them declares. Empty: one of its own."""
    carries: tuple[str, ...] = ()
    """Learners for which a relay speaks."""
    tokens_per_s_max: float = 0.0
    """Most tokens per second that count for this holder; 0: the broker derives a bound."""

    @property
    def account(self) -> str:
        """Name under which quotas and connections count. An invitation uses up its own: who finds
        an old one must not pause the learner of that name."""
        return f"{self.name} (invitation)" if self.role is KeyRole.ENROL else self.name

    @property
    def trains(self) -> bool:
        """True if data and topics are open to it."""
        return self.role in (KeyRole.LEARNER, KeyRole.RELAY)

    def speaks_for(self, learner: str) -> bool:
        """True if messages of the learner `learner` may come from this holder."""
        if self.role is KeyRole.RELAY:
            return learner in self.carries
        return self.role is KeyRole.LEARNER and learner == self.name

    def may_say(self, tag: str) -> bool:
        """True if the role may send control messages of this tag ("hello", "report", ...)."""
        return tag in MAY_SAY[self.role]
