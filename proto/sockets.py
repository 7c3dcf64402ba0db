"""ZeroMQ options of every socket, with their reasons, and what a refused handshake looks like.

libzmq says that a key was refused only to a socket's monitor, and a refused socket never dials
again: its owner closes it and makes another one.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from narrows.proto.errors import BrokerUnreachable, ErrorCode, NarrowsError, Refused
from narrows.proto.keys import DOMAIN, KeyPair, SiteKey, public_line
from narrows.proto.messages import CONTROL_BYTES_MAX, CONTROL_UP_BYTES_MAX, PAYLOAD_BYTES_MAX

_COMMON: Final[dict[int, int]] = {
    # A socket must not keep a process from ending; a Bye gets so many ms to leave.
    zmq.LINGER: 1000,
    # Connections on which nothing is acknowledged for 20 s are closed and dialled again: peers that
    # are frozen with full buffers, and paths that a firewall has forgotten. ZeroMQ's heartbeats
    # stay off: they expire behind a large message.
    zmq.TCP_MAXRT: 20_000,
    # A peer that only receives sends nothing to be acknowledged. Probes find a dead path for it.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 2,
    # The kernel repeats a lost first packet after up to 64 s; a new attempt begins sooner.
    zmq.CONNECT_TIMEOUT: 5000,
    # Half-open handshakes (port scanners) are dropped.
    zmq.HANDSHAKE_IVL: 10_000,
    # Without a longest interval of 2 s a hundred learners would hammer a broker that restarts.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
}
_CURVE_BYTES: Final = 64
"""CURVE makes a frame longer, and libzmq compares the longer one with MAXMSGSIZE."""
_CONTROL: Final = {zmq.SNDHWM: 1000, zmq.MAXMSGSIZE: CONTROL_BYTES_MAX + _CURVE_BYTES}
_PAYLOADS: Final = {zmq.RCVHWM: 8, zmq.MAXMSGSIZE: PAYLOAD_BYTES_MAX + _CURVE_BYTES}
# A queue is small because what waits behind the budget leaves unpaced when a reader resumes. With
# NODROP a full pipe answers EAGAIN. VERBOSER shows subscriptions that are repeated, too. What comes
# in is subscriptions; below 512 bytes no CURVE handshake would pass.
_PUBLISHER: Final = {
    zmq.XPUB_NODROP: 1,
    zmq.XPUB_VERBOSER: 1,
    zmq.IMMEDIATE: 0,
    zmq.MAXMSGSIZE: 512,
}


class Kind(Enum):
    """The sockets of a run: ZeroMQ type, and the options that differ from _COMMON."""

    BROKER_CONTROL = (
        zmq.ROUTER,
        {
            **_CONTROL,
            # A message a little over the bound is refused with a reason; one over this, cut off.
            zmq.MAXMSGSIZE: 2 * CONTROL_UP_BYTES_MAX,
            # Of each connection: who floods waits for the broker.
            zmq.RCVHWM: 64,
            # A send to a connection that is gone fails.
            zmq.ROUTER_MANDATORY: 1,
        },
    )
    BROKER_UPLINK = zmq.SUB, _PAYLOADS
    BROKER_DOWNLINK = zmq.XPUB, {**_PUBLISHER, zmq.SNDHWM: 4}
    # Nothing is queued without a connection: an old Report is worthless after an outage.
    LEARNER_CONTROL = zmq.DEALER, {**_CONTROL, zmq.IMMEDIATE: 1}
    LEARNER_UPLINK = zmq.XPUB, {**_PUBLISHER, zmq.SNDHWM: 8}
    # A reader must take half of its RCVHWM within TCP_MAXRT, or a slow one would be cut.
    LEARNER_DOWNLINK = zmq.SUB, _PAYLOADS
    RELAY_DOWNLINK = zmq.XSUB, _PAYLOADS
    # A learner that reads too slowly misses messages and fetches them; no other waits for it. Only
    # the first subscription to a topic and the end of the last go up, so the broker sends it once.
    RELAY_SITE = zmq.XPUB, {zmq.XPUB_NODROP: 0, zmq.SNDHWM: 32, zmq.MAXMSGSIZE: 512}


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: Kind,
    *,
    pair: KeyPair | None = None,
    server: str = "",
    send_buffer_bytes: int = 0,
    ipv6: bool = False,
) -> zmq.Socket[bytes]:
    """A socket that is neither bound nor connected.

    With `pair` it speaks CURVE: as the server that asks `serve_keys`, or, given the public key of a
    `server`, as its client.
    """
    type_, options = kind.value
    socket = context.socket(type_)
    for option, value in {**_COMMON, **options, zmq.IPV6: int(ipv6)}.items():
        socket.setsockopt(option, value)
    if send_buffer_bytes:
        socket.setsockopt(zmq.SNDBUF, send_buffer_bytes)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        if server:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
            # Else a socket whose authenticator is gone would admit everybody.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def send_buffer_bytes(share_bits_per_s: float, streams: int) -> int:
    """SNDBUF of one of `streams` connections that share a learner's rate: 0.1 s of it, at least
    32 KiB. 0, the kernel's own size, without a rate or above 2 MiB."""
    size = max(32 << 10, int(0.1 * share_bits_per_s / 8 / streams))
    return size if share_bits_per_s and size <= 2 << 20 else 0


