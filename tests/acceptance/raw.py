"""A peer made by hand from proto/PROTOCOL.md, for messages that no honest learner sends."""

from __future__ import annotations

import hashlib
import json
import re
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
from acceptance.kit import Site

PROTOCOL: Final = 1
ENVELOPE: Final = b"NRW" + bytes([PROTOCOL])
ANSWER_S: Final = 15.0
PUSH: Final = 0
"""Kind of a data message with an outer gradient."""

HEADER: Final = (
    "epoch", "kind", "learner", "fragment", "version", "push_id", "chunk", "codec",
    "payload_digest", "result_digest", "contributors",
)  # fmt: skip

REFUSED: Final = re.compile(r"(?:: |^)([a-z]+_[a-z_]+): ")
"""The code in a note of the broker's events file that something was refused."""

digest = xxhash.xxh3_64_intdigest


def packed(**fields: Any) -> bytes:
    """The body of a control message with these fields."""
    return bytes(msgpack.packb(fields))


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
        self.incarnation, self.push_id = f"{name}.{secrets.token_hex(4)}", 0
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
        self.control.send_multipart([ENVELOPE, packed(**fields)])

    def hear(self, kind: str) -> dict[str, Any]:
        """The next control message of this kind; others are passed over."""
        deadline = time.monotonic() + ANSWER_S
        while self.control.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            envelope, body = self.control.recv_multipart()
            assert envelope == ENVELOPE, envelope
            message: dict[str, Any] = msgpack.unpackb(body)
            if message["type"] == kind:
                return message
        raise AssertionError(f"the broker has sent no {kind} to {self.name}")

    def status(self) -> dict[str, Any]:
        """The status that the broker tells anybody who may talk to it."""
        self.tell(type="askstatus")
        return dict(self.hear("status")["status"])

    def hello(self, **fields: Any) -> None:
        """Says an honest Hello but for these fields."""
        honest = {
            "type": "hello", "protocol": PROTOCOL, "name": self.name, "run_id": "",
            "incarnation": self.incarnation, "epoch": "", "fingerprint": self.fingerprint,
            "held": [],
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
        """Topic of the data that this peer has asked for."""
        return f"r/{self.incarnation}/{stream:02d}".encode()

    def announce(self, **fields: Any) -> None:
        """Announces a new push of fragment 0 with these fields."""
        self.push_id += 1
        honest = {"type": "push", "fragment": 0, "push_id": self.push_id, "base": 0}
        self.tell(**honest | {"tokens": 5, "steps": 5} | fields)

    def chunk(self, payload: bytes, **fields: Any) -> None:
        """Sends an honest chunk of a new push of fragment 0 but for these fields of its header."""
        self.push_id += 1
        self.uplink.send_multipart([b"u/00", self.header(payload, **fields), payload])

    def header(self, payload: bytes, **fields: Any) -> bytes:
        """The header of such a chunk."""
        honest = {
            "epoch": self.welcome["beat"]["epoch"], "kind": PUSH, "learner": self.incarnation,
            "fragment": 0, "version": 0, "push_id": self.push_id, "chunk": 0,
            "codec": self.welcome["settings"]["push_codec"], "payload_digest": digest(payload),
            "result_digest": 0, "contributors": [],
        }  # fmt: skip
        fields = honest | fields
        return bytes(msgpack.packb([fields[name] for name in HEADER]))


def refusals(site: Site, *words: str) -> Counter[str]:
    """Refusals of the broker, by code; with words only where its note has them."""
    said = [one["text"] for one in site.events("broker", "note") if one["kind"] == "refused"]
    found = [REFUSED.search(text) for text in said if all(word in text for word in words)]
    return Counter(one[1] for one in found if one)


def fingerprint_of(layout: Path) -> str:
    """The fingerprint of the layout in a file that `narrows export --layout` wrote."""
    told = json.loads(layout.read_text())
    text = msgpack.packb([told["frozen_digest"], told["entries"]])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


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


def throw_without_end(port: int, kind: bytes, part: bytes, total_bytes: int) -> None:
    """Sends one message of so many bytes in parts, and hangs up before its end."""
    frames = memoryview(framed(part, b"")[: 9 + len(part)] * 64)
    with _dialled(port, kind) as line, suppress(ConnectionError):
        sent = 0
        while sent < total_bytes:
            readable, writable, _ = select.select([line], [line], [], ANSWER_S)
            assert readable or writable, "the broker neither reads nor hangs up"
            if readable and not line.recv(65536):
                return
            if writable:
                sent += line.send(frames[sent % len(frames) :])


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
