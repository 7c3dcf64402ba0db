"""ZeroMQ socket options, by name, each with its reason; both shells apply them as they stand."""

from __future__ import annotations

from narrows.proto import timing
from narrows.proto.limits import CONTROL_BYTES_MAX, PAYLOAD_BYTES_MAX

STREAM_WINDOW_BYTES = 32 << 20
"""Unacknowledged payload per stream and direction. 2 Gbit/s at 100 ms round trip is 25 MB."""


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


COMMON: dict[str, int] = {
    # A socket must never keep a process from ending; Bye gets this long to leave.
    "LINGER": _milliseconds(timing.LINGER_S),
    # A connection on which nothing is acknowledged for so long, neither data nor probes, is closed
    # and dialled again: a firewall may have forgotten it, and the kernel alone would try for a
    # quarter of an hour. (A peer that is frozen with full buffers is not seen by this, nor by
    # ZeroMQ's heartbeats: progress is.)
    "TCP_MAXRT": _milliseconds(timing.UNACKNOWLEDGED_MAX_S),
    # Who only receives has nothing to be acknowledged: probes find out for it, within MAXRT. They
    # also keep NAT and firewalls from forgetting an idle connection.
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": int(timing.KEEPALIVE_IDLE_S),
    "TCP_KEEPALIVE_INTVL": int(timing.KEEPALIVE_INTERVAL_S),
    "TCP_KEEPALIVE_CNT": 2,
    # A first packet that is lost is sent again after 1, 2, 4, ... 64 s: over an outage that is
    # longer than the outage. A new attempt begins sooner.
    "CONNECT_TIMEOUT": _milliseconds(timing.CONNECT_TIMEOUT_S),
    # Half-open handshakes (port scanners, slow-loris) are dropped.
    "HANDSHAKE_IVL": _milliseconds(timing.HANDSHAKE_S),
    # The default never backs off: a hundred learners would hammer a restarting broker. But what
    # it says last decides how long a broker is back before anybody notices.
    "RECONNECT_IVL": _milliseconds(timing.RECONNECT_S),
    "RECONNECT_IVL_MAX": _milliseconds(timing.RECONNECT_MAX_S),
    # SNDBUF and RCVBUF stay alone: setting them switches the kernel's autotuning off.
}

CONTROL: dict[str, int] = {
    **COMMON,
    # Messages are small and a peer that reads none of them is lost anyway.
    "SNDHWM": 1000,
    "RCVHWM": 1000,
    "MAXMSGSIZE": CONTROL_BYTES_MAX,
}

ROUTER: dict[str, int] = {
    **CONTROL,
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
    # In messages, not bytes, and beyond it pub/sub drops: the limit is credit (flow/outbox.py).
    "SNDHWM": 0,
    # Here nothing is dropped: a full queue stops reading, and TCP stops the sender. So a peer
    # that keeps to no credit costs at most so many messages per connection.
    "RCVHWM": 64,
    "MAXMSGSIZE": PAYLOAD_BYTES_MAX,
}

XPUB: dict[str, int] = {
    **DATA,
    # See each subscription, also repeated ones after a reconnect. XPUB_NODROP stays off: with
    # it one stalled subscriber stops all the others.
    "XPUB_VERBOSER": 1,
}
