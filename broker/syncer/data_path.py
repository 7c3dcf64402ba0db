"""Learners whose data does not get through, each named once in a session. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member

SILENT_S = 20.0
"""A learner that has data to send, or none to receive it on, is named after so long."""

PUSHES_MIN = 3
"""A learner may have withdrawn the one or two pushes that it announced, and be at rest since."""

REMEDY = "does a firewall or NAT on the way block the port?"


@dataclass
class Deaf:
    """Learners that have not subscribed: pub/sub would drop what is sent to them."""

    _since: dict[str, float] = field(default_factory=dict[str, float])
    _named: set[str] = field(default_factory=set[str])

    def look(self, deaf: Mapping[str, str], port: int, now: float) -> list[str]:
        """`deaf`: their names by incarnation. Returns what to warn of."""
        self._since = {each: self._since.get(each, now) for each in deaf}
        self._named &= deaf.keys()
        late = [
            each
            for each, since in self._since.items()
            if now - since >= SILENT_S and each not in self._named
        ]
        self._named.update(late)
        return [
            f"{deaf[each]} has not subscribed to the downlink (port {port}) for {SILENT_S:g} s, "
            f"nothing can be sent to it: {REMEDY}"
            for each in late
        ]


def announced(member: Member, port: int, now: float) -> list[ev.Effect]:
    """A learner says that a push comes."""
    if member.announced == 0:
        member.silent_since = now
    member.announced += 1
    return silent(member, member.silent_since, port, now) if member.announced >= PUSHES_MIN else []


def arrived(member: Member) -> None:
    """Data of a learner has come."""
    member.announced = 0


def silent(member: Member, since: float, port: int, now: float) -> list[ev.Effect]:
    """A learner has had data to send, and nothing has come."""
    if member.silence_named or now - since < SILENT_S:
        return []
    member.silence_named = True
    text = (
        f"no data has come from {member.name} for {now - since:.0f} s, although it has some to "
        f"send (uplink, port {port}): {REMEDY}"
    )
    return [ev.Note("warning", text)]
