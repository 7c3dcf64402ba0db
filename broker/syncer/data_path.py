"""Learners whose data does not get through, each named once in a session. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.run import RunState
from narrows.proto.codec import codecs_of
from narrows.proto.flow import chunk_elements, push_bytes_max
from narrows.proto.limits import RATE_MIN

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


def announced(state: RunState, member: Member, now: float) -> list[ev.Effect]:
    """A learner says that a push comes."""
    if member.announced == 0:
        member.silent_since = now
    member.announced += 1
    if member.announced < PUSHES_MIN:
        return []
    return silent(state, member, member.silent_since, state.settings.push_codec, now)


def arrived(member: Member) -> None:
    """Data of a learner has come."""
    member.announced = 0


def silent(
    state: RunState, member: Member, since: float, codec: str, now: float
) -> list[ev.Effect]:
    """A learner has had data in this codec to send, and nothing has come."""
    if member.silence_named or now - since < max(SILENT_S, _message_s(state, codec)):
        return []
    member.silence_named = True
    text = (
        f"no data has come from {member.name} for {now - since:.0f} s, although it has some to "
        f"send (uplink, port {state.uplink_port}): {REMEDY}"
    )
    return [ev.Note("warning", text)]


def _message_s(state: RunState, codec: str) -> float:
    """Time of the largest regular message on the slowest line that a budget can name."""
    largest = max((fragment.elements for fragment in state.table), default=0)
    sizes = (
        push_bytes_max(name, min(largest, chunk_elements(state.settings, name)))
        for name in codecs_of(codec)
    )
    return 8 * max(sizes) / RATE_MIN
