"""Messages of a socket, read part by part: a peer may finish one of a million parts.

ZeroMQ hands a message out whole or not at all, so the size of its parts was bounded before, and
their number was not. Parts beyond those that a message may have are dropped, some in each turn of
the loop. The socket gives nothing else before they are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq

PARTS_PER_TURN: Final = 4096
"""Parts that are dropped from one socket before the others get their turn: a few milliseconds."""


class MessageReader:
    """Reads whole messages of a bounded number of parts."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        most: int,
        too_many: Callable[[list[zmq.Frame]], None],
    ) -> None:
        """`too_many` is called once for a message of more than `most` parts, with its first."""
        self._socket, self._most, self._too_many = socket, most, too_many
        self._drops = False
        self._left = PARTS_PER_TURN
        self.is_behind = False
        """The last None did not mean that nothing waits."""

    def receive(self) -> list[zmq.Frame] | None:
        """The next message; None if there is none, or if it is the others' turn."""
        parts: list[zmq.Frame] = []
        while self._left > 0:
            part = receive_part(self._socket)
            if part is None:
                break
            if self._drops:
                self._left -= 1
            else:
                parts.append(part)
                if len(parts) > self._most:
                    self._too_many(parts)
                    self._left -= len(parts)
                    self._drops, parts = True, []
            if not part.more:
                if parts:
                    return parts
                self._drops = False
        self.is_behind = self._left <= 0
        self._left = PARTS_PER_TURN
        return None


def receive_part(socket: zmq.Socket[bytes]) -> zmq.Frame | None:
    """The next part of a message, None if there is none."""
    try:
        return socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
