"""The address and the keys that an attacker knows, and sockets and bytes made from them."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import zmq

from narrows.proto.address import parse_address
from narrows.proto.keys import KeyPair, new_pair

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_GREETING_BYTES: Final = 64

Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class AttackTarget:
    """Knowledge of an attacker: addresses, the broker's public key, and its own key."""

    broker: str
    uplink_port: int
    downlink_port: int
    server: str
    """Public key of the broker."""
    public: str
    secret: str
    """A key that the broker admits (an insider's), or one that nobody knows (an outsider's)."""
    name: str
    """The insider's name in the key ring."""
    victim: str
    """Name of an honest learner."""
    params: int
    """Parameters of the run's model."""

    @classmethod
    def read(cls, path: Path) -> AttackTarget:
        """The target in a file that `write` made."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Hands the target to a process of an attacker."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @property
    def ports(self) -> tuple[int, int, int]:
        """Ports of control, uplink and downlink."""
        return (parse_address(self.broker).port, self.uplink_port, self.downlink_port)

    @property
    def pair(self) -> KeyPair:
        """The attacker's own key."""
        return KeyPair(self.public, self.secret)

    def address(self, port: int) -> str:
        return str(parse_address(self.broker)._replace(port=port))

    def connect(
        self,
        context: zmq.Context[Socket],
        kind: int,
        port: int,
        *,
        pair: KeyPair | None = None,
        server: str = "",
        topics: tuple[bytes, ...] = (),
    ) -> Socket:
        """A CURVE socket that dials `port`, with the attacker's key unless `pair` is given."""
        own = self.pair if pair is None else pair
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 100)
        made.setsockopt(zmq.CURVE_SERVERKEY, (server or self.server).encode())
        made.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        for topic in topics:
            made.setsockopt(zmq.SUBSCRIBE, topic)
        made.connect(self.address(port))
        return made

    def stranger(self, context: zmq.Context[Socket], kind: int, port: int) -> Socket:
        """A CURVE socket with a fresh key, which no ring holds."""
        return self.connect(context, kind, port, pair=new_pair())

    def dial(self, port: int) -> socket.socket:
        """A plain TCP connection."""
        host = parse_address(self.broker).host.strip("[]")
        return socket.create_connection((host, port), timeout=5)


def greeting(mechanism: str) -> bytes:
    """The first 64 bytes of a ZMTP 3.1 connection (RFC 37)."""
    start = _GREETING + mechanism.encode().ljust(20, b"\0") + b"\0"
    return start.ljust(_GREETING_BYTES, b"\0")


def frame(body: bytes, *, more: bool = False) -> bytes:
    """One ZMTP frame of a connection without encryption."""
    return struct.pack(">BQ", 2 | more, len(body)) + body
