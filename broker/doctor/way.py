"""Checks of the way from a site to the broker: name, ports, keys, and what the line carries.

They dial as a learner does (`proto/sockets.py`). A plain connection comes first: it tells a port
that is closed from one whose packets are dropped, and another program from a broker.
"""

from __future__ import annotations

import math
import socket as tcp
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import zmq

from narrows.broker.cli.status import LOOK_S, ask_status
from narrows.broker.doctor.findings import Check, Finding, ok
from narrows.proto.config import Address
from narrows.proto.errors import BrokerUnreachable, ErrorCode, NarrowsError, Refused
from narrows.proto.keys import SiteKey, servers_of
from narrows.proto.sockets import PROBE_S, Dial, Kind, needs_ipv6

GREETING_BYTES: Final = 64
"""Bytes with which both sides of ZMTP 3 begin."""
_BEGIN: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Signature and version: the other side then names its mechanism, whatever ours is."""
_MECHANISM: Final = slice(12, 32)
"""The place of the mechanism's name in a greeting, filled with zeros."""


@dataclass
class Visit:
    """A look from a site, and what was found so far."""

    address: Address
    """The broker's control port."""
    key: SiteKey | None
    name: str
    """The learner whose place this is."""
    timeout_s: float
    """Longest wait for one thing."""
    relay: Address | None = None
    ipv6: bool = False
    greeting: bytes = b""
    """The first bytes that the control port has said."""
    round_trip_s: float = math.inf
    server: str = ""
    """The public key of the broker with which handshakes succeed."""
    status: dict[str, Any] | None = None


def host_name(visit: Visit) -> Finding:
    """The broker's host name resolves."""
    visit.ipv6 = needs_ipv6(visit.address)
    return ok(f"{visit.address.host} is {_place(visit, visit.address)[0]}")


def control_port(visit: Visit) -> Finding:
    """Somebody listens at the control port."""
    visit.greeting = _greet(visit, visit.address, "control")
    return ok(f"port {visit.address.port} is open; a round trip takes {_ms(visit.round_trip_s)}")


def is_broker(visit: Visit) -> Finding:
    """The one who listens there is no other program, and is not stopped."""
    _check_greeting(visit.address, visit.greeting)
    return ok("it greets as a broker does")


def keys(visit: Visit) -> Finding:
    """Either both sides have keys or none."""
    has_keys = visit.greeting[_MECHANISM].startswith(b"CURVE")
    if has_keys and visit.key is None:
        raise Refused(
            ErrorCode.KEY_REFUSED,
            "the broker admits only those who have a key, and this site gave none",
            remedy="give the site's key: --key FILE, or NARROWS_KEY (`narrows keys new` makes one)",
        )
    if visit.key is not None and not has_keys:
        raise Refused(
            ErrorCode.KEY_REFUSED,
            "this site has a key and the broker has none, so nobody knows who it is",
            remedy="its operator gives it keys: narrows broker --keys FOLDER; or join without one",
        )
    return ok("both sides have keys" if has_keys else "neither side has keys")


def broker_key(visit: Visit) -> Finding:
    """The broker has one of the keys that the site trusts."""
    trouble: NarrowsError | None = None
    for server in servers_of(visit.key):
        visit.server = server
        try:
            with _dialled(visit, Kind.LEARNER_CONTROL, visit.address):
                pass
        except BrokerUnreachable as error:
            trouble = error
        except Refused:
            break  # It could read the handshake: it is the right broker.
        else:
            break
    else:
        assert trouble is not None, "no server was dialled"
        raise trouble
    return ok("it is the one that the key file names" if visit.key else "there are no keys")


def key_admitted(visit: Visit) -> Finding:
    """The broker admits the site's key."""
    with _dialled(visit, Kind.LEARNER_CONTROL, visit.address):
        pass
    return ok("the broker admits the key" if visit.key else "there are no keys")


def answers(visit: Visit) -> Finding:
    """The broker answers a question."""
    key = visit.key and replace(visit.key, servers=(visit.server,))
    begun_at = time.monotonic()
    visit.status = ask_status(str(visit.address), key, timeout_s=visit.timeout_s)
    took_s = time.monotonic() - begun_at
    return ok(f"run {visit.status['run_id']}, {visit.status['phase']}; asked in {_ms(took_s)}")


