"""Made-up connections to a broker: bytes before the handshake of ZMTP, and sessions behind it.

Every connection follows from a seed, so that one that does harm can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from fuzz.tree import altered_msgpack
from peer import Peer, sealed

from narrows.proto import messages as msg
from narrows.proto.codec import codec_names
from narrows.proto.frames import (
    ENVELOPE_BYTES,
    digest,
    downlink_topic,
    encode_control,
    encode_header,
)
from narrows.proto.limits import PROTOCOL

Port = Literal["control", "uplink", "downlink"]
PORTS: Final[tuple[Port, ...]] = ("control", "uplink", "downlink")
SOCKET_TYPES: Final[dict[Port, bytes]] = {
    "control": b"DEALER", "uplink": b"XPUB", "downlink": b"SUB",
}  # fmt: skip
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
CURVE: Final = GREETING.replace(b"NULL\0", b"CURVE")
NAMES: Final = 20
"""Names under which the sessions join. Strangers with many names are the business of other
tests."""

CURVE_COMMANDS: Final = (b"\5HELLO\1\0", 200), (b"\x08INITIATE", 257), (b"\7MESSAGE", 33)
"""Names of the commands, and the bytes of each."""

ENDLESS_BYTES: Final = 300_000
"""Bytes after which an endless message is given up."""


@dataclass(frozen=True)
class Connection:
    """A whole connection: its port, and all that is said."""

    port: Port
    data: bytes
    """Where it begins with a whole greeting, the rest waits for the broker's: libzmq hangs up on
    whoever does not wait."""

    @property
    def is_greeting(self) -> bool:
        return self.data.startswith((GREETING, CURVE))


def connection(seed: int, honest: Peer, *, keys: bool = False) -> Connection:
    """The connection of that number; `honest` tells what a member of the run would say. A broker
    with keys gets the commands of CURVE as well."""
    random = Random(seed)
    port = random.choice(PORTS)
    usual = (_noise, _greeting, _command, _session, _session, _session, _endless)
    make = random.choice((*usual, _curve, _curve, _curve) if keys else usual)
    return Connection(port, make(random, port, honest))


# Before the handshake.


def _noise(random: Random, port: Port, honest: Peer) -> bytes:
    return random.randbytes(random.choice((0, 1, 9, 64, 500, 5000)))


def _greeting(random: Random, port: Port, honest: Peer) -> bytes:
    return _blind(GREETING, random) + handshake(port)[64:]


def _command(random: Random, port: Port, honest: Peer) -> bytes:
    return GREETING + _blind(handshake(port)[64:], random) + random.randbytes(20)


def _curve(random: Random, port: Port, honest: Peer) -> bytes:
    """The commands of CURVE in any order, nearly of the right length, with nothing proved."""
    said = CURVE
    for _ in range(random.randrange(1, 4)):
        name, size = random.choice(CURVE_COMMANDS)
        body = name + bytes(72 * random.randrange(2)) + random.randbytes(size)
        said += frame(body[: size + random.choice((0, 0, 0, -1, 9))], command=True)
    return said if random.random() < 0.7 else _blind(said, random)


# Behind it.


def messages(random: Random, port: Port, honest: Peer) -> list[list[bytes]]:
    """Some messages for one connection, part by part."""
    talk: dict[Port, Callable[[Random, Peer], list[bytes]]] = {
        "control": _control, "uplink": _uplink, "downlink": _subscription,
    }  # fmt: skip
    return [talk[port](random, honest) for _ in range(random.randrange(9))]


def _session(random: Random, port: Port, honest: Peer) -> bytes:
    said = handshake(port)
    for parts in messages(random, port, honest):
        if port == "downlink" and random.random() < 0.3:
            said += _new_subscription(random, parts[0][1:])
        else:
            said += b"".join(frame(p, more=i < len(parts) - 1) for i, p in enumerate(parts))
    return said if random.random() < 0.7 else _blind(said, random)


def _endless(random: Random, port: Port, honest: Peer) -> bytes:
    """A message without an end: one long part, or parts without number."""
    if random.random() < 0.5:
        size = random.choice((1 << 20, 1 << 32, 1 << 62, 2**64 - 1))
        return handshake(port) + b"\2" + size.to_bytes(8, "big") + bytes(ENDLESS_BYTES)
    part = frame(random.randbytes(random.choice((0, 1, 200))), more=True)
    return handshake(port) + part * (ENDLESS_BYTES // len(part))


def _control(random: Random, honest: Peer) -> list[bytes]:
    message = _message(random, honest)
    body = encode_control(message)[ENVELOPE_BYTES:]
    if random.random() < 0.6:
        body = altered_msgpack(body, random) or body
    whole = sealed(body)
    if random.random() < 0.1:
        whole = _blind(whole, random)
    return [whole] * random.choice((1,) * 19 + (2,))


def _message(random: Random, honest: Peer) -> msg.ControlMessage:
    """One of the messages of a member; on its first Hello it joins."""
    number, name = random.randrange(4), f"fuzz-{random.randrange(NAMES)}"
    hello = honest.hello(name=name, incarnation=_incarnation(random))
    return random.choice((
        hello, hello, msg.AskStatus(), msg.Adopted(number, 0), msg.Fetch(number, -1),
        msg.Report(2, 2, 0.001, None, (0,), msg.TokenLedger(), 0.0),
        msg.Push(number, 0, 1, number + 1, 216, 9, 3), msg.Decline(number, 0, 1, "busy"),
        msg.Missing(msg.DataKind.STATE, number, 0, 0, ((0, 9),)), msg.Alive(number),
        msg.AskLayout(0), msg.Bye("enough"), msg.Probe(number), msg.Progress((1,)),
    ))  # fmt: skip


def _uplink(random: Random, honest: Peer) -> list[bytes]:
    payload = random.randbytes(random.choice((0, 7, 60)))
    assert honest.welcome is not None
    header = msg.Header(
        PROTOCOL, honest.welcome.run_id, honest.welcome.epoch, random.choice(list(msg.DataKind)),
        f"fuzz-{random.randrange(NAMES)}", _incarnation(random), random.randrange(4), 0, 1,
        random.choice((0, 5, 1 << 40)), random.choice((1, 7, 216)), random.choice(codec_names()),
        digest(payload), 0, 0, len(payload),
    )  # fmt: skip
    body = encode_header(header)[ENVELOPE_BYTES:]
    if random.random() < 0.5:
        body = altered_msgpack(body, random) or body
    return [b"u", sealed(body), payload][: random.choice((1, 2, 3, 3, 3))]


def _subscription(random: Random, honest: Peer) -> list[bytes]:
    topic = random.choice((
        b"", random.randbytes(random.choice((1, 100, 300))),
        downlink_topic(honest.name, honest.incarnation, random.randrange(2)),
        downlink_topic(f"fuzz-{random.randrange(NAMES)}", _incarnation(random), 0),
    ))  # fmt: skip
    return [random.choice((b"\1", b"\0", b"\1", b"\2", b"")) + topic]


def _new_subscription(random: Random, topic: bytes) -> bytes:
    """As ZMTP 3.1 has it, with a command."""
    names = (b"\x09SUBSCRIBE", b"\6CANCEL", b"\4PING\0\1", b"\4PONG", b"\5ERROR\1")
    return frame(random.choice(names) + topic, command=True)


def _incarnation(random: Random) -> str:
    return f"{random.randrange(4):032x}"


def handshake(port: Port) -> bytes:
    """The greeting and the command with which a socket of the right type begins."""
    kind = SOCKET_TYPES[port]
    ready = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return GREETING + frame(ready, command=True)


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """A frame of ZMTP 3."""
    flags = more + 4 * command
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags + 2]) + len(body).to_bytes(8, "big") + body


def _blind(data: bytes, random: Random) -> bytes:
    """A few places where bytes are taken out and others put in; perhaps cut off."""
    for _ in range(random.randrange(1, 5)):
        at, removed = random.randint(0, len(data)), random.randrange(5)
        data = data[:at] + random.randbytes(random.randrange(5)) + data[at + removed :]
    return data[: random.randint(0, len(data))] if random.random() < 0.3 else data
