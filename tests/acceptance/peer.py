"""A peer made by hand from proto/PROTOCOL.md, for messages that no honest learner sends."""

import hashlib
import json
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple, Self

import msgpack
import xxhash
import zmq
from acceptance.kit import Site

PROTOCOL: Final = 1
ENVELOPE: Final = b"NRW" + bytes([PROTOCOL])
ANSWER_S: Final = 15.0

REFUSED: Final = re.compile(r"(?:: |^)([a-z]+_[a-z_]+): ")
"""The code in a note of the broker's events file that something was refused."""


def packed(**fields: Any) -> bytes:
    """The body of a control message with these fields."""
    return bytes(msgpack.packb(fields))


def greeting(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    """The first 64 bytes of a ZMTP connection."""
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 1]) + mechanism.ljust(20, b"\0") + bytes(32)


def handshake(kind: bytes) -> bytes:
    """A ZMTP handshake without keys, for a socket of this type."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return greeting() + b"\x04" + bytes([len(body)]) + body


def framed(*parts: bytes) -> bytes:
    """One ZMTP message of these frames."""
    flags = [b"\x03"] * (len(parts) - 1) + [b"\x02"]
    each = zip(flags, parts, strict=True)
    return b"".join(flag + len(part).to_bytes(8, "big") + part for flag, part in each)


class Curve(NamedTuple):
    """The keys that a socket proves: the broker's public key and a pair, all in Z85."""

    server: str
    public: str
    secret: str


class Peer:
    """One control connection to a broker, and data connections once it has joined."""

    def __init__(self, site: Site, name: str, fingerprint: str, curve: Curve | None = None):
        self.site = site
        self.name = name
        self.fingerprint = fingerprint
        self.curve = curve
        self.incarnation = f"{name}.{secrets.token_hex(4)}"
        self.push_id = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dialled = list[zmq.Socket[bytes]]()  # Nobody else may keep one until it is closed.
        self.control = self.dial(zmq.DEALER, 0)
        self.welcome: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def dial(self, kind: int, offset: int, subscription: bytes | None = None) -> zmq.Socket[bytes]:
        """A socket to the broker's control port (0), uplink (1) or downlink (2)."""
        made = self._context.socket(kind)
        self._dialled.append(made)
        made.setsockopt(zmq.SNDTIMEO, int(ANSWER_S * 1000))
        if self.curve:
            made.setsockopt(zmq.CURVE_SERVERKEY, self.curve.server.encode())
            made.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.public.encode())
            made.setsockopt(zmq.CURVE_SECRETKEY, self.curve.secret.encode())
        if subscription is not None:
            made.setsockopt(zmq.SUBSCRIBE, subscription)
        made.connect(f"tcp://127.0.0.1:{self.site.port + offset}")
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

    def is_refused(self, code: str, case: object = "") -> None:
        """Hears a refusal with this code that says what was refused and why."""
        refusal = self.hear("refuse")
        assert refusal["code"] == code and refusal["message"], (case, refusal)
        assert refusal["expected"] and refusal["got"], (case, refusal)

    def hello(self, **fields: Any) -> None:
        """Says an honest Hello but for these fields."""
        honest = {
            "type": "hello", "protocol": PROTOCOL, "name": self.name, "run_id": "",
            "incarnation": self.incarnation, "epoch": "", "fingerprint": self.fingerprint,
            "copies": [],
        }  # fmt: skip
        self.tell(**honest | fields)

    def join(self) -> None:
        """Says Hello, and opens an uplink; the broker listens to it when this returns."""
        self.hello()
        self.welcome = self.hear("welcome")
        self.uplink = self.dial(zmq.XPUB, 1)
        assert self.uplink.poll(int(ANSWER_S * 1000)), "the broker does not subscribe"
        assert self.uplink.recv() == b"\1"

    def announce(self, **fields: Any) -> None:
        """Announces a new push of fragment 0 with these fields."""
        self.push_id += 1
        honest = {"type": "push", "fragment": 0, "push_id": self.push_id, "base": 0}
        self.tell(**honest | {"tokens": 5, "steps": 5} | fields)

    def chunk(self, payload: bytes, **fields: Any) -> None:
        """Sends an honest chunk of a new push of fragment 0 but for these fields of its header."""
        self.uplink.send_multipart([b"u/00", self.header(payload, **fields), payload])

    def header(self, payload: bytes, **fields: Any) -> bytes:
        """The header of such a chunk: these fields in this order."""
        self.push_id += 1
        honest = {
            "epoch": self.welcome["beat"]["epoch"], "kind": 0, "learner": self.incarnation,
            "fragment": 0, "version": 0, "push_id": self.push_id, "chunk": 0,
            "codec": self.welcome["settings"]["push_codec"],
            "payload_digest": xxhash.xxh3_64_intdigest(payload), "result_digest": 0,
            "contributors": [],
        }  # fmt: skip
        return bytes(msgpack.packb(list((honest | fields).values())))


def refusals(site: Site, *words: str) -> Counter[str]:
    """Refusals of the broker, by code; with words only where its note has them."""
    said = [one["text"] for one in site.events("broker", "note") if one["kind"] == "refused"]
    found = [REFUSED.search(text) for text in said if all(word in text for word in words)]
    return Counter(one[1] for one in found if one)


def fingerprint_of(site: Site) -> str:
    """The fingerprint of the run's layout, as `narrows export` prints it while the broker runs."""
    told = json.loads(site.tell("export", str(site.state), "--layout"))
    text = msgpack.packb([told["frozen_digest"], told["entries"]])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def throw(port: int, strings: Iterable[bytes], kind: bytes = b"") -> None:
    """Sends each byte string over a TCP connection of its own, and waits until all are closed.

    kind: the socket that a ZMTP handshake names first; without it no handshake is made.
    """
    with ExitStack() as stack:
        lines = list[socket.socket]()
        for text in strings:
            line = socket.create_connection(("127.0.0.1", port), ANSWER_S)
            lines.append(stack.enter_context(line))
            with suppress(ConnectionError):  # The broker may hang up before it has read all.
                if kind:
                    line.sendall(handshake(kind))
                    line.makefile("rb").read(72)  # To its READY; before, libzmq takes no frame.
                line.sendall(text)
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        for line in lines:
            with suppress(ConnectionError):
                while line.recv(65536):
                    pass
