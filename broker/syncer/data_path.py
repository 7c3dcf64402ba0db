"""Warnings about learners whose data does not get through, each once in a session. [pure]

This module alone writes `Member.silence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member, Silence
from narrows.broker.syncer.run import RunState
from narrows.proto.codec import codecs_of
from narrows.proto.flow import chunk_elements, push_bytes_max
from narrows.proto.limits import RATE_MIN

SILENT_S = 20.0
"""A learner that has data to send, or no stream to receive on, is named after this time."""

PUSHES_MIN = 3
"""Announced pushes without data that raise suspicion. A learner may have withdrawn one or two and
be at rest since."""

REMEDY = "does a firewall or NAT on the way block the port?"


@dataclass
class Deaf:
    """Learners that have not subscribed: pub/sub would drop what is sent to them."""

    _since: dict[str, float] = field(default_factory=dict[str, float])
    _named: set[str] = field(default_factory=set[str])

    def look(self, deaf: Mapping[str, str], port: int, now: float) -> list[str]:
        """Returns warnings; `deaf` has the learners' names by incarnation."""
        # A learner that subscribed after all is dropped here, and may be named again later.
        self._since = {each: self._since.get(each, now) for each in deaf}
        self._named &= deaf.keys()
        late = [
            each
            for each, since in self._since.items()
            if now - since >= SILENT_S and each not in self._named
        ]
        self._named.update(late)
        assert self._named <= self._since.keys() == deaf.keys()
        return [
            f"{deaf[each]} has not subscribed to the downlink (port {port}) for {SILENT_S:g} s, "
            f"nothing can be sent to it: {REMEDY}"
            for each in late
        ]


def begin(member: Member) -> None:
    """A learner begins another session: its warning may come again."""
    member.silence = Silence()


def announced(state: RunState, member: Member, now: float) -> list[ev.Effect]:
    """Counts an announced push whose data has not come yet."""
    # The time counts from the first announcement: later ones do not make the silence younger.
    if member.silence.announced == 0:
        member.silence.since = now
    member.silence.announced += 1
    if member.silence.announced < PUSHES_MIN:
        return []
    return silent(state, member, member.silence.since, state.settings.push_codec, now)


def arrived(member: Member) -> None:
    """Notes that data of a learner has come."""
    member.silence.announced = 0


def silent(
    state: RunState, member: Member, since: float, codec: str, now: float
) -> list[ev.Effect]:
    """Warns if a learner has had data in this codec to send since then and none has come."""
    if member.silence.named or now - since < max(SILENT_S, _message_s(state, codec)):
        return []
    member.silence.named = True
    text = (
        f"no data has come from {member.name} for {now - since:.0f} s, although it has some to "
        f"send (uplink, port {state.uplink_port}): {REMEDY}"
    )
    return [ev.Note("warning", text)]


def _message_s(state: RunState, codec: str) -> float:
    """Seconds that the largest regular message takes on the slowest line that a budget allows."""
    # A line that is merely slow is not suspected: one whole message fits into the patience.
    largest = max((fragment.elements for fragment in state.table), default=0)
    sizes = (
        push_bytes_max(name, min(largest, chunk_elements(state.settings, name)))
        for name in codecs_of(codec)
    )
    message_s = 8 * max(sizes) / RATE_MIN
    assert message_s > 0.0
    return message_s
