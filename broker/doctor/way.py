"""Checks of the way from a site to the broker: name, ports, keys, and what the line carries.

They dial as a learner does (`proto/sockets.py`). A plain connection comes first: it tells a port
that is closed from one whose packets are dropped.
"""

from __future__ import annotations

import math
import os
import socket as tcp
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import zmq

from narrows.broker.asking import LOOK_S
from narrows.broker.cli.plan import USABLE
from narrows.broker.cli.status import ask_status
from narrows.broker.doctor import told
from narrows.broker.doctor.findings import Check, Finding, failed, ok, said, unknown
from narrows.proto.config import Address
from narrows.proto.errors import BrokerUnreachable, NarrowsError
from narrows.proto.keys import SiteKey, servers_of
from narrows.proto.messages import LOSSLESS, DataKind, Header, Status
from narrows.proto.sockets import PROBE_S, Dial, Kind, needs_ipv6
from narrows.proto.units import BitRate
from narrows.proto.wire import decode_header, encode_header, live_topic, uplink_topic

PACKETS_BYTES: Final = 16_000
"""A message that fills packets. Those of a handshake have a few hundred bytes."""
LOAD_BYTES: Final = 32 << 20
LOAD_S: Final = 1.0
"""The line is loaded with so many bytes, or for as long, at most."""
MESSAGE_BYTES: Final = 64 << 10
BUDGET_S: Final = 0.5
"""Where the broker limits rates, a load is no more than such a part of a second of them."""

ACKED_AT: Final = 120
"""Place in Linux's tcp_info of the bytes that the other side has acknowledged (tcp(7))."""

UNREACHED: Final = {
    TimeoutError: (
        "nothing comes back",
        "does a firewall drop what goes to this port, at the broker or here? Is the machine up, and"
        " is this its address?",
    ),
    ConnectionRefusedError: (
        "nobody listens",
        "is the broker running? Its log tells its address. A firewall that rejects this port looks"
        " the same",
    ),
}
"""Errors of a connection: what is seen, and the remedy."""
NO_ROUTE: Final = "is there a route from here to the broker, and is this port open?"
TOO_SLOW: Final = "`narrows plan` says which sync period, codec.rho or relay the line can carry"

ELSEWHERE: Final = "0-00000000"
"""An epoch that no broker has: what comes in it is read, dropped, and counts against nobody."""


@dataclass
class Visit:
    """A look from a site, and what was found so far."""

    address: Address
    """The broker's control port."""
    key: SiteKey | None
    name: str
    """The learner whose place this is; "": any."""
    timeout_s: float
    """Longest wait for one thing."""
    relay: Address | None = None
    """Where publications come from, if not from the broker."""
    round_trip_s: float = math.inf
    server: str = ""
    """The public key of the broker with which handshakes succeed."""
    status: Status = field(default_factory=Status)

    def beside(self, port: int) -> Address:
        """A data port of the broker."""
        return Address(self.address.host, port)


def host_name(visit: Visit) -> Finding:
    """The broker's host name resolves."""
    return ok(f"{visit.address.host} is {_place(visit.address)[0]}")


def control_port(visit: Visit) -> Finding:
    """Somebody listens at the control port."""
    _reach(visit, visit.address, "control")
    return ok(f"port {visit.address.port} is open; a round trip takes {_ms(visit.round_trip_s)}")


def handshake(visit: Visit) -> Finding:
    """A broker listens there, and both sides admit each other's keys, or have none."""
    trouble: NarrowsError | None = None
    for server in servers_of(visit.key):
        visit.server = server
        try:
            with _dialled(visit, Kind.LEARNER_CONTROL, visit.address):
                return ok("the broker admits the key" if visit.key else "neither side has keys")
        except BrokerUnreachable as error:
            trouble = error  # With another key that the site trusts it may succeed.
    assert trouble is not None, "a key without servers"
    raise trouble


def answer(visit: Visit) -> Finding:
    """The broker answers a question."""
    begun_at = time.monotonic()
    try:
        visit.status = _ask(visit)
    except BrokerUnreachable as error:
        return failed(
            f"its handshakes succeed, and {said(error)}",
            "is its process stopped now? Else full packets are lost on their way here, as in a "
            "tunnel: let ICMP through, or set a smaller MTU at both ends",
        )
    took_s = time.monotonic() - begun_at
    return ok(f"run {visit.status.run_id} is {visit.status.phase}; it took {_ms(took_s)}")


