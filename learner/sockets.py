"""The sockets of one dialling to one broker. They belong to the background thread of their link."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import Any, Final

import zmq

from narrows.learner.session import Session
from narrows.learner.site import JoinTarget
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import BrokerUnreachable, NarrowsError
from narrows.proto.keys import SiteKey
from narrows.proto.sockets import Dial, Kind, needs_ipv6
from narrows.proto.wire import asked_topic, live_topic

FRAMES_PER_TURN: Final = 16
"""Messages that are read from one socket before the training thread may have the lock."""

_log = logging.getLogger("narrows.learner")


class Sockets:
    """The sockets of one dialling: control at once, data after the first Welcome."""

    def __init__(
        self, target: JoinTarget, incarnation: str, key: SiteKey | None, server: str
    ) -> None:
        """It asks the resolver, which may take seconds."""
        self._address = parse_address(target.broker)
        self._relay = target.relay
        self._incarnation = incarnation
        self._key = key
        self._server = server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._uplinks: list[Dial] = []
        self._downlinks: list[Dial] = []
        self._heard: set[int] = set()
        """Uplink streams on which the broker has subscribed."""
        self._opened: tuple[int, int, int] | None = None
        self._unknown: NarrowsError | None = None
        """A host that does not resolve; until there is a connection."""
        self._ipv6: dict[str, bool] = {}
        for address in (self._address, self._relay or self._address):
            try:
                self._ipv6[address.host] = needs_ipv6(address)
            except BrokerUnreachable as error:
                self._ipv6[address.host] = False
                self._unknown = error
        self._control = self._dial(Kind.LEARNER_CONTROL, self._address, server)

    def follow(self, session: Session) -> None:
        """Opens the data sockets that the newest Welcome tells of; the same ones stay."""
        wanted = session.ports and (*session.ports, session.settings.streams)
        if not wanted or wanted == self._opened:
            return
        for each in self._data:
            self._poller.unregister(each.socket)
            self._poller.unregister(each.monitor)
            each.close()
        self._heard.clear()
        if session.obstacle is None:  # Else another dialling begins, with the ports of the last.
            _log.info("admitted to run %s", session.run_id)
        self._opened = wanted
        uplink, downlink, streams = wanted
        nearer = self._relay or Address(self._address.host, downlink)
        server = self._server
        if self._relay and self._key:
            # A relay proves with the site's own key that it is of the site.
            server = self._key.pair.public
        self._downlinks = [
            self._dial(Kind.LEARNER_DOWNLINK, nearer, server) for _ in range(streams)
        ]
        for stream, each in enumerate(self._downlinks):
            each.socket.setsockopt(zmq.SUBSCRIBE, live_topic(stream).encode())
            each.socket.setsockopt(zmq.SUBSCRIBE, asked_topic(self._incarnation, stream).encode())
        farther = Address(self._address.host, uplink)
        self._uplinks = [
            self._dial(Kind.LEARNER_UPLINK, farther, self._server) for _ in range(streams)
        ]

    def look(self, now: float) -> tuple[bool, NarrowsError | None]:
        """Whether control has a connection, the first or another one, and what hinders it. It may
        take half a second while there is none."""
        for each in self._data:
            each.look(now)
        is_new = self._control.look(now)
        if is_new:
            self._unknown = None
        return is_new, self._unknown or self._control.error(now)

    def must_redial(self, now: float) -> bool:
        """Whether libzmq has given a socket up, or a host did not resolve."""
        dials = (self._control, *self._data)
        return self._unknown is not None or any(each.is_dead(now) for each in dials)

    def troubles(self, now: float) -> set[str]:
        """Why libzmq has given sockets for data up. Without control the session tells why."""
        if not self._control.connected:
            return set()
        return {str(each.error(now)) for each in self._data if each.is_dead(now)}

    def subscribed(self, ready: set[Any]) -> bool:
        """Whether the broker listens on every stream; what is sent before is lost."""
        for stream, uplink in enumerate(self._uplinks):
            for (change,) in _received(uplink, ready):
                if change[:1] == b"\x01":
                    self._heard.add(stream)
                else:
                    self._heard.discard(stream)
        return bool(self._uplinks) and len(self._heard) == len(self._uplinks)

    def silent(self) -> str:
        """Names the data port on which nothing moves, after a Welcome."""
        is_heard = len(self._heard) == len(self._uplinks)
        return self.ports(up=not is_heard, down=is_heard)

    def ports(self, *, up: bool, down: bool) -> str:
        """The data ports of these directions, in words."""
        if self._opened is None:
            return "its data ports" if up or down else ""  # They are just being dialled anew.
        uplink, downlink, _ = self._opened
        nearer = f"the downlink port {downlink}"
        if self._relay:
            nearer = f"the relay at {self._relay} (is it running?)"
        is_named = {f"the uplink port {uplink}": up, nearer: down}
        return " and ".join(port for port in is_named if is_named[port])

    def poll(self, wake_fd: int, wait_s: float) -> set[Any]:
        """Waits until something comes, somebody wakes, or the time is over."""
        self._poller.register(wake_fd, zmq.POLLIN)
        # Rounded up: with a fraction of a millisecond left the loop would spin.
        return {source for source, _ in self._poller.poll(math.ceil(1000 * wait_s))}

    def receive_control(self, ready: set[Any]) -> list[list[bytes]]:
        """Control messages that have come."""
        return _received(self._control, ready)

    def receive_data(self, ready: set[Any]) -> list[list[bytes]]:
        """Data messages that have come."""
        return [frames for dial in self._downlinks for frames in _received(dial, ready)]

    def send_control(self, frames: list[bytes]) -> None:
        """Drops the message without a connection: the session says Hello and tells all anew."""
        with suppress(zmq.Again):
            self._control.socket.send_multipart(frames, zmq.NOBLOCK)

    def send(self, topic: str, header: bytes, payload: bytes) -> bool:
        """False: no room. POLLOUT of an XPUB is always true, so it cannot be waited for."""
        stream = int(topic[-2:])
        if stream not in self._heard:
            return False
        parts = [topic.encode(), header, payload]
        try:
            self._uplinks[stream].socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self, linger_s: float) -> None:
        """Closes everything; what was sent has `linger_s` to leave."""
        for each in (self._control, *self._data):
            each.close(linger_s)
        self._context.term()

    @property
    def _data(self) -> list[Dial]:
        return [*self._uplinks, *self._downlinks]

    def _dial(self, kind: Kind, address: Address, server: str) -> Dial:
        ipv6 = self._ipv6[address.host]
        made = Dial(self._context, kind, address, self._key, server, ipv6=ipv6)
        for source in (made.socket, made.monitor):
            self._poller.register(source, zmq.POLLIN)
        return made


def _received(dial: Dial, ready: set[Any]) -> list[list[bytes]]:
    """Messages that have come on this socket, if it is ready."""
    found: list[list[bytes]] = []
    with suppress(zmq.Again):
        while dial.socket in ready and len(found) < FRAMES_PER_TURN:
            found.append(dial.socket.recv_multipart(zmq.NOBLOCK))
    return found
