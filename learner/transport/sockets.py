"""Owns a learner's sockets: a DEALER for control, S publishers up, S subscribers down."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from narrows.learner.transport.monitors import Monitors
from narrows.proto import socket_options
from narrows.proto.address import parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.frames import downlink_topic
from narrows.proto.keys import Handshake, Handshakes, SiteKey, outcome_of, read_site_key
from narrows.proto.shell import WakePipe
from narrows.proto.timing import RECONNECT_MAX_S, REDIAL_MAX_S

_log = logging.getLogger("narrows.learner")

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
    key: SiteKey | None = None
    key_file: Path | None = None
    """File of the key. It is read again when a handshake fails: it may have been rotated."""
    control_up_bytes: int = 0
    control_down_bytes: int = 0
    _has_connected: bool = False
    _uplinks: list[Socket] = field(default_factory=list[Socket])
    _downlinks: list[Socket] = field(default_factory=list[Socket])
    _listeners: list[int] = field(default_factory=list[int])
    """Subscriptions per uplink stream: without one a message would be dropped silently."""
    _unconnected: set[Socket] = field(default_factory=set[Socket])
    """Downlinks that have never been connected."""
    _refused: set[Socket] = field(default_factory=set[Socket])
    """Data sockets that were refused, and never dial again by themselves."""
    _replace_at: float = math.inf
    """Time at which new ones take their place."""
    _replace_s: float = RECONNECT_MAX_S
    _reconnected: set[int] = field(default_factory=set[int])
    ports: tuple[int, int] = (0, 0)
    """Ports of uplink and downlink, once the streams are open."""

    def __post_init__(self) -> None:
        self._address = parse_address(self.broker)
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._monitors = Monitors(self._poller)
        self.handshakes = Handshakes(self.broker, self.key)
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
        self._read_key_again()
        self._drop(self._control, linger=0)
        self._open_control()
        self.ports = (0, 0)
        self._replace_at = math.inf

    def open_streams(self, streams: int, uplink_port: int, downlink_port: int) -> None:
        """Connects the data sockets. The same streams and ports again change nothing."""
        if (self.ports, len(self._uplinks)) == ((uplink_port, downlink_port), streams):
            return
        for socket in (*self._uplinks, *self._downlinks):
            # Messages that still wait there are for ports that the broker has left.
            self._drop(socket, linger=0)
        self.ports = (uplink_port, downlink_port)
        self._listeners = [0] * streams
        self._reconnected.clear()
        self._refused.clear()
        self._uplinks = [self._open_uplink() for _ in range(streams)]
        self._unconnected.clear()
        self._downlinks = [self._open_downlink(stream) for stream in range(streams)]

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
        now = time.monotonic()
        for socket, frame in self._monitors.read(self._ready):
            self._on_handshake(socket, frame, now)
        if now >= self.handshakes.reopen_at:
            self.redial()
        # A broker that refuses the control connection refuses these as well.
        if now >= self._replace_at and self.handshakes.outcome is Handshake.ADMITTED:
            self._replace_refused()
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
        self.handshakes.opened()
        self._control = self._make(zmq.DEALER, socket_options.DEALER)
        self._has_connected = False
        self._connect(self._control, self._address.port)

    def _open_uplink(self) -> Socket:
        socket = self._make(zmq.XPUB, socket_options.XPUB)
        self._connect(socket, self.ports[0])
        return socket

    def _open_downlink(self, stream: int) -> Socket:
        socket = self._make(zmq.SUB, socket_options.DATA)
        self._unconnected.add(socket)
        socket.setsockopt(zmq.SUBSCRIBE, downlink_topic(self.name, self.incarnation, stream))
        self._connect(socket, self.ports[1])
        return socket

    def _on_handshake(self, socket: Socket, frame: bytes, now: float) -> None:
        if socket is not self._control:
            self._on_data_handshake(socket, outcome_of(frame), now)
            return
        due_before, outcome = self.handshakes.reopen_at, self.handshakes.take(frame, now)
        if outcome is Handshake.ADMITTED:
            self._has_connected = True
        elif outcome is not None:
            if self.handshakes.reopen_at < due_before:
                self._hang_up(socket)
            if self._read_key_again():
                self.handshakes.reopen_at = now

    def _on_data_handshake(self, socket: Socket, outcome: Handshake | None, now: float) -> None:
        if outcome is Handshake.ADMITTED:
            self._unconnected.discard(socket)
            self._replace_s = RECONNECT_MAX_S
        elif outcome is not None and self.key is not None and socket not in self._refused:
            self._refused.add(socket)
            if not outcome.gives_up:
                self._hang_up(socket)
            # A learner that redials gets all data sockets anew, with its Welcome.
            if self.ports != (0, 0):
                self._replace_at = min(self._replace_at, now + self._replace_s)

    def _replace_refused(self) -> None:
        """Puts new sockets in the place of the refused ones; later ones wait longer, in vain."""
        self._replace_at, self._replace_s = math.inf, min(2 * self._replace_s, REDIAL_MAX_S)
        for stream, (up, down) in enumerate(zip(self._uplinks, self._downlinks, strict=True)):
            if up in self._refused:
                self._drop(up, linger=0)
                self._listeners[stream] = 0
                self._uplinks[stream] = self._open_uplink()
            if down in self._refused:
                self._drop(down, linger=0)
                self._unconnected.discard(down)
                self._downlinks[stream] = self._open_downlink(stream)
        self._refused.clear()

    def _read_key_again(self) -> bool:
        """True if another key stands in the file now, or other keys of the broker."""
        if self.key is None or self.key_file is None:
            return False
        try:
            key = read_site_key(self.key_file)
        except ConfigError as error:
            _log.warning("the key in use stays: %s", error)
            return False
        return key.name == self.key.name and self.handshakes.renew(key)

    def _drop(self, socket: Socket, linger: int | None = None) -> None:
        self._monitors.unwatch(socket)
        self._poller.unregister(socket)
        socket.close(linger=linger)

    def _make(self, kind: int, options: dict[str, int]) -> Socket:
        socket = self._context.socket(kind)
        all_options: dict[str, int | bytes] = {**options, **self.handshakes.options}
        for name, value in all_options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.IPV6, self._address.is_ipv6)
        self._monitors.watch(socket)
        return socket

    def _connect(self, socket: Socket, port: int) -> None:
        socket.connect(str(self._address._replace(port=port)))
        self._poller.register(socket, zmq.POLLIN)

    def _hang_up(self, socket: Socket) -> None:
        """Has a socket dial no more: its handshakes fail, which it would repeat without a pause."""
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        socket.disconnect(endpoint.rstrip(b"\0").decode())

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