def uplink_port(visit: Visit) -> Finding:
    """The broker listens to pushes, and its own packets come back."""
    address = visit.beside(visit.status.uplink_port)
    _reach(visit, address, "uplink")
    with _uplink(visit):
        return ok(f"port {address.port} is open, and the broker listens")


def downlink_port(visit: Visit) -> Finding:
    """The broker, or the site's relay, takes the connection from which publications come."""
    address = visit.relay or visit.beside(visit.status.downlink_port)
    what = "relay" if visit.relay else "downlink"
    _reach(visit, address, what)
    with _downlink(visit):
        return ok(f"port {address.port} ({what}) is open, and the handshake succeeds")


def packets(visit: Visit) -> Finding:
    """Full packets arrive as the small ones of a handshake do."""
    with _uplink(visit) as dial:
        dial.socket.send_multipart(_load(visit, PACKETS_BYTES))
        if _waits(dial, _acked(dial, PACKETS_BYTES), visit.timeout_s):
            return ok("full packets are acknowledged, too")
    return failed(
        f"small packets pass, and {PACKETS_BYTES:,} bytes are not acknowledged in "
        f"{visit.timeout_s:g} s",
        "full packets are lost, as in a tunnel between here and the broker: let ICMP through, or "
        "set a smaller MTU at both ends, as with ip link set dev DEVICE mtu 1400",
    )


def line_up(visit: Visit) -> Finding:
    """The line carries the pushes of a learner."""
    line = visit.status.line
    limits = (line.up_limit, line.total_up_limit, line.down_limit, line.total_down_limit)
    most = min([LOAD_BYTES, *(limit * BUDGET_S / 8 for limit in limits if limit)])
    with _uplink(visit) as dial:
        sent = 0
        begun_at = time.monotonic()
        while sent < most and time.monotonic() < begun_at + LOAD_S:
            size = round(min(MESSAGE_BYTES, most - sent))
            try:
                dial.socket.send_multipart(_load(visit, size), zmq.NOBLOCK)
                sent += size
            except zmq.Again:
                dial.monitor.poll(1)
        _waits(dial, _acked(dial, sent), visit.timeout_s)
        rate = 8 * _acked_bytes(dial) / (time.monotonic() - begun_at)
    need = told.needed_bits_per_s(visit.status)
    text = f"it carries {BitRate(rate).text()}, and {BitRate(need).text()} are needed"
    if need > USABLE * rate:
        return failed(text, TOO_SLOW)
    return ok(text if need else f"it carries {BitRate(rate).text()}; nothing is needed yet")


def line_down(visit: Visit) -> Finding:
    """Publications arrive, and as many as the broker makes."""
    heard: set[tuple[int, int]] = set()
    bits = 0

    def hear() -> bool:
        nonlocal bits
        while dial.socket.poll(0):
            frames = dial.socket.recv_multipart()
            if len(frames) == 3:
                header = decode_header(frames[1])
                heard.add((header.fragment, header.version))
                bits += 8 * len(frames[2])
        return False

    with _downlink(visit) as dial:
        for stream in range(visit.status.settings.streams):
            dial.socket.setsockopt(zmq.SUBSCRIBE, live_topic(stream).encode())
        before = _versions(_ask(visit))
        _waits(dial, hear, visit.timeout_s)
        made = _versions(_ask(visit)) - before
        _waits(dial, hear, PROBE_S)  # What was made just now may be on its way.
    made = max(made, len(heard))
    if not made:
        return unknown(f"nothing was published in {visit.timeout_s:g} s")
    text = f"of {made} versions {len(heard)} came, {BitRate(bits / visit.timeout_s).text()}"
    if len(heard) < made / 2:
        place = visit.relay or visit.beside(visit.status.downlink_port)
        return failed(text, f"does a firewall cut {place} off, or is the line too slow? {TOO_SLOW}")
    return ok(text)


CHECKS: Final[tuple[Check[Visit], ...]] = (
    Check("host name", host_name),
    Check("control port", control_port, "host name"),
    Check("handshake", handshake, "control port"),
    Check("answer", answer, "handshake"),
    Check("uplink port", uplink_port, "answer"),
    Check("downlink port", downlink_port, "answer"),
    Check("packet size", packets, "uplink port"),
    Check("line up", line_up, "packet size"),
    Check("line down", line_down, "downlink port"),
    Check("data", lambda visit: told.data(visit.status, visit.name), "answer"),
    Check("kept out", lambda visit: told.refusals(visit.status, visit.name), "answer"),
)


# The way there.


