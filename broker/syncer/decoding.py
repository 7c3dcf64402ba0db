"""Pushes whose chunks wait for their decoding: a learner has few of them at a time. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.messages import Header

_Push: TypeAlias = tuple[str, int, int]
"""Incarnation, fragment and push_id."""


@dataclass
class Decoding:
    """Counts chunks by learner and push, from the order to decode them to the answer.

    A newer push takes the place of an older one whose chunks may still wait, and they hold memory.
    An honest learner has one push in each open round. While one of them is decoded, its round may
    be merged and another one opened. The decoder takes chunks and merges in the order in which they
    come, so it has met all chunks of a round before that round's successor is merged: twice the
    rounds in flight are enough.
    """

    rounds_in_flight: int
    _chunks: dict[str, dict[_Push, int]] = field(default_factory=dict[str, dict[_Push, int]])

    def begin(self, header: Header) -> None:
        """A chunk is going to be decoded. Raises RemoteProtocolError TOO_MANY_PUSHES if it is of
        one push too many."""
        pushes, push = self._chunks.get(header.learner, {}), _push_of(header)
        pushes_max = 2 * self.rounds_in_flight
        if push not in pushes and len(pushes) >= pushes_max:
            raise RemoteProtocolError(
                ErrorCode.TOO_MANY_PUSHES,
                f"push {header.push_id} of {header.learner}",
                expected=f"at most {pushes_max} pushes that wait for their decoding",
                got=str(len(pushes) + 1),
            )
        pushes[push] = pushes.get(push, 0) + 1
        self._chunks[header.learner] = pushes

    def done(self, header: Header) -> None:
        """A chunk is decoded, or does not decode."""
        pushes, push = self._chunks[header.learner], _push_of(header)
        pushes[push] -= 1
        if not pushes[push]:
            del pushes[push]
        if not pushes:
            del self._chunks[header.learner]


def _push_of(header: Header) -> _Push:
    return header.incarnation, header.fragment, header.push_id
