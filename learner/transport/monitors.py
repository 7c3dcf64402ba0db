"""Watches the handshakes of sockets: a socket that is refused for its key tells nobody else."""

from __future__ import annotations

from collections.abc import Container, Iterator

import zmq

from narrows.proto.keys import MONITORED

Socket = zmq.Socket[bytes]


class Monitors:
    """The monitors of the sockets of one poller."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._watched: dict[Socket, Socket] = {}
        """The watched socket by its monitor."""

    def watch(self, socket: Socket) -> None:
        """Call it before the socket connects, or the event of a quick handshake is missed."""
        monitor = socket.get_monitor_socket(MONITORED)
        self._watched[monitor] = socket
        self._poller.register(monitor, zmq.POLLIN)

    def unwatch(self, socket: Socket) -> None:
        """Call it before the socket is closed."""
        socket.disable_monitor()
        for monitor in [each for each, watched in self._watched.items() if watched is socket]:
            del self._watched[monitor]
            self._poller.unregister(monitor)
            monitor.close(linger=0)

    def read(self, ready: Container[Socket | int]) -> Iterator[tuple[Socket, bytes]]:
        """Each watched socket with the frame of an event; `ready`: what the poller has named."""
        for monitor, socket in list(self._watched.items()):
            # An event before this one may have had the socket closed.
            while monitor in ready and monitor in self._watched and monitor.poll(0):
                yield socket, monitor.recv_multipart()[0]
