"""ZeroMQ socket options, by name, each with its reason. Both shells apply them unchanged."""

from __future__ import annotations

from narrows.proto import timing
from narrows.proto.limits import CONTROL_BYTES_MAX, CONTROL_UP_BYTES_MAX, PAYLOAD_BYTES_MAX

STREAM_WINDOW_BYTES = 32 << 20
"""Unacknowledged payload per stream and direction. 2 Gbit/s at 100 ms round trip is 25 MB."""


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


COMMON: dict[str, int] = {
    # A socket must never keep a process from ending; Bye gets this long to leave.
    "LINGER": _milliseconds(timing.LINGER_S),
    # Time without an acknowledgement of data or probes, after which a connection is closed
    # and dialled again. A firewall may have forgotten it, and the kernel alone would try for a
    # quarter of an hour. (Neither this nor ZeroMQ's heartbeats notice a peer that is frozen with
    # full buffers. The progress of streams shows it.)
    "TCP_MAXRT": _milliseconds(timing.UNACKNOWLEDGED_MAX_S),
    # A peer that only receives sends nothing that could be acknowledged: probes find a dead
    # connection for it, within MAXRT. They also keep NAT and firewalls from forgetting an idle
    # connection.
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": int(timing.KEEPALIVE_IDLE_S),
    "TCP_KEEPALIVE_INTVL": int(timing.KEEPALIVE_INTERVAL_S),
    "TCP_KEEPALIVE_CNT": 2,
    # The kernel sends a lost first packet again after 1, 2, 4, ... 64 s, which can outlast an
    # outage by a minute. A new attempt begins sooner.
    "CONNECT_TIMEOUT": _milliseconds(timing.CONNECT_TIMEOUT_S),
    # Half-open handshakes (port scanners, slow-loris) are dropped.
    "HANDSHAKE_IVL": _milliseconds(timing.HANDSHAKE_S),
    # The default never backs off: a hundred learners would hammer a restarting broker. The
    # longest interval is also the time for which nobody notices that a broker is back.
    "RECONNECT_IVL": _milliseconds(timing.RECONNECT_S),
    "RECONNECT_IVL_MAX": _milliseconds(timing.RECONNECT_MAX_S),
    # SNDBUF and RCVBUF stay unset: setting them switches the kernel's autotuning off.
}

CONTROL: dict[str, int] = {
    **COMMON,
    # Messages are small, and a peer that reads none of a thousand is lost anyway.
    "SNDHWM": 1000,
    "RCVHWM": 1000,
    "MAXMSGSIZE": CONTROL_BYTES_MAX,
}

ROUTER: dict[str, int] = {
    **CONTROL,
    # Anybody may send, so the broker takes small messages only.
    "MAXMSGSIZE": CONTROL_UP_BYTES_MAX,
    # Per connection, and messages may be large: a peer that floods waits for the broker to read.
    "RCVHWM": 64,
    # A send to a peer that is gone fails, which is how a closed connection is noticed.
    "ROUTER_MANDATORY": 1,
}

DEALER: dict[str, int] = {
    **CONTROL,
    # Without a connection nothing is queued: an old Report is worthless after an outage.
    "IMMEDIATE": 1,
}

DATA: dict[str, int] = {
    **COMMON,
    # 0 is no limit. A limit would count messages, not bytes, and pub/sub drops what exceeds it.
    # Credit limits the bytes instead (flow/outbox.py).
    "SNDHWM": 0,
    # Nothing is dropped here: a full queue stops reading, and TCP stops the sender. A peer that
    # ignores its credit costs at most so many messages per connection.
    "RCVHWM": 64,
    "MAXMSGSIZE": PAYLOAD_BYTES_MAX,
}

XPUB: dict[str, int] = {
    **DATA,
    # Show each subscription, repeated ones after a reconnect too. XPUB_NODROP stays off: with it
    # one stalled subscriber stops all the others.
    "XPUB_VERBOSER": 1,
}

DOWNLINK: dict[str, int] = {
    **XPUB,
    # Only subscriptions come in, and a topic is short. Below 512 no CURVE handshake would pass.
    "MAXMSGSIZE": 512,
    # The broker decides which subscriptions count: a topic is for its learner alone.
    "XPUB_MANUAL": 1,
}
