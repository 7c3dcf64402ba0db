"""`narrows relay`: publications cross the line to a site once, however many learners are there.

One XPUB faces the site, one XSUB per stream faces the broker. A subscription goes up on the XSUB of
its last two digits; messages come down unread. Control and uplink of the learners go straight to
the broker. Beats do not pass it and tell the digests of copies, so what it alters is noticed.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

import zmq

from narrows.broker.cli.status import ask_status, find_broker, read_key
from narrows.broker.process.door import bind, listening_address
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import NarrowsError
from narrows.proto.keys import SiteKey, serve_keys, servers_of
from narrows.proto.sockets import Dial, Kind, make_socket, needs_ipv6
from narrows.proto.timing import REDIAL_S

MESSAGES_PER_TURN: Final = 16

Socket: TypeAlias = "zmq.Socket[bytes]"
_SUBSCRIPTION: Final = re.compile(rb"[\0\1][pr]/.*[0-9]{2}", re.DOTALL)
_log: Final = logging.getLogger("narrows.relay")


class _Upstream:
    """The connection of one stream to the broker's downlink."""

    def __init__(
        self, context: zmq.Context[Socket], address: Address, key: SiteKey | None, file: Path | None
    ) -> None:
        self._make = partial(Dial, context, Kind.RELAY_DOWNLINK, address, ipv6=needs_ipv6(address))
        """Makes a Dial of the site's key and the broker's public key."""
        self._key = key
        self._file = file
        self._topics: dict[bytes, None] = {}
        """All that the site listens to on this stream, in the order of the subscriptions."""
        self._dials = 0
        self._told: set[str] = set()
        """Troubles that the log has had since the last connection."""
        self._open(-math.inf)

    def _open(self, now: float) -> None:
        # The keys of the broker that the site trusts take turns: one may be the next.
        servers = servers_of(self._key)
        server = servers[self._dials % len(servers)]
        self._dials += 1
        self._dialled_at = now
        self.dial = self._make(self._key, server)
        for topic in self._topics:
            self.dial.socket.send(b"\1" + topic)

    def subscribe(self, frame: bytes) -> None:
        """Passes a subscription of the site on, and remembers it for the next dialling."""
        if frame[:1] == b"\1":
            self._topics[frame[1:]] = None
        else:
            self._topics.pop(frame[1:], None)
        self.dial.socket.send(frame)

    def look(self, now: float) -> None:
        """Tells the log what hinders the connection, and dials again when that is due."""
        if self.dial.look(now):
            self._told.clear()
        trouble = self.dial.error(now)
        if trouble is not None:
            self._tell(str(trouble))
        if self.dial.is_dead(now) and now >= self._dialled_at + REDIAL_S:
            self.dial.close()
            try:
                self._key = read_key(self._file)
            except NarrowsError as error:
                self._tell(f"the key in use stays: {error}")
            self._open(now)

    def _tell(self, text: str) -> None:
        """Tells the log a trouble once for each connection: some come back ten times a second."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)


def relay(
    *, listen: str, broker: str | None = None, key: Path | None = None, insecure: bool = False
) -> NoReturn:
    """Pass publications on to the learners of a site, so that each crosses the line once.

    The learners join as before, with NARROWS_RELAY set to the address of this relay. They may start
    before it; while it is down they train on without new versions.

    Args:
        listen: Address for the learners of the site, tcp://HOST:PORT.
        broker: Control address of the broker (default: NARROWS_BROKER, or the key's).
        key: Key file of the site, if the broker has keys (default: NARROWS_KEY). Learners with the
            same key may listen.
        insecure: Serve a network that you trust without a key.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    control, site_key, file = find_broker(broker, key)
    has_keys = site_key is not None
    own = listening_address(listen, has_keys=has_keys, insecure=insecure, flag="--key")
    # Asking fails at once, with its reason, where this key is not admitted or nobody is there.
    told = ask_status(control, site_key, timeout_s=5.0)
    downlink = Address(parse_address(control).host, told.downlink_port)
    context: zmq.Context[Socket] = zmq.Context()
    pair = None
    authenticator = None
    if site_key is not None:
        # A learner that holds the site's key belongs to the site. The relay proves with the same
        # key that it belongs there, too.
        pair = site_key.pair
        authenticator = serve_keys(context, lambda public: public == site_key.pair.public)
    site = make_socket(context, Kind.RELAY_SITE, pair=pair, ipv6=own.listens_on_ipv6)
    try:
        port = bind(site, own)
        ups = [_Upstream(context, downlink, site_key, file) for _ in range(told.settings.streams)]
        _log.info("passing publications of %s on to %s", downlink, Address(own.host, port))
        while True:
            _pass_on(site, ups)
    finally:
        if authenticator is not None:
            authenticator.stop()
        context.destroy(linger=0)


def _pass_on(site: Socket, ups: list[_Upstream]) -> None:
    """Waits for messages, a second at most, and passes some of each side on."""
    sockets = [site]
    for up in ups:
        sockets += [up.dial.socket, up.dial.monitor]
    zmq.select(sockets, [], [], 1.0)
    for first, *more in _received(site):
        # A learner's socket can send anything up; only subscriptions are passed on.
        frame = first.bytes
        if not more and _SUBSCRIPTION.fullmatch(frame):
            ups[int(frame[-2:]) % len(ups)].subscribe(frame)
    for up in ups:
        for frames in _received(up.dial.socket):
            # A learner whose pipe is full misses it, and fetches it.
            site.send_multipart(frames, copy=False)
        up.look(time.monotonic())


def _received(socket: Socket) -> Iterator[list[zmq.Frame]]:
    for _ in range(MESSAGES_PER_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
