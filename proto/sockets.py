"""ZeroMQ options of every socket, with their reasons, and the troubles of a socket that dials.

libzmq says that a key was refused, or a message damaged, only to a socket's monitor, and then never
dials again: the socket's owner closes it and makes another one.
"""

from __future__ import annotations

import math
import socket as tcp
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from narrows.proto.config import Address
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
# Queues are small, because messages behind the budget leave unpaced when a reader resumes. With
# NODROP a full pipe answers EAGAIN. VERBOSER shows repeated subscriptions, too. Only subscriptions
# come in; below 512 bytes no CURVE handshake would pass.
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
            # For each connection: a peer that floods waits for the broker.
            zmq.RCVHWM: 64,
            # A send to a connection that is gone fails.
            zmq.ROUTER_MANDATORY: 1,
        },
    )
    BROKER_UPLINK = zmq.SUB, _PAYLOADS
    BROKER_DOWNLINK = zmq.XPUB, {**_PUBLISHER, zmq.SNDHWM: 4}
    # Nothing is queued without a connection: an old Report is worthless after an outage.
    LEARNER_CONTROL = zmq.DEALER, {**_CONTROL, zmq.IMMEDIATE: 1}
    # With IMMEDIATE, libzmq drops what was not read yet when the connection ends: the last Status.
    ASKER = zmq.DEALER, _CONTROL
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
            # Without this, a socket whose authenticator is gone would admit every key.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def send_buffer_bytes(share_bits_per_s: float, streams: int) -> int:
    """SNDBUF of one of `streams` connections that share a learner's rate: 0.1 s of it, at least
    32 KiB. 0 stands for the kernel's own size: without a rate, or above 2 MiB."""
    size = max(32 << 10, int(0.1 * share_bits_per_s / 8 / streams))
    return size if share_bits_per_s and size <= 2 << 20 else 0


SURE_S: Final = 1.0
"""Only a trouble that lasts so long is reported: a broker that starts again breaks handshakes off,
too, and a busy machine lets a connection wait."""
PROBE_S: Final = 0.5
"""A ZeroMQ socket greets at once: a port that says nothing for so long belongs to another program
or to a process that is stopped."""