def _ask(visit: Visit) -> Status:
    key = visit.key and replace(visit.key, servers=(visit.server,))
    return ask_status(str(visit.address), key, timeout_s=visit.timeout_s)


def _versions(status: Status) -> int:
    """Versions that the run has made."""
    return sum(each.version for each in status.fragments)


def _place(address: Address) -> tuple[str, int]:
    """Number and port of an address. Raises BrokerUnreachable for a name that does not resolve."""
    family = tcp.AF_INET6 if needs_ipv6(address) else tcp.AF_INET
    found = tcp.getaddrinfo(address.host.strip("[]"), address.port, family, tcp.SOCK_STREAM)
    number, port = found[0][4][:2]
    return str(number), int(port)


def _reach(visit: Visit, address: Address, what: str) -> None:
    """Raises BrokerUnreachable if nobody takes a connection there."""
    begun_at = time.monotonic()
    try:
        tcp.create_connection(_place(address), visit.timeout_s).close()
    except OSError as error:
        trouble, remedy = UNREACHED.get(type(error), (error.strerror or str(error), NO_ROUTE))
        raise BrokerUnreachable(f"{address} ({what}): {trouble}", remedy=remedy) from error
    visit.round_trip_s = min(visit.round_trip_s, time.monotonic() - begun_at)


@contextmanager
def _dialled(visit: Visit, kind: Kind, address: Address, server: str = "") -> Iterator[Dial]:
    """A connection whose handshake has succeeded. Raises Refused and BrokerUnreachable."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ipv6 = needs_ipv6(address)
        dial = Dial(context, kind, address, visit.key, server or visit.server, ipv6=ipv6)
        if not _waits(dial, lambda: dial.connected, visit.timeout_s):
            raise BrokerUnreachable(
                f"{address} ended no handshake in {visit.timeout_s:g} s",
                remedy="is the broker's process stopped, or its machine overloaded?",
            )
        yield dial
    finally:
        context.destroy(linger=0)


@contextmanager
def _uplink(visit: Visit) -> Iterator[Dial]:
    """A connection for pushes, on which the broker listens."""
    address = visit.beside(visit.status.uplink_port)
    with _dialled(visit, Kind.LEARNER_UPLINK, address) as dial:
        if not _waits(dial, lambda: dial.socket.poll(0), visit.timeout_s):
            raise BrokerUnreachable(
                f"the broker does not ask for data at {address}",
                remedy="is that port forwarded to the broker's uplink, the port after control?",
            )
        yield dial


@contextmanager
def _downlink(visit: Visit) -> Iterator[Dial]:
    """A connection for publications, from the broker or the relay."""
    address = visit.relay or visit.beside(visit.status.downlink_port)
    # A relay proves with the site's own key that it is of the site.
    server = visit.key.pair.public if visit.relay and visit.key else visit.server
    with _dialled(visit, Kind.LEARNER_DOWNLINK, address, server) as dial:
        yield dial


def _waits(dial: Dial, condition: Callable[[], object], timeout_s: float) -> bool:
    """Follows a connection until a condition holds; False: it did not. Raises what is certain of
    the connection."""
    now = time.monotonic()
    until = now + timeout_s
    while now < until:
        zmq.select([dial.monitor, dial.socket], [], [], min(LOOK_S, until - now))
        now = time.monotonic()
        dial.look(now)
        if condition():
            return True
        trouble = dial.error(now)
        if trouble is not None and not dial.is_silent:
            raise trouble
    return False


def _load(visit: Visit, size_bytes: int) -> list[bytes]:
    """A data message that the broker reads and drops, since it is of another life. With a key it
    speaks for the key's site: to speak for another would count as an offence."""
    name = visit.key.name if visit.key else visit.name or "doctor"
    header = Header(ELSEWHERE, DataKind.PUSH, f"{name}.00000000", 0, 0, 1, 0, LOSSLESS, 0, 0)
    return [uplink_topic(0).encode(), encode_header(header), os.urandom(size_bytes)]


def _acked(dial: Dial, size_bytes: int) -> Callable[[], bool]:
    """The question whether the other side has acknowledged so much."""
    return lambda: _acked_bytes(dial) >= size_bytes


def _acked_bytes(dial: Dial) -> int:
    """Bytes that the other side has acknowledged, as the kernel counts them (Linux)."""
    with tcp.socket(fileno=os.dup(dial.descriptor)) as line:
        told = line.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, ACKED_AT + 8)
    return int(struct.unpack_from("=Q", told, ACKED_AT)[0])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
