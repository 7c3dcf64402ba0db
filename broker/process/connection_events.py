"""ZeroMQ's word of the connections that its sockets accept and lose."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import zmq


class ConnectionEvent(NamedTuple):
    """A connection has come or gone."""

    descriptor: int
    has_come: bool
    source: zmq.Socket[bytes]
    """The broker's socket that it belongs to."""
    held_max: int
    """Bytes that a connection of this socket may hold."""


class ConnectionEvents:
    """One monitor for each of the broker's sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._all: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes], int]] = []

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """The sockets that a poll loop watches."""
        return [monitor for monitor, _, _ in self._all]

    def watch(self, source: zmq.Socket[bytes], held_max: int) -> None:
        """Follows the connections of a socket. Call it before the socket binds."""
        where = f"inproc://connections-{len(self._all)}"
        source.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        # Without a limit: a full queue would stop the thread that serves all connections.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(where)
        self._all.append((monitor, source, held_max))

    def read(self) -> Iterator[ConnectionEvent]:
        """All that has happened since the last time."""
        for monitor, source, held_max in self._all:
            while True:
                try:
                    frames = monitor.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                event, descriptor = struct.unpack("=Hi", frames[0])
                yield ConnectionEvent(descriptor, event == zmq.EVENT_ACCEPTED, source, held_max)

    def close(self) -> None:
        for monitor, source, _ in self._all:
            source.disable_monitor()
            monitor.close()
