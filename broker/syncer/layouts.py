"""The run's layout for learners that have another one, so that they name the difference. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.run import RunState, refusal
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.layout import split_layout
from narrows.proto.units import counted

PARTS_PER_S: Final = 8.0
"""Parts that all refused learners together get: 3 Mbit/s."""

PARTS_BURST: Final = 16
"""Parts that may leave at once: the layouts of most models have one."""

TOLD_MAX: Final = 64
"""Refused connections that may ask. The oldest is forgotten for one more."""


@dataclass
class LayoutDesk:
    """Answers who was refused for its layout, each part twice at most, and all of them slowly."""

    state: RunState
    _told: dict[ev.Peer, int] = field(default_factory=dict[ev.Peer, int])
    """Parts that each refused connection has got."""
    _parts: tuple[msg.LayoutPart, ...] = ()
    _too_large: RemoteProtocolError | None = None
    """Why there are no parts: a broker before this one took a layout that cannot be told."""
    _parts_of: str = ""
    """The fingerprint of the layout that `_parts` tell."""
    _paid_at: float = 0.0

    def refused(self, peer: ev.Peer) -> None:
        """From now on this connection may ask for the run's layout."""
        self._told.setdefault(peer, 0)
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]

    def answer(self, event: ev.Received, now: float) -> list[ev.Effect] | None:
        """The part that a refused learner asks for; None for one that was not refused.

        Nothing is sent before the layout is known, and beyond the bounds: the learner asks again.
        """
        message = event.message
        if not isinstance(message, msg.AskLayout) or event.peer not in self._told:
            return None
        state = self.state
        self._split()
        paid_at = max(self._paid_at, now - PARTS_BURST / PARTS_PER_S) + 1 / PARTS_PER_S
        answers_max = 1 if self._too_large else 2 * len(self._parts)
        if not state.layout or self._told[event.peer] >= answers_max or paid_at > now:
            return []
        if self._too_large is None and message.first >= len(self._parts):
            return []
        self._told[event.peer] += 1
        self._paid_at = paid_at
        if self._too_large is not None:
            return [ev.Send(event.peer, refusal(self._too_large))]
        return [ev.Send(event.peer, self._parts[message.first])]

    def _split(self) -> None:
        """Cuts the run's layout into parts, once it is known."""
        state = self.state
        if not state.layout or self._parts_of == state.fingerprint:
            return
        self._parts, self._too_large, self._parts_of = (), None, state.fingerprint
        try:
            self._parts = split_layout(state.layout, state.frozen_digest)
        except RemoteProtocolError as error:
            self._too_large = error


def other_layout(state: RunState, name: str, fingerprint: str) -> RemoteProtocolError:
    """The refusal of a learner with another layout. It asks for the run's to name the difference,
    which it knows by `got`."""
    told = f"the run's layout of {counted(len(state.layout), 'tensor')}"
    return RemoteProtocolError(
        ErrorCode.LAYOUT_MISMATCH,
        f"the model of {name!r} is not the run's model",
        expected=told if state.layout else f"the founder's layout {state.fingerprint}",
        got=fingerprint,
        remedy="start every learner with the same model code and configuration; another "
        "model needs a run of its own, that is a broker with another --state-dir",
    )


def refuse_stray(state: RunState, member: Member, what: str) -> list[ev.Effect]:
    """Refuses a piece of version 0, or of its layout, from a learner that does not found."""
    error = RemoteProtocolError(
        ErrorCode.NOT_FOUNDER,
        f"{what} from {member.name}, which does not found this run",
        remedy="the operator names the founder: narrows broker --founder NAME",
    )
    state.tally.refuse(error.code)
    return [ev.Send(member.peer, refusal(error))] if member.presence.peer is not None else []
