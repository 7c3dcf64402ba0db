"""The broker's door: which keys may connect, and whom each of them makes their holder.

ZeroMQ asks at each handshake (ZAP, RFC 27) and puts the answer's user id on every frame of the
connection. The user id is the public key in Z85, so each of a name's two keys ends on its own. The
holder is looked up for every frame: once a key has left the ring, its frames come from nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.utils.z85

from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import BrokerKey, Keyring

_log = logging.getLogger("narrows.broker")

DOMAIN: Final = b"narrows"
"""ZAP domain of all three sockets."""

INVITATION_LATE_S: Final = 86_400.0
"""Time for which an expired invitation is let in: its holder hears what to do instead. One that is
older may lie in anybody's hands."""

ANSWERS_PER_TURN: Final = 64
"""Handshakes that are answered before the sockets get their turn."""

LOG_EVERY_S: Final = 1.0
"""Time between two log lines about refused handshakes: anybody can cause them."""

_ADDRESS_AT: Final = 3
_CREDENTIALS_AT: Final = 6
"""Frames of a ZAP request before the credentials: version, request id, domain, address, identity,
mechanism."""


@dataclass
class Gate:
    """Answers handshakes from the key ring."""

    socket: zmq.Socket[bytes]
    """The ZAP server. ZeroMQ refuses everybody while it does not answer."""
    key: BrokerKey
    ring: Keyring = field(default_factory=Keyring)
    refused: int = 0
    """Handshakes refused."""
    _holders: dict[str, KeyHolder] = field(default_factory=dict[str, KeyHolder])
    """Holders of the keys that are valid now, by public key."""
    _keys: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """The same keys by their 32 bytes, as a handshake shows them."""
    _current: frozenset[KeyHolder] = frozenset()
    _unlogged: int = 0
    _log_at: float = 0.0
    _newest_refused: tuple[str, str] = ("", "")

    @classmethod
    def bind(
        cls, context: zmq.Context[zmq.Socket[bytes]], key: BrokerKey, ring: Keyring, now: float
    ) -> Gate:
        """Begins to answer; call it before the sockets of the broker bind."""
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("inproc://zeromq.zap.01")
        gate = cls(socket, key)
        gate.admit(ring, now)
        return gate

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a CURVE server. Call it before the socket binds."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.key.current.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without it, a socket whose ZAP server is gone would admit everybody.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def holder(self, key: str) -> KeyHolder | None:
        """Holder of the public key `key`; None: nobody, or nobody any more."""
        return self._holders.get(key)

    def has(self, holder: KeyHolder) -> bool:
        """True if a valid key makes somebody exactly this holder."""
        return holder in self._current

    def admit(self, ring: Keyring, now: float) -> Mapping[str, KeyHolder]:
        """Takes a ring, or the time: keys expire. Returns the keys that are no longer what they
        were, with whom they had. `now` is in seconds since 1970."""
        before = self._holders
        self.ring = ring
        self._holders = {
            each.public: holder
            for each in ring.grants
            if (holder := ring.holder(each.public, now)) is not None
        }
        for each in ring.invitations:
            if now < each.until + INVITATION_LATE_S:
                self._holders[each.public] = KeyHolder(each.holder.name, KeyRole.ENROL)
        self._keys = {zmq.utils.z85.decode(key): key for key in self._holders}
        self._current = frozenset(self._holders.values())
        return {key: was for key, was in before.items() if self._holders.get(key) != was}

    def expires_at(self) -> float:
        """Time at which the next valid key ends, in seconds since 1970; infinite: none does."""
        times = [each.until for each in self.ring.grants if each.public in self._holders]
        times += [
            each.until + INVITATION_LATE_S
            for each in self.ring.invitations
            if each.public in self._holders
        ]
        return min(times, default=float("inf"))

    def answer(self, now: float) -> list[tuple[str, KeyHolder]]:
        """Answers the handshakes that wait, a bounded number. Returns address and holder of those
        that it admits. `now` is monotonic."""
        admitted: list[tuple[str, KeyHolder]] = []
        for _ in range(ANSWERS_PER_TURN):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            reply, holder = self._reply(request)
            self.socket.send_multipart(reply)
            if holder is not None:
                admitted.append((request[_ADDRESS_AT].decode("ascii", "replace"), holder))
        if self._unlogged and now >= self._log_at:
            address, key = self._newest_refused
            _log.warning(
                "%d handshakes with unknown keys refused, the last from %s; if that is a site of"
                " yours: narrows keys allow NAME '%s'",
                self._unlogged,
                address,
                key,
            )
            self._unlogged, self._log_at = 0, now + LOG_EVERY_S
        return admitted

    def close(self) -> None:
        self.socket.close()

    def _reply(self, request: list[bytes]) -> tuple[list[bytes], KeyHolder | None]:
        """ZAP reply, and whom it admits. ZeroMQ itself makes the request, so its form is known."""
        version, request_id, domain, address = request[: _ADDRESS_AT + 1]
        mechanism, credentials = request[5], request[_CREDENTIALS_AT:]
        key = None
        if mechanism == b"CURVE" and domain == DOMAIN and len(credentials) == 1:
            key = self._keys.get(credentials[0])
        if key is not None:
            return [version, request_id, b"200", b"", key.encode(), b""], self._holders[key]
        self.refused += 1
        self._unlogged += 1
        public = zmq.utils.z85.encode(credentials[0]) if len(credentials) == 1 else b"no key"
        self._newest_refused = address.decode("ascii", "replace"), public.decode()
        return [version, request_id, b"400", b"unknown key", b"", b""], None