CHECKS: Final = (
    Check("host name", host_name),
    Check("control port", control_port, "host name"),
    Check("broker there", is_broker, "control port"),
    Check("keys", keys, "broker there"),
    Check("broker's key", broker_key, "keys"),
    Check("key admitted", key_admitted, "broker's key"),
    Check("answer", answers, "key admitted"),
)


# The way there.


def _place(visit: Visit, address: Address) -> tuple[str, int]:
    """Number and port of an address. Raises BrokerUnreachable for a name that does not resolve."""
    family = tcp.AF_INET6 if needs_ipv6(address) else tcp.AF_INET
    found = tcp.getaddrinfo(address.host.strip("[]"), address.port, family, tcp.SOCK_STREAM)
    number, port = found[0][4][:2]
    return str(number), int(port)


def _greet(visit: Visit, address: Address, what: str) -> bytes:
    """Begins to greet at a port as ZMTP does; the greeting that comes back, as far as it came.

    Raises BrokerUnreachable if nobody takes the connection.
    """
    begun_at = time.monotonic()
    try:
        line = tcp.create_connection(_place(visit, address), visit.timeout_s)
    except TimeoutError:
        trouble = f"nothing came back from {address} in {visit.timeout_s:g} s"
        remedy = f"does a firewall drop packets to port {address.port} ({what}), at the broker or "
        remedy += "here? Is the machine up, and is this its address?"
    except ConnectionRefusedError:
        trouble = f"nobody listens at {address}"
        remedy = "is the broker running? Its log, and `narrows broker` as it starts, tell its "
        remedy += f"address; a firewall that rejects port {address.port} ({what}) looks the same"
    except OSError as error:
        trouble = f"{address} cannot be reached ({error.strerror or error})"
        remedy = f"is there a route from here, and is port {address.port} ({what}) open?"
    else:
        visit.round_trip_s = min(visit.round_trip_s, time.monotonic() - begun_at)
        with line:
            line.settimeout(PROBE_S)
            return _talk(line)
    raise BrokerUnreachable(trouble, remedy=remedy)


def _talk(line: tcp.socket) -> bytes:
    """The other side's answer to a greeting, up to the length of one. It ends where the other side
    is silent or hangs up."""
    heard = b""
    with suppress(OSError):
        line.sendall(_BEGIN)
        with suppress(TimeoutError):
            heard = line.recv(1)
        if not heard:
            line.sendall(b"\r\n\r\n")  # Many programs wait for the end of a line.
        while len(heard) < GREETING_BYTES:
            more = line.recv(GREETING_BYTES - len(heard))
            if not more:
                break
            heard += more
    return heard


def _check_greeting(address: Address, greeting: bytes) -> None:
    """Raises BrokerUnreachable for the greeting of another program, and for none."""
    if greeting[:1] == b"\xff" and len(greeting) == GREETING_BYTES:
        return
    if greeting:
        raise BrokerUnreachable(
            f"another program listens at {address}: it says {greeting[:20]!r}",
            remedy="is it the right port? `narrows broker` prints its address when it starts",
        )
    raise BrokerUnreachable(
        f"{address} takes connections and says nothing, or hangs up",
        remedy="is the broker's process stopped or frozen, or does another program listen there?",
    )


@contextmanager
def _dialled(visit: Visit, kind: Kind, address: Address, server: str = "") -> Iterator[Dial]:
    """A connection whose handshake has succeeded. Raises Refused and BrokerUnreachable."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ipv6 = needs_ipv6(address)
        dial = Dial(context, kind, address, visit.key, server or visit.server, ipv6=ipv6)
        if not _waits(dial, lambda: dial.connected, visit.timeout_s):
            raise BrokerUnreachable(
                f"{address} began no handshake in {visit.timeout_s:g} s",
                remedy="is the broker's process stopped, or are large packets lost on the way?",
            )
        yield dial
    finally:
        context.destroy(linger=0)


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


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
