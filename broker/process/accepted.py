"""One accepted TCP connection, and what it holds of our memory in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import zmq

OPEN_BYTES: Final = {True: 274, False: 84}
"""Bytes that a peer has acknowledged once its handshake is over, with keys and without. With keys:
greeting 64, WELCOME 170, READY at least 54; an ERROR is shorter."""

_FRAME_BYTES: Final = {True: 33, False: 0}
"""Bytes that each frame is longer on the wire, beside its length: with keys and without."""


def line_bytes(frames: Iterable[int], *, with_keys: bool) -> int:
    """Bytes that ZeroMQ makes of frames of these lengths."""
    more = _FRAME_BYTES[with_keys]
    return sum(n + more + (2 if n + more < 256 else 9) for n in frames)


@dataclass(slots=True, eq=False)
class Accepted:
    """One accepted TCP connection. Bytes are as on the wire."""

    source: zmq.Socket[bytes]
    """The broker's socket that it belongs to."""
    held_max: int
    peer: tuple[str, int]
    """Address and port of the other end: they tell whether the descriptor is still its own."""
    delivered: int = 0
    """Bytes of all messages that came out of the socket."""
    held: int = 0
    """Bytes that have come in and did not come out of the socket yet."""
    handed: int = 0
    """Bytes of all data messages that the socket was given for it."""
    queued: int = 0
    """Bytes of these that its other end has not acknowledged."""
    is_open: bool = False
    """The handshake is over."""
    subscriptions: int = 0
    topics: set[bytes] = field(default_factory=set[bytes])
    keys: set[str] = field(default_factory=set[str])
    """Keys of its messages. One as a rule; a message that was read late may show that of the
    connection which had the descriptor before."""

    @property
    def is_silent(self) -> bool:
        """It has never sent a message."""
        return not self.delivered

    def measure(self, acknowledged: int, received: int) -> None:
        """Takes what TCP has counted."""
        self.held = received - self.delivered
        # The other sockets are given no data messages, and the handshake was acknowledged too.
        self.queued = max(self.handed - acknowledged, 0)
