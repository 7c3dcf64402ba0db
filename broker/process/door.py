"""The way in: the address that a process listens on, and the keys that are admitted there.

Two threads ask the door: ZeroMQ's authenticator at each handshake, the broker's loop for each
frame. The loop replaces the allow list as a whole and never changes one, so that both may read it
without a lock. A condition lets a handshake wait for the loop's next look at the file.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import zmq

from narrows.broker.syncer.status import REFUSED_S
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, printable
from narrows.proto.flow import Quota
from narrows.proto.keys import AllowList
from narrows.proto.messages import INCARNATION_PATTERN
from narrows.proto.timing import (
    CONTROLS_AT_ONCE,
    CONTROLS_PER_S,
    HANDSHAKES_AT_ONCE,
    HANDSHAKES_PER_S,
    REFUSALS_MAX,
    REFUSALS_S,
)
from narrows.proto.units import counted
from narrows.proto.wire import name_of, speaks_for

ADMITTED_S: Final = 2.0
"""Seconds that a handshake with an unknown key waits for the next look at most."""

TOLD_MAX: Final = 10
"""Keys that are not admitted and that the log names in REFUSALS_S."""

_TOPIC: Final = re.compile(r"p/[0-9]{2}|r/(" + INCARNATION_PATTERN[2:-2] + r")/[0-9]{2}")

_log: Final = logging.getLogger("narrows.broker")


def listening_address(text: str, *, has_keys: bool, insecure: bool, flag: str) -> Address:
    """The address to listen on. Raises ConfigError, and INSECURE for one beyond loopback without
    keys; `flag` is the one that gives them."""
    address = parse_address(text, listen=True)
    if not (address.is_loopback or has_keys or insecure):
        raise NarrowsError(
            ErrorCode.INSECURE,
            "anybody who reaches this address could read the model, or change it",
            expected=f"{flag}, or a loopback address",
            got=text,
            remedy="`narrows keys new` makes keys, `narrows keys allow` admits sites; or set "
            "`insecure` on a network that you trust",
        )
    return address


def bind(socket: zmq.Socket[bytes], address: Address, until: float = 0.0) -> int:
    """Binds, if need be again and again `until`; the port, which port 0 leaves to the system.

    Raises ADDRESS_IN_USE, and CONFIG for what is no address of this machine.
    """
    while True:
        try:
            socket.bind(f"tcp://{address.host}:{address.port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise _cannot_listen(address, error) from error
            time.sleep(0.002)
        else:
            endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return int(endpoint.rstrip("\0").rpartition(":")[2])


def _cannot_listen(address: Address, error: zmq.ZMQError) -> NarrowsError:
    what = f"cannot listen on {address}"
    if error.errno == errno.EADDRINUSE:
        return NarrowsError(
            ErrorCode.ADDRESS_IN_USE,
            what,
            expected="a free port; a broker takes three",
            got=str(error),
            remedy="is a broker running already? Choose another port with --listen",
        )
    does_not_resolve = error.errno == errno.ENODEV
    return NarrowsError(
        ErrorCode.CONFIG,
        what,
        expected="an address of this machine, or *",
        got=f"{address.host}, which does not resolve" if does_not_resolve else str(error),
        remedy="choose another address with --listen, and a port from 1024 on",
    )


class Door:
    """The allow list of a broker's key folder, as it stands now."""

    def __init__(self, folder: Path, now: float) -> None:
        """Raises ConfigError if the allow list cannot be read."""
        self._folder = folder
        self._allowed = AllowList.read(folder)
        self._stamp = self._stat()
        self._failed = ""
        """Why the list could not be read at the last look; "": it was, or has not changed."""
        self.lacks_descriptor = False
        """It could not be read because the process may open no more files."""
        self._looked = threading.Condition()
        self._out: dict[str, float] = {}
        """Keys that are kept out, each with the time at which it may come back."""
        self._refused: dict[str, tuple[float, int]] = {}
        """Per key: since when its refused messages are counted, and their number."""
        self._controls: dict[tuple[str, bool], Quota] = {}
        """Quotas for control messages by key; with True that of the key's learners."""
        self._handshakes: dict[str, Quota] = {}
        """Quotas for handshakes by key."""
        self._learners = Counter[str]()
        """Learners of a key's site that were here when its quota was last used up."""
        self._told: dict[str, float] = {}
        """Keys that are not admitted and stand in the log already, each with the time of that;
        emptied every REFUSALS_S."""
        self._unknown: dict[str, float] = {}
        """The newest of them, for a Status."""
        self._told_at = now

    def admits(self, key: str) -> bool:
        """Whether a handshake with this public key (Z85) succeeds."""
        with self._looked:
            # The list has changed and the loop has not looked: the key may have been admitted now.
            self._looked.wait_for(
                lambda: self._allowed.keys.get(key) or self._stat() == self._stamp, ADMITTED_S
            )
        if self._allowed.keys.get(key) is None:
            self._tell_unknown(key)
        if self.site(key) is None:
            return False
        now = time.monotonic()
        quota = self._handshakes.setdefault(key, Quota(now))
        if quota.takes(HANDSHAKES_AT_ONCE, HANDSHAKES_PER_S, now):
            return True
        _log.warning("a handshake of %s was refused: its key makes too many", self.site(key))
        return False

    def _tell_unknown(self, key: str) -> None:
        # A stranger makes as many keys as he likes: neither memory nor log may grow with them.
        if key in self._told or len(self._told) >= TOLD_MAX:
            return
        self._told[key] = time.monotonic()
        newest = list((self._unknown | self._told).items())[-TOLD_MAX:]
        self._unknown = dict(newest)  # As a whole: the loop reads it.
        _log.warning(
            "a key that is not on the allow list was refused. If you know whose it is: "
            "narrows keys allow 'narrows-key NAME %s' --keys %s",
            key,
            self._folder,
        )

    def unknown(self, now: float) -> dict[str, float]:
        """Keys (Z85) that were refused in the last REFUSED_S and are not admitted, each with the
        time of that."""
        allowed = self._allowed.keys
        return {
            key: at
            for key, at in self._unknown.items()
            if key not in allowed and now < at + REFUSED_S
        }

    def hears(
        self, key: str, learners: Callable[[], Collection[str]], now: float, *, is_learner: bool
    ) -> bool:
        """Whether a control message is within the quota of its key. The quota grows with the
        learners of the key's site. `learners` names all that are here; it is called when the quota
        is used up, because that is rare and the list is long.

        What its learners say has a quota of its own (`is_learner`): however large the answers to
        somebody who watches the run become, no announcement of a push is dropped for them.
        """
        quota = self._controls.setdefault((key, is_learner), Quota(now))
        site = self.site(key) or ""
        for _ in range(2):
            per_s = CONTROLS_PER_S * (1 + self._learners[key])
            if quota.takes(CONTROLS_AT_ONCE + per_s, per_s, now):
                return True
            self._learners[key] = sum(speaks_for(site, name) for name in learners())
        return False

    def answered(self, key: str, size_bytes: int, *, is_learner: bool) -> None:
        """A control message was answered: each whole KiB of that counts as one more."""
        self._controls[key, is_learner].used += size_bytes >> 10

    def site(self, key: str) -> str | None:
        """For whom the frames of a connection speak; None: nobody, do not read them."""
        return None if key in self._out else self._allowed.keys.get(key)

    def strike(self, key: str, now: float) -> None:
        """A message was refused. With REFUSALS_MAX of them in REFUSALS_S the key is kept out for
        as long, and its connections are not read."""
        since, count = self._refused.get(key, (now, 0))
        if now >= since + REFUSALS_S:
            since = now
            count = 0
        self._refused[key] = (since, count + 1)
        if count + 1 >= REFUSALS_MAX:
            self.keep_out(key, f"{REFUSALS_MAX} messages were refused", now)

    def keep_out(self, key: str, why: str, now: float) -> None:
        """Lets nothing of this key in for REFUSALS_S."""
        self._refused.pop(key, None)
        if key not in self._out:
            site = self._allowed.keys.get(key)
            _log.warning(
                "the key of %s is kept out for %.0f s: %s. To end it: narrows keys revoke %s",
                site,
                REFUSALS_S,
                why,
                site,
            )
        self._out = {**self._out, key: now + REFUSALS_S}

    def may_hear(self, key: str, topic: bytes) -> bool:
        """Publications are for everybody; what a learner asked for is for its own site."""
        match = _TOPIC.fullmatch(topic.decode("ascii", "replace"))
        site = self.site(key)
        if match is None or site is None:
            return False
        return match[1] is None or speaks_for(site, name_of(match[1]))

    def look(self, now: float) -> tuple[set[str], list[str]]:
        """Reads the allow list again if it has changed, or was not read. A list that cannot be read
        leaves the old one in force. Returns keys whose connections must end, and sites that have
        none left."""
        if now >= self._told_at + REFUSALS_S:
            self._told = {}
            self._told_at = now
        self._out = {key: until for key, until in self._out.items() if now < until}
        before = self._allowed
        with self._looked:
            self._looked.notify_all()
            stamp = self._stamp
            failed = self._failed
            self._stamp = self._stat()
            if self._stamp == stamp and not failed:
                return set(), []
            self._failed = ""
            self.lacks_descriptor = False
            try:
                self._allowed = AllowList.read(self._folder)
            except ConfigError as error:
                # It is read again at each look until it was read: a key may have been revoked.
                self._failed = printable(str(error))
                self.lacks_descriptor = getattr(error.__cause__, "errno", 0) == errno.EMFILE
                if self._stamp != stamp or self._failed != failed:
                    _log.error("the allow list stays as it was: %s", self._failed)
                return set(), []
        now_allowed = self._allowed.keys
        gone = {key: site for key, site in before.keys.items() if now_allowed.get(key) != site}
        cut_off = f"; cut off: {', '.join(sorted(gone.values()))}" if gone else ""
        keys = counted(len(now_allowed), "key")
        _log.info("the allow list was read again: %s%s", keys, cut_off)
        sites_without_key = set(gone.values()) - set(now_allowed.values())
        return set(gone), sorted(sites_without_key)

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = AllowList.path(self._folder).stat()
        except OSError:
            return 0, 0, 0
        return found.st_mtime_ns, found.st_size, found.st_ino
