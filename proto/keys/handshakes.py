"""Follows the handshakes of one connection: their outcome, the remedy, the broker's key to try.

A socket that is refused for its key never dials again, and says so only to its monitor. Owners of
sockets hand the monitor's frames over here.
"""

from __future__ import annotations

import math
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from narrows.proto.errors import BrokerUnreachable, ErrorCode, NarrowsError, Refused
from narrows.proto.keys.site_key import SiteKey
from narrows.proto.timing import RECONNECT_MAX_S, RECONNECT_S

BROKEN_S: Final = 3.0
"""Handshakes that are broken off for so long are told: a broker that stops breaks off a few."""
SILENT_S: Final = 5.0
"""A handshake that takes so long is told. It takes two round trips."""
STALE_S: Final = 90.0
"""A failure this old says nothing about the broker of now: new sockets come at least so often."""
SAY_S: Final = 60.0
"""The same line is repeated this often."""

_CONNECTED, _FAILED, _DONE, _FAILED_PROTOCOL, _FAILED_AUTH = 0x1, 0x800, 0x1000, 0x2000, 0x4000
MONITORED: Final = _CONNECTED | _FAILED | _DONE | _FAILED_PROTOCOL | _FAILED_AUTH
"""Events of a socket's monitor that tell of handshakes, as libzmq numbers them."""
_MECHANISM_MISMATCH: Final = 0x11000002


class Handshake(StrEnum):
    """State of a CURVE handshake, as the side that dials sees it."""

    ADMITTED = "admitted"
    KEY_REFUSED = "key refused"
    """The broker does not know this side's key."""
    OTHER_MECHANISM = "other mechanism"
    """One side has keys, the other one has none."""
    NOT_UNDERSTOOD = "not understood"
    BROKEN_OFF = "broken off"
    """The other side has closed the connection. So does a broker that has another key."""
    SILENT = "silent"

    @property
    def gives_up(self) -> bool:
        """True if the socket never dials again: it takes a new one."""
        return self in (
            Handshake.KEY_REFUSED,
            Handshake.OTHER_MECHANISM,
            Handshake.NOT_UNDERSTOOD,
        )


_OUTCOMES: Final[Mapping[int, Handshake]] = {
    _DONE: Handshake.ADMITTED,
    _FAILED: Handshake.BROKEN_OFF,
    _FAILED_PROTOCOL: Handshake.NOT_UNDERSTOOD,
    _FAILED_AUTH: Handshake.KEY_REFUSED,
}


def outcome_of(frame: bytes) -> Handshake | None:
    """The outcome in the first frame of a monitor's message, None: a handshake begins."""
    event, value = struct.unpack_from("=HI", frame)
    if event == _FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
        return Handshake.OTHER_MECHANISM
    return _OUTCOMES.get(event)


def curve_options(key: SiteKey, server: str) -> dict[str, bytes]:
    """Socket options, by name, of a connection with this key to the broker of key `server`."""
    return {
        "CURVE_SERVERKEY": server.encode(),
        "CURVE_PUBLICKEY": key.pair.public.encode(),
        "CURVE_SECRETKEY": key.pair.secret.encode(),
    }