class Handshake(IntEnum):
    """The outcome of a connection, as a socket's monitor tells it."""

    CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
    REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    """The broker does not admit the key. The socket never dials again: make another one."""
    MISMATCH = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    """One side has keys and the other has none. The socket never dials again."""
    BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    """The other side stops, has another key than was expected, or has keys where none was given: it
    may have closed before a MISMATCH could be seen. The socket dials again, ten times a second:
    replace it if that goes on."""
    DISCONNECTED = zmq.EVENT_DISCONNECTED
    """An admitted connection has ended. The socket dials again."""


class HandshakeMonitor:
    """Follows the handshakes of a socket that dials."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, key: SiteKey | None) -> None:
        """Call it before the socket connects. `address` and `key` are for the errors."""
        self._watched, self._address, self._key = socket, address, key
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(sum(Handshake))
        """Readable when `take` may have an outcome."""
        self.connected = False

    def take(self) -> Handshake | None:
        """The next outcome that was not taken; None: there is none."""
        while self.socket.poll(0):
            event = parse_monitor_message(self.socket.recv_multipart())["event"]
            outcome, was_connected = Handshake(event), self.connected
            self.connected = outcome is Handshake.CONNECTED
            # A handshake that fails ends with DISCONNECTED, too.
            if was_connected or outcome is not Handshake.DISCONNECTED:
                return outcome
        return None

    def close(self) -> None:
        """Call it before the socket closes."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)

    def error(self, outcome: Handshake) -> NarrowsError | None:
        """The meaning of an outcome for the user, with the remedy; None: nothing is wrong."""
        broker, key = f"the broker at {self._address}", self._key
        give_key = "give your site's key: --key FILE, in Python key= (`narrows keys new` makes one)"
        if outcome is Handshake.BROKEN_OFF:
            why, remedy = "as one does that admits only those who have a key", give_key
            if key is not None:
                why = f"expected a broker whose key is {' or '.join(key.servers)}"
                remedy = "compare `narrows keys show` at the broker"
            remedy = f"{remedy}. Or is that no broker's port?"
            return BrokerUnreachable(f"{broker} breaks handshakes off ({why})", remedy=remedy)
        if outcome is Handshake.REFUSED and key:
            line = public_line(key.name, key.pair.public)
            message = f"{broker} does not admit the key of {key.name}"
            remedy = f"it never did, or no more. Its operator types: narrows keys allow '{line}'"
        elif outcome is Handshake.MISMATCH and key:
            message = f"{broker} has no keys, so nobody knows who it is"
            remedy = "its operator gives it keys: narrows broker --keys FOLDER; or join without one"
        elif outcome is Handshake.MISMATCH:
            message, remedy = f"{broker} admits only those who have a key", give_key
        else:
            return None
        return Refused(ErrorCode.KEY_REFUSED, message, remedy=remedy)
