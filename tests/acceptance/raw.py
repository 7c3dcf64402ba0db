"""A peer made by hand from proto/PROTOCOL.md, for messages that no honest learner sends."""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgpack
import xxhash
import zmq

PROTOCOL: Final = 3
ANSWER_S: Final = 15.0
PUSH: Final = 1
"""Kind of a data message with an outer gradient."""

HEADER: Final = (
    "protocol", "run_id", "epoch", "kind", "learner", "incarnation", "fragment", "version",
    "push_id", "offset", "count", "codec", "payload_digest", "result_digest", "stream", "position",
)  # fmt: skip

digest = xxhash.xxh3_64_intdigest


def sealed(body: bytes, protocol: int = PROTOCOL) -> bytes:
    """Any body in a valid envelope."""
    return b"NRW" + bytes([protocol]) + int(digest(body)).to_bytes(8, "little") + body


def packed(**fields: Any) -> bytes:
    """A control frame with these fields."""
    return sealed(msgpack.packb(fields))


def greeting(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    """The first 64 bytes of a ZMTP connection."""
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 1]) + mechanism.ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """The rest of a ZMTP handshake without keys, for a socket of this type."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


def framed(*parts: bytes) -> bytes:
    """One ZMTP message of these frames."""
    flags = [1] * (len(parts) - 1) + [0]
    sizes = [len(part).to_bytes(8, "big") for part in parts]
    each = zip(flags, sizes, parts, strict=True)
    return b"".join(bytes([flag | 2]) + size + part for flag, size, part in each)


@dataclass(frozen=True)
class Curve:
    """The keys that a socket proves: the broker's public key and a pair, all in Z85."""

    server: str
    public: str
    secret: str


class Peer:
    """One control connection to a broker, and data connections once it has joined."""

    def __init__(self, address: str, name: str, fingerprint: str, curve: Curve | None = None):
        self.host, self.port = address.rsplit(":", 1)[0], int(address.rsplit(":", 1)[1])
        self.name, self.fingerprint, self.curve = name, fingerprint, curve
        self.incarnation, self.push_id = secrets.token_hex(16), 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.dial(zmq.DEALER, 0)
        self.welcome: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def dial(self, kind: int, offset: int, subscription: bytes | None = None) -> zmq.Socket[bytes]:
        """A socket to the broker's control port (0), uplink (1) or downlink (2)."""
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDTIMEO, int(ANSWER_S * 1000))
        if self.curve:
            made.setsockopt(zmq.CURVE_SERVERKEY, self.curve.server.encode())
            made.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.public.encode())
            made.setsockopt(zmq.CURVE_SECRETKEY, self.curve.secret.encode())
        if subscription is not None:
            made.setsockopt(zmq.SUBSCRIBE, subscription)
        made.connect(f"{self.host}:{self.port + offset}")
        return made

    def tell(self, **fields: Any) -> None:
        """Sends a control message."""
        self.control.send(packed(**fields))

    def hear(self, kind: str) -> dict[str, Any]:
        """The next control message of this kind; others are passed over."""
        deadline = time.monotonic() + ANSWER_S
        while self.control.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message: dict[str, Any] = msgpack.unpackb(self.control.recv()[12:])
            if message["type"] == kind:
                return message
        raise AssertionError(f"the broker has sent no {kind} to {self.name}")

    def status(self) -> dict[str, Any]:
        self.tell(type="askstatus")
        return self.hear("status")

    def hello(self, **fields: Any) -> None:
        """Says an honest Hello but for these fields."""
        honest = {
            "type": "hello", "protocol": PROTOCOL, "name": self.name, "run_id": "",
            "incarnation": self.incarnation, "epoch": [0, 0, 0], "fingerprint": self.fingerprint,
            "codecs": ["raw32", "f32-blosc2", "bf16", "int8-zstd", "int4-zstd"],
            "step": 0, "tokens": 0, "versions": [],
        }  # fmt: skip
        self.tell(**honest | fields)

    def join(self) -> None:
        """Says Hello, and opens an uplink; the broker listens to it when this returns."""
        self.hello()
        self.welcome = self.hear("welcome")
        self.uplink = self.dial(zmq.XPUB, 1)
        assert self.uplink.poll(int(ANSWER_S * 1000)), "the broker does not subscribe"
        assert self.uplink.recv() == b"\1"

    def topic(self, stream: int = 0) -> bytes:
        """Topic of the data that the broker sends to this peer."""
        return f"{self.name}/{self.incarnation}/{stream:02d}".encode()

    def announce(self, **fields: Any) -> None:
        """Announces a new push of fragment 0 with these fields."""
        self.push_id += 1
        honest = {"type": "push", "fragment": 0, "attempt": 1, "push_id": self.push_id}
        self.tell(**honest | {"tokens": 5, "steps": 5} | fields)

    def chunk(self, payload: bytes, **fields: Any) -> None:
        """Sends an honest chunk of a new push of fragment 0 but for these fields of its header."""
        self.push_id += 1
        honest = {
            "protocol": PROTOCOL, "run_id": self.welcome["run_id"], "kind": PUSH,
            "epoch": self.welcome["epoch"], "learner": self.name, "incarnation": self.incarnation,
            "fragment": 0, "version": 0, "push_id": self.push_id, "offset": 0, "count": 1,
            "codec": self.welcome["settings"]["push_codec"], "payload_digest": digest(payload),
            "result_digest": 0, "stream": 0, "position": len(payload),
        }  # fmt: skip
        fields = honest | fields
        header = sealed(msgpack.packb([fields[name] for name in HEADER]))
        self.uplink.send_multipart([b"u", header, payload])