_EVENTS: Final = (
    zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip

_GIVE_KEY: Final = "give your site's key: --key FILE, in Python key= (`narrows keys new` makes one)"


def needs_ipv6(address: Address) -> bool:
    """Whether a socket that dials this address needs IPv6; a host that has both uses IPv4. The call
    asks the resolver, which may take seconds. Raises BrokerUnreachable for an unknown host."""
    try:
        found = tcp.getaddrinfo(address.host.strip("[]"), address.port, type=tcp.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # A label that is empty or too long is no OSError.
        raise BrokerUnreachable(
            f"the host name {address.host} does not resolve ({getattr(error, 'strerror', error)})",
            remedy=f"is the address {address} right, and does this machine reach its name server?",
        ) from error
    return all(family is tcp.AF_INET6 for family, *_ in found)


class Dial:
    """A socket that dials a port of the broker, and what its monitor tells of the connection.

    Its owner calls `look` whenever `monitor` is readable, and now and then: some troubles show only
    in an event that does not come. Times are seconds on the caller's monotonic clock.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: Kind,
        address: Address,
        key: SiteKey | None = None,
        server: str = "",
        *,
        ipv6: bool = False,
    ) -> None:
        """With `key` it expects the broker whose public key is `server`."""
        self._address = address
        self._key = key
        self.socket = make_socket(
            context, kind, pair=key.pair if key else None, server=server, ipv6=ipv6
        )
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_EVENTS)
        self.connected = False
        """The handshake has succeeded, and the connection has not ended since."""
        self.descriptor = -1
        """The file descriptor of the newest connection, which libzmq owns."""
        self.is_silent = False
        """The port takes connections and says nothing, as that of a frozen broker does."""
        self._greets_at = self._broken_at = self._dead_at = math.inf
        """Since when a connection waits for its handshake; since when the other side breaks one
        handshake after the other off; when the last connection ended and libzmq did not dial again.
        Infinite: that is not so."""
        self._trouble: NarrowsError | None = None
        """Why there is no connection, as far as handshakes tell."""
        self._seen: NarrowsError | None = None
        """The same, as a look at the port has shown."""
        self.socket.connect(str(address))

    def look(self, now: float) -> bool:
        """Reads what the monitor tells. True: there is a new connection, the first or another."""
        is_new = False
        while self.monitor.poll(0):
            told = parse_monitor_message(self.monitor.recv_multipart())
            self._take(told["event"], told["value"], now)
            is_new |= told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return is_new

    def _take(self, event: int, value: int, now: float) -> None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._greets_at = now
                self.descriptor = value
            case zmq.EVENT_CLOSED:  # Nobody listens.
                self._broken_at = math.inf
                self._trouble = self._seen = None
            case zmq.EVENT_CONNECT_RETRIED:
                self._greets_at = self._dead_at = math.inf
            case zmq.EVENT_DISCONNECTED:
                self.connected = False
                self._dead_at = now
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self._trouble = self._seen = None
                self._greets_at = self._broken_at = math.inf
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._broken_at = min(self._broken_at, now)
                if now >= self._broken_at + SURE_S:
                    self._trouble = self._broken_off()
            case _:  # A protocol error ends an admitted connection, too.
                self.connected = False
                self._trouble = self._refused(event, value)

    def is_dead(self, now: float) -> bool:
        """Whether libzmq has ceased to dial, or dials in vain: another Dial must take over."""
        return self._trouble is not None or now >= self._dead_at + SURE_S

    def error(self, now: float) -> NarrowsError | None:
        """The trouble of the connection, with the remedy; None: none is certain by now.

        The call may take PROBE_S, once for each connection that says nothing.
        """
        if now >= self._greets_at + SURE_S and not self._trouble:
            self._greets_at = math.inf
            self._seen = self._probe()
        if now >= self._dead_at + SURE_S and not self._seen:
            # For some kinds of damage, libzmq tells only that the connection has ended.
            return self._trouble or self._altered()
        return self._trouble or self._seen

    def close(self, linger_s: float = 0.0) -> None:
        """Closes it; what was sent has `linger_s` to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=round(1000 * linger_s))

    def _refused(self, event: int, value: int) -> NarrowsError:
        broker = f"the broker at {self._address}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._key:
            line = public_line(self._key.name, self._key.pair.public)
            return Refused(
                ErrorCode.KEY_REFUSED,
                f"{broker} does not admit the key of {self._key.name}",
                remedy=f"it never did, or no more. Its operator types: narrows keys allow '{line}'",
            )
        if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return self._altered()
        if self._key:
            return Refused(
                ErrorCode.KEY_REFUSED,
                f"{broker} has no keys, so nobody knows who it is",
                remedy="its operator gives it keys: narrows broker --keys FOLDER; "
                "or join without one",
            )
        return Refused(
            ErrorCode.KEY_REFUSED,
            f"{broker} admits only those who have a key",
            remedy=_GIVE_KEY,
        )

    def _altered(self) -> NarrowsError:
        return BrokerUnreachable(
            f"bytes of the connection to {self._address} were altered on their way",
            remedy="is it the control port, as the broker prints it? Then it is dialled again; if "
            "that repeats: memory and devices along the path",
        )

    def _broken_off(self) -> NarrowsError:
        """The other side stops, has another key than the expected one, or has keys while this side
        has none: it may have closed before libzmq could see that."""
        why = "as one does that admits only those who have a key"
        remedy = _GIVE_KEY
        if self._key is not None:
            why = f"as one does whose key is not {' or '.join(self._key.servers)}"
            remedy = (
                "the broker's key that your site was given may be wrong: compare `servers` in your"
                " key file with `narrows keys show` at the broker. Or that broker has no keys"
            )
        return BrokerUnreachable(
            f"the broker at {self._address} breaks handshakes off ({why})",
            remedy=f"{remedy}. Or is that no broker's port?",
        )

    def _probe(self) -> NarrowsError | None:
        """Looks at the first byte that a plain connection gets: ZMTP's greeting begins with FF."""
        self.is_silent = False
        try:
            place = (self._address.host.strip("[]"), self._address.port)
            with tcp.create_connection(place, PROBE_S) as line:
                line.sendall(b"GET / HTTP/1.0\r\n\r\n")  # Most that wait for somebody answer it.
                first = line.recv(1)
        except TimeoutError:
            self.is_silent = True
            return BrokerUnreachable(
                f"{self._address} takes connections and says nothing",
                remedy="is the broker's process stopped, or does another program listen there?",
            )
        except OSError:
            return None  # It has ended meanwhile.
        if first == b"\xff":
            return None
        return BrokerUnreachable(
            f"{self._address} answers, but not as a broker does: another program listens there",
            remedy="`narrows broker` prints its address when it starts",
        )
