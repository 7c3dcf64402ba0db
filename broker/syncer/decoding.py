"""Chunks that wait for their decoding: a learner has few pushes at a time, and few chunks of
version 0. [pure]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.messages import DataKind, Header

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
    _founding: dict[_Push, int] = field(default_factory=dict[_Push, int])
    """Chunks of version 0, by fragment."""
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

    def begin_founding(self, header: Header, chunks_max: int) -> bool:
        """A chunk of version 0 is going to be decoded, unless as many of its fragment wait as a
        whole one may have; then False."""
        part = _push_of(header)
        if self._founding.get(part, 0) >= chunks_max:
            return False
        self._founding[part] = self._founding.get(part, 0) + 1
        return True

    def done(self, header: Header) -> None:
        """A chunk is decoded, or does not decode."""
        push = _push_of(header)
        if header.kind is DataKind.FOUND:
            self._founding[push] -= 1
            if not self._founding[push]:
                del self._founding[push]
            return
        pushes = self._chunks[header.learner]
        pushes[push] -= 1
        if not pushes[push]:
            del pushes[push]
        if not pushes:
            del self._chunks[header.learner]


def _push_of(header: Header) -> _Push:
    return header.incarnation, header.fragment, header.push_id
