"""The connections of one of the broker's sockets: whose they are, and how one of them is ended.

libzmq has no call that ends a connection. `shutdown` on its descriptor does: from then on the
kernel carries nothing more, and libzmq finds it closed.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import zmq

UNFINISHED_BYTES_MAX: Final = 128 << 20
"""Bytes that may come on a connection before a message is whole. Whole messages that wait to be
read are 40 MiB at most: they fill the queues of their socket and the kernel's."""

BYTES_RECEIVED: Final = slice(128, 136)
"""Place of tcpi_bytes_received in Linux' struct tcp_info."""

_log: Final = logging.getLogger("narrows.broker")


@dataclass
class _Known:
    address: str
    keys: set[str] = field(default_factory=set[str])
    """Keys of its messages, "" without keys; empty: no message has come. Two keys: a late message
    of an earlier connection with the same descriptor was taken for one of this connection."""
    heard_bytes: int = 0
    """Bytes that had come by the look after the last message; -1: one has come since."""
    has_waited: bool = False
    """It ended without a message, and a look has met it since."""


class Connections:
    """The connections of a socket by descriptor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        watched: zmq.Socket[bytes],
        *,
        tells_silent: bool,
    ) -> None:
        """Call it before the socket binds. `tells_silent`: the log tells of each connection that
        ends without a message."""
        # Never EVENT_HANDSHAKE_FAILED_PROTOCOL: to send it, libzmq overwrites the error number by
        # which it ends a connection with an altered byte, which then stays open and is not read.
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        address = f"inproc://connections-{watched.fileno()}"
        watched.monitor(address, events)
        self.monitor = context.socket(zmq.PAIR)
        # No limit: behind one, libzmq's own threads would wait until somebody reads here.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        self._known: dict[int, _Known] = {}
        self._tells_silent = tells_silent
        self._silent: dict[int, _Known] = {}
        """By descriptor: connections that have ended, and none of their messages was read yet."""
        self._early: set[int] = set()
        """Descriptors whose end was told before their beginning: two threads of libzmq tell."""

    def follow(self) -> None:
        """Takes in which connections have begun and ended."""
        while self.monitor.poll(0):
            event, value = struct.unpack("=HI", self.monitor.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED and value in self._early:
                self._early.remove(value)
            elif event == zmq.EVENT_ACCEPTED:
                self._known[value] = _Known(_address(value))
            elif value not in self._known:
                self._early.add(value)
            else:
                ended = self._known.pop(value)
                if self._tells_silent and not ended.keys:
                    self._silent.setdefault(value, ended)

    def heard(self, descriptor: int, key: str) -> None:
        """A message was read. Its connection may have ended meanwhile."""
        if descriptor not in self._known:
            self.follow()
        known = self._known.get(descriptor) or self._silent.pop(descriptor, None)
        if known is not None:
            known.keys.add(key)
            known.heard_bytes = -1

    def end(self, is_unwanted: Callable[[set[str]], bool]) -> None:
        """Ends the connections whose keys are unwanted; an empty set stands for a connection
        without a message. Every connection whose handshake is over is known here."""
        self.follow()
        for descriptor, known in self._known.items():
            if is_unwanted(known.keys):
                _end(descriptor)

    def look(self) -> None:
        """Ends connections on which a message never ends: libzmq keeps its parts in memory. Warns
        of connections that have ended without a message."""
        for descriptor, known in self._known.items():
            came_bytes = _received_bytes(descriptor)
            if known.heard_bytes < 0:
                known.heard_bytes = came_bytes
            elif came_bytes > known.heard_bytes + UNFINISHED_BYTES_MAX:
                mib = UNFINISHED_BYTES_MAX >> 20
                _log.warning("closed: %d MiB and no message from %s", mib, known.address)
                _end(descriptor)
        for descriptor, known in list(self._silent.items()):
            if known.has_waited:
                del self._silent[descriptor]
                _log.warning(
                    "a connection from %s ended before its first message: the peer expects another "
                    "broker's key (`narrows keys show` prints the right one), has none, has one "
                    "that is not admitted, or speaks something else",
                    known.address,
                )
            known.has_waited = True  # Its message may still wait behind those of others.


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor of libzmq as a socket of Python's. It takes no other one, as a duplicate would:
    strangers may hold all that there are. Raises OSError."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()  # Else it would be closed.


def _end(descriptor: int) -> None:
    with suppress(OSError), _borrowed(descriptor) as borrowed:
        borrowed.shutdown(socket.SHUT_RDWR)


def _received_bytes(descriptor: int) -> int:
    with suppress(OSError), _borrowed(descriptor) as borrowed:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.stop)
        return int.from_bytes(info[BYTES_RECEIVED], "little")
    return 0


def _address(descriptor: int) -> str:
    with suppress(OSError), _borrowed(descriptor) as borrowed:
        return str(borrowed.getpeername()[0])
    return "an address that is gone"