def refusals(member: Peer) -> Counter[str]:
    """Refusals since the broker's start, by code. A key may ask for few a second."""
    return Counter(member.status()["contributions_refused"])


def fingerprint_of(layout: Path) -> str:
    """The fingerprint in a file that `narrows layout` printed."""
    return str(json.loads(layout.read_text())["fingerprint"])


def throw(port: int, strings: Sequence[bytes], kind: bytes = b"") -> None:
    """Sends each byte string over a TCP connection of its own, and waits until all are closed.

    kind: the socket that a ZMTP handshake names first; without it no handshake is made.
    """
    with ExitStack() as stack:
        lines = list[socket.socket]()
        for text in strings:
            lines.append(stack.enter_context(_dialled(port, kind)))
            with suppress(OSError):  # The broker may hang up before it has read all.
                lines[-1].sendall(text)
                lines[-1].shutdown(socket.SHUT_WR)
        for line in lines:
            with suppress(ConnectionError):
                while line.recv(65536):
                    pass


def throw_without_end(port: int, kind: bytes, part: bytes) -> None:
    """Sends one message of parts without an end until the broker hangs up."""
    frames = memoryview(framed(part, b"")[: 9 + len(part)] * 64)
    with _dialled(port, kind) as line, suppress(ConnectionError):
        sent = 0
        while sent < 1 << 30:
            readable, writable, _ = select.select([line], [line], [], ANSWER_S)
            assert readable or writable, "the broker neither reads nor hangs up"
            if readable and not line.recv(65536):
                return
            if writable:
                sent += line.send(frames[sent % len(frames) :])
        raise AssertionError("the broker takes in a message of 1 GiB")


def _dialled(port: int, kind: bytes) -> socket.socket:
    """A connection to the port, after the handshake of such a socket if `kind` names one.

    A broker that cuts a hostile connection may cut a new one with it, which dials again.
    """
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        line = socket.create_connection(("127.0.0.1", port), ANSWER_S)
        if not kind or _shakes_hands(line, kind):
            return line
        line.close()
    raise AssertionError("the broker hangs up on honest handshakes")


def _shakes_hands(line: socket.socket, kind: bytes) -> bool:
    answer, more = b"", b"?"
    with suppress(ConnectionError):
        line.sendall(greeting() + ready(kind))
        while more and (len(answer) < 66 or len(answer) < 66 + answer[65]):
            more = line.recv(1024)
            answer += more
        return bool(more)
    return False
