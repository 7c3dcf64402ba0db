"""Owns a learner's sockets: a DEALER for control, S publishers up, S subscribers down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from narrows.proto import socket_options
from narrows.proto.address import parse_address
from narrows.proto.frames import downlink_topic
from narrows.proto.shell import WakePipe

FRAMES_PER_TURN = 64
"""Messages read from one socket before the others get their turn. Without a limit a fast downlink
would keep the control messages, and thus the acknowledgements, waiting."""

Socket = zmq.Socket[bytes]


@dataclass
class LearnerSockets:
    """All sockets of one learner. One thread uses them; any thread may call `wake`."""

    broker: str
    name: str
    incarnation: str
    control_up_bytes: int = 0
    control_down_bytes: int = 0
    _has_connected: bool = False
    _uplinks: list[Socket] = field(default_factory=list[Socket])
    _downlinks: list[Socket] = field(default_factory=list[Socket])
    _listeners: list[int] = field(default_factory=list[int])
    """Subscriptions per uplink stream: without one a message would be dropped silently."""
    _monitors: dict[Socket, Socket] = field(default_factory=dict[Socket, Socket])
    """The watched socket by the socket that reports its connections."""
    _unconnected: set[Socket] = field(default_factory=set[Socket])
    """Downlinks that have never been connected."""
    _reconnected: set[int] = field(default_factory=set[int])
    ports: tuple[int, int] = (0, 0)
    """Ports of uplink and downlink, once the streams are open."""

    def __post_init__(self) -> None:
        self._address = parse_address(self.broker)
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._wake = WakePipe()
        # Asking a socket that has nothing costs an exception: only the ready ones are read.
        self._ready: set[Socket | int] = set()
        self._poller.register(self._wake.source, zmq.POLLIN)
        self._open_control()

    @property
    def downlink_open(self) -> bool:
        """Every downlink stream has had a connection."""
        return bool(self._downlinks) and not self._unconnected

    def redial(self) -> None:
        """Replaces the control connection; the next Welcome then replaces the data connections.

        Whatever made the control connection look alive may have met those as well.
        """
        self._drop(self._control, linger=0)
        self._open_control()
        self.ports = (0, 0)

    def open_streams(self, streams: int, uplink_port: int, downlink_port: int) -> None:
        """Connects the data sockets. The same streams and ports again change nothing."""
        if (self.ports, len(self._uplinks)) == ((uplink_port, downlink_port), streams):
            return
        for socket in (*self._uplinks, *self._downlinks):
            # Messages that still wait there are for ports that the broker has left.
            self._drop(socket, linger=0)
        self.ports = (uplink_port, downlink_port)
        self._listeners = [0] * streams
        self._uplinks = [self._make(zmq.XPUB, socket_options.XPUB) for _ in range(streams)]
        downlinks = [self._make(zmq.SUB, socket_options.DATA) for _ in range(streams)]
        self._unconnected, self._downlinks = set(downlinks), downlinks
        for socket in self._uplinks:
            self._connect(socket, uplink_port)
        for stream, socket in enumerate(self._downlinks):
            socket.setsockopt(zmq.SUBSCRIBE, downlink_topic(self.name, self.incarnation, stream))
            self._watch(socket)
            self._connect(socket, downlink_port)

    @property
    def uplink_open(self) -> bool:
        """The broker listens on every uplink stream."""
        return bool(self._listeners) and all(count > 0 for count in self._listeners)

    def take_reconnected(self) -> list[int]:
        """Uplink streams on which the broker has subscribed since the last call."""
        streams = sorted(self._reconnected)
        self._reconnected.clear()
        return streams

    def wait(self, timeout_s: float) -> None:
        """Sleeps until something arrives, `wake` is called, or the time is over."""
        # Rounded up: with a fraction of a millisecond left the loop would spin.
        self._ready = {source for source, _ in self._poller.poll(math.ceil(timeout_s * 1000))}
        if self._wake.source in self._ready:
            self._wake.drain()
        for monitor in [each for each in self._monitors if each in self._ready]:
            self._read_monitor(monitor)
        for stream, socket in enumerate(self._uplinks):
            if socket in self._ready:
                self._read_subscriptions(stream, socket)

    def wake(self) -> None:
        """Ends the `wait` of the thread that uses the sockets; never blocks."""
        self._wake.wake()

    def has_connected(self) -> bool:
        """True once for every new control connection, when it takes messages."""
        # The handshake may be over before the socket takes messages.
        if not (self._has_connected and self._control.poll(0, zmq.POLLOUT)):
            return False
        self._has_connected = False
        return True

    def receive_control(self) -> Iterator[bytes]:
        """Control messages that have arrived, at most FRAMES_PER_TURN."""
        for _ in range(FRAMES_PER_TURN if self._control in self._ready else 0):
            try:
                frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.control_down_bytes += sum(map(len, frames))
            yield frames[0]

    def receive_data(self) -> Iterator[list[bytes]]:
        """Data messages that have arrived, at most FRAMES_PER_TURN of each stream."""
        for socket in self._downlinks:
            for _ in range(FRAMES_PER_TURN if socket in self._ready else 0):
                try:
                    yield socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break

    def send_control(self, frame: bytes) -> bool:
        """Sends, or drops the message if there is no connection and returns False: the session
        says Hello again then, and tells anew what still matters."""
        try:
            self._control.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.control_up_bytes += len(frame)
        return True

    def send_data(self, stream: int, frames: Sequence[bytes]) -> None:
        self._uplinks[stream].send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Closes all; messages that were sent already get the linger time of their socket."""
        for socket in (self._control, *self._uplinks, *self._downlinks):
            self._drop(socket)
        self._context.term()
        self._wake.close()

    def _open_control(self) -> None:
        self._control = self._make(zmq.DEALER, socket_options.DEALER)
        self._watch(self._control)
        self._has_connected = False
        self._connect(self._control, self._address.port)

    def _watch(self, socket: Socket) -> None:
        """Call it before the socket connects, or the event of a quick handshake is missed."""
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._monitors[monitor] = socket
        self._poller.register(monitor, zmq.POLLIN)

    def _unwatch(self, socket: Socket) -> None:
        socket.disable_monitor()
        for monitor in [each for each, watched in self._monitors.items() if watched is socket]:
            del self._monitors[monitor]
            self._poller.unregister(monitor)
            monitor.close(linger=0)

    def _read_monitor(self, monitor: Socket) -> None:
        socket = self._monitors[monitor]
        while monitor.poll(0):
            monitor.recv_multipart()
        if socket is self._control:
            self._has_connected = True
        else:
            self._unconnected.discard(socket)
            self._unwatch(socket)  # Whether it was connected once is all that is asked.

    def _drop(self, socket: Socket, linger: int | None = None) -> None:
        self._unwatch(socket)
        self._poller.unregister(socket)
        socket.close(linger=linger)

    def _make(self, kind: int, options: dict[str, int]) -> Socket:
        socket = self._context.socket(kind)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.IPV6, self._address.is_ipv6)
        return socket

    def _connect(self, socket: Socket, port: int) -> None:
        socket.connect(str(self._address._replace(port=port)))
        self._poller.register(socket, zmq.POLLIN)

    def _read_subscriptions(self, stream: int, socket: Socket) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_new = frame[:1] == b"\x01"
            self._listeners[stream] += 1 if is_new else -1
            if is_new:
                self._reconnected.add(stream)
