"""From which connection a message came, and whose key it has."""

from __future__ import annotations

from typing import NamedTuple

import zmq

from narrows.broker.process.gate import Gate
from narrows.proto.key_holder import KeyHolder


class MessageOrigin(NamedTuple):
    """The connection from which a message came."""

    descriptor: int = -1
    """Its file descriptor; another connection may have it by now."""
    address: str = ""
    key: str = ""
    """Public key that it has proved; empty: the broker has no keys."""
    holder: KeyHolder | None = None
    """None: the broker has no keys, or the key is nobody's any more."""


def origin_of(frame: zmq.Frame, gate: Gate | None) -> MessageOrigin:
    """Origin of a message, from one of its parts."""
    descriptor = descriptor_of(frame)
    if descriptor is None:
        return MessageOrigin()
    address = str(frame.get("Peer-Address"))
    if gate is None:
        return MessageOrigin(descriptor, address)
    key = str(frame.get("User-Id"))
    return MessageOrigin(descriptor, address, key, gate.holder(key))


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Descriptor of the connection from which a frame came. None: libzmq made the frame itself, or
    the peer speaks ZMTP 1, which has no properties; a CURVE server does not talk to it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, KeyError):
        return None
