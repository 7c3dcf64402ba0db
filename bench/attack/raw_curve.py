"""A ZMTP client with CURVE made by hand (RFC 26), for messages that libzmq would never send.

It needs libsodium, which the wheels of pyzmq bring along.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from narrows.bench.attack.target import AttackTarget, greeting
from narrows.proto.errors import ErrorCode, NarrowsError

_KEY_BYTES: Final = 32
_BOX_BYTES: Final = 16
"""Bytes by which a box is longer than its content."""

_COMMAND, _LONG_COMMAND, _LONG = 4, 6, 2


class RawCurve:
    """One encrypted connection, after the handshake."""

    def __init__(
        self, target: AttackTarget, port: int, socket_type: str, *, routing_id: bytes = b""
    ) -> None:
        """Dials and shakes hands. Raises ConnectionError if the broker refuses.

        `routing_id`: the name of this connection that the broker is to take; libzmq's own sockets
        cannot claim one that begins with a zero byte.
        """
        self._sodium = _libsodium()
        self._server = z85.decode(target.server.encode())
        own = (z85.decode(target.public.encode()), z85.decode(target.secret.encode()))
        self.line: socket.socket = target.dial(port)
        self.line.settimeout(5)
        self._nonce = 0
        self._shake(
            own,
            _property(b"Socket-Type", socket_type.encode()) + _property(b"Identity", routing_id),
        )

    def send(self, body: bytes, *, more: bool) -> None:
        """Sends one frame of a message; `more` promises another one."""
        self.line.sendall(self.sealed(body, more=more))

    def sealed(self, body: bytes, *, more: bool) -> bytes:
        """The bytes of one frame on the wire."""
        box = self._box(
            bytes([more]) + body, b"CurveZMQMESSAGEC" + self._count(), self._peer, self._session
        )
        command = b"\x07MESSAGE" + struct.pack(">Q", self._nonce) + box
        return struct.pack(">BQ", _LONG, len(command)) + command

    def close(self) -> None:
        self.line.close()

    def _shake(self, own: tuple[bytes, bytes], metadata: bytes) -> None:
        self.line.sendall(greeting("CURVE"))
        self._receive(64)
        short_public, short_secret = self._pair()
        hello = b"CurveZMQHELLO---" + self._count()
        self._command(
            b"\x05HELLO\x01\x00" + bytes(72) + short_public + struct.pack(">Q", self._nonce)
            + self._box(bytes(64), hello, self._server, short_secret)
        )  # fmt: skip
        welcome = self._expect(b"\x07WELCOME")
        opened = self._open(welcome[16:], b"WELCOME-" + welcome[:16], self._server, short_secret)
        server_short, cookie = opened[:_KEY_BYTES], opened[_KEY_BYTES:]
        long_nonce = os.urandom(16)
        vouch = self._box(
            short_public + self._server, b"VOUCH---" + long_nonce, server_short, own[1]
        )
        nonce, text = b"CurveZMQINITIATE" + self._count(), own[0] + long_nonce + vouch + metadata
        self._command(
            b"\x08INITIATE" + cookie + struct.pack(">Q", self._nonce)
            + self._box(text, nonce, server_short, short_secret)
        )  # fmt: skip
        self._expect(b"\x05READY")
        self._peer, self._session = server_short, short_secret

    def _command(self, body: bytes) -> None:
        self.line.sendall(struct.pack(">BQ", _LONG_COMMAND, len(body)) + body)

    def _expect(self, name: bytes) -> bytes:
        flags = self._receive(1)[0]
        length = self._receive(8 if flags & _LONG else 1)
        body = self._receive(int.from_bytes(length, "big"))
        if not flags & _COMMAND or not body.startswith(name):
            raise ConnectionError(f"the broker refused the handshake: {body[:40]!r}")
        return body[len(name) :]

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.line.recv(count - len(data))
            if not part:
                raise ConnectionError("the broker closed the connection")
            data += part
        return data

    def _count(self) -> bytes:
        self._nonce += 1
        return struct.pack(">Q", self._nonce)

    def _pair(self) -> tuple[bytes, bytes]:
        public, secret = zmq.curve_keypair()
        return z85.decode(public), z85.decode(secret)

    def _box(self, text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(text) + _BOX_BYTES)
        size = ctypes.c_ulonglong(len(text))
        if self._sodium.crypto_box_easy(out, text, size, nonce, public, secret):
            raise ConnectionError("libsodium could not seal a box")
        return out.raw

    def _open(self, box: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(box) - _BOX_BYTES)
        size = ctypes.c_ulonglong(len(box))
        if self._sodium.crypto_box_open_easy(out, box, size, nonce, public, secret):
            raise ConnectionError("the broker's box does not open")
        return out.raw


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _libsodium() -> ctypes.CDLL:
    """libsodium beside pyzmq, or the system's. Raises NarrowsError."""
    beside = Path(zmq.__file__).resolve().parent.parent / "pyzmq.libs"
    names: Sequence[str] = [str(path) for path in sorted(beside.glob("libsodium*"))]
    name = next(iter(names), None) or ctypes.util.find_library("sodium")
    if name is None:
        raise NarrowsError(
            ErrorCode.CONFIG,
            "this attack needs libsodium",
            remedy="install pyzmq from its wheel, or the system's libsodium",
        )
    return ctypes.CDLL(name)