@dataclass
class Handshakes:
    """The handshakes with one broker. Times are in seconds of any clock."""

    broker: str
    """Address of the broker, for the user."""
    key: SiteKey | None
    outcome: Handshake | None = None
    """The newest outcome; None before the first."""
    reopen_at: float = math.inf
    """Time for a new socket, with the next key of the broker. The owner disconnects the old one: as
    its connections stand before they are broken off, it would dial ten times a second for ever."""
    _server: int = 0
    _failures: int = 0
    """Sockets given up since the last handshake that succeeded."""
    _began_at: float = math.inf
    """Time at which the handshake began that is under way; inf: none is."""
    _failed_from: float = math.inf
    _failed_at: float = -math.inf
    """Times of the first and of the newest failure since the last success."""
    _said: tuple[str, float] = "", -math.inf

    @property
    def options(self) -> dict[str, bytes]:
        """Socket options of the next connection: none without a key."""
        return curve_options(self.key, self._server_key) if self.key else {}

    @property
    def _server_key(self) -> str:
        assert self.key is not None
        return self.key.servers[self._server % len(self.key.servers)]

    def opened(self) -> None:
        """A new socket is there, which has not dialled yet."""
        self._began_at = self.reopen_at = math.inf

    def renew(self, key: SiteKey) -> bool:
        """Takes over what stands in the key file now; True if that is something else."""
        if key == self.key:
            return False
        self.key, self._server, self._failures, self.outcome = key, 0, 0, None
        return True

    def take(self, frame: bytes, now: float) -> Handshake | None:
        """Reads a frame of the monitor, and returns its outcome; None: a handshake begins."""
        outcome = outcome_of(frame)
        if outcome is None:
            self._began_at = now
            return None
        self._began_at = math.inf
        if outcome is Handshake.ADMITTED:
            self.outcome, self._failed_from, self._failures = outcome, math.inf, 0
            self._said = "", -math.inf
            return outcome
        self._failed_from, self._failed_at = min(self._failed_from, now), now
        # Both sides notice that only one has keys. Mostly the other one closes first, and says not
        # why: once it was noticed here, it stays noticed.
        if outcome is not Handshake.BROKEN_OFF or self.outcome is not Handshake.OTHER_MECHANISM:
            self.outcome = outcome
        if outcome is Handshake.BROKEN_OFF and self._is_enough(now):
            self._failures += 1
            self._server += 1
            self.reopen_at = now + min(RECONNECT_S * 2.0**self._failures, RECONNECT_MAX_S)
        return outcome

    def _is_enough(self, now: float) -> bool:
        """True if the socket that has just failed should fail no more."""
        if self.key is None or self.reopen_at < math.inf:
            return False
        return len(self.key.servers) > 1 or now >= self._failed_from + BROKEN_S

    def error(self, now: float) -> NarrowsError | None:
        """The obstacle and its remedy, None if there is none that a user should hear of."""
        outcome = self.outcome
        if self._began_at + SILENT_S <= now:
            outcome = Handshake.SILENT
        elif outcome is None or outcome is Handshake.ADMITTED or now > self._failed_at + STALE_S:
            return None
        elif outcome is Handshake.BROKEN_OFF and now < self._failed_from + BROKEN_S:
            return None
        return obstacle(outcome, self.broker, self.key)

    def line(self, now: float) -> str:
        """A line for the log when one is due, else ""."""
        error = self.error(now)
        text = str(error) if error else ""
        before, said_at = self._said
        if not text or (text == before and now < said_at + SAY_S):
            return ""
        self._said = text, now
        return text


def obstacle(outcome: Handshake, broker: str, key: SiteKey | None) -> NarrowsError:
    """A failed handshake as an error that names the command to type."""
    if outcome is Handshake.KEY_REFUSED and key is not None:
        return Refused(
            ErrorCode.KEY_REFUSED,
            f"the broker at {broker} does not admit the key of {key.name}",
            remedy=f"It never did, or it was revoked. Its operator types: "
            f"{allow_command(key.name, key.pair.public)}",
        )
    if outcome is Handshake.OTHER_MECHANISM:
        return _one_has_keys(broker, key)
    if outcome is Handshake.SILENT:
        return BrokerUnreachable(
            f"{broker} takes connections, but does not answer the handshake",
            remedy="is that a broker's port? Does its machine answer otherwise?",
        )
    if outcome is Handshake.BROKEN_OFF and key is not None:
        return BrokerUnreachable(
            f"{broker} breaks handshakes off: it is no broker with the key "
            f"{' or '.join(key.servers)}",
            remedy="compare `narrows keys show DIRECTORY` at the broker, and whether it runs with "
            "--keys. Only if its operator has changed the key, type here: narrows keys trust FILE "
            "KEY",
        )
    return BrokerUnreachable(
        f"{broker} breaks handshakes off",
        remedy="is that a broker's port? Does the broker want a key (--key FILE, NARROWS_KEY)?",
    )


def _one_has_keys(broker: str, key: SiteKey | None) -> NarrowsError:
    if key is None:
        return Refused(
            ErrorCode.KEY_REFUSED,
            f"the broker at {broker} admits only those that have a key",
            remedy=f"its operator types `narrows keys invite NAME --address {broker}`. Then type "
            "here `narrows keys accept INVITATION --to FILE`, and join with --key FILE",
        )
    return Refused(
        ErrorCode.KEY_REFUSED,
        f"what answers at {broker} has no keys, so nobody knows who it is",
        remedy="its operator types `narrows broker --keys DIRECTORY`, for a new run with "
        "`--founder NAME`; or join without a key (--key, NARROWS_KEY)",
    )


def allow_command(name: str, public: str) -> str:
    """The command with which an operator admits a key; quoted, since keys have odd characters."""
    return f"narrows keys allow {name} {shlex.quote(public)}"
