"""Keeps the gate at the ring's newest state, and cuts off whose key is gone.

The ring is a file that `narrows keys`, an operator's editor and enrolment change. It is read and
changed on a thread of its own, because another editor may hold its lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from narrows.broker.process.connections import Connections
from narrows.broker.process.gate import Gate
from narrows.broker.process.origin import MessageOrigin
from narrows.broker.syncer import refusal
from narrows.proto import messages as msg
from narrows.proto.errors import ConfigError, ErrorCode, RemoteProtocolError
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import Keyring, edit_ring, read_ring, ring_path
from narrows.proto.shell import guarded
from narrows.proto.units import counted

_log = logging.getLogger("narrows.broker")

LOOK_S: Final = 1.0
"""Time between two looks at the ring's file."""

ANSWER_S: Final = 1.0
"""Time that the answer to an enrolment has to leave before its connection is cut."""

ENROLMENTS_MAX: Final = 16
"""Enrolments that wait for the disk."""

Answer: TypeAlias = Callable[[RemoteProtocolError | None], None]
"""Takes the refusal of an enrolment; None: it is done."""

Later: TypeAlias = Callable[[Callable[[], None]], None]
"""Runs an action on the loop's thread."""


class RingKeeper:
    """The ring of one broker."""

    def __init__(
        self,
        directory: Path,
        gate: Gate,
        connections: Connections,
        later: Later,
        left: Callable[[], None],
    ) -> None:
        """`left` is called when keys have lost their holder."""
        self._directory, self._gate, self._connections = directory, gate, connections
        self._later, self._left = later, left
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._enrolments = 0
        self._look_at = 0.0
        self._expires_at = gate.expires_at()
        self._seen: tuple[int, int, int] | None = None
        self._failure = ""
        """Why the file could not be read the last time, as the log has it."""
        # A lock that is never given back must not keep the process from ending.
        threading.Thread(target=self._serve, name="ring", daemon=True).start()

    def look(self, now: float) -> None:
        """Looks once a second whether the file or a key's validity has changed."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        stamp = _stamp(self._directory)
        if stamp != self._seen:
            self._seen = stamp
            self.reread()
        elif time.time() >= self._expires_at:
            self._admit(self._gate.ring)

    def reread(self) -> None:
        """Has the file read again; safe from signal handlers."""
        self._work.put(self._read)

    def enrol(self, key: str, holder: KeyHolder, public: str, answer: Answer) -> None:
        """Gives the name of `holder`, which has proved `key`, another key in the ring.

        Raises RemoteProtocolError QUOTA if too many wait.
        """
        if self._enrolments >= ENROLMENTS_MAX:
            raise RemoteProtocolError(
                ErrorCode.QUOTA, "too many enrolments wait", remedy="try again in a few seconds"
            )
        self._enrolments += 1

        def work() -> None:
            try:
                ring = _enrol(self._directory, key, holder, public)
            except (ConfigError, OSError) as error:
                refused = _refused(holder, error)
                self._later(lambda: self._enrolled(key, None, lambda: answer(refused)))
                return
            self._later(lambda: self._enrolled(key, ring, lambda: answer(None)))

        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)

    # On the thread of the ring.

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            guarded(work, self._later)()

    def _read(self) -> None:
        try:
            ring = read_ring(self._directory)
        except (ConfigError, OSError) as error:
            failure = str(error)
            self._later(lambda: self._unread(failure))
            return
        self._later(lambda: self._reread(ring))

    # On the loop's thread.

    def _unread(self, failure: str) -> None:
        # The next look tries again: a file system may have erred for a moment.
        self._seen = None
        if failure != self._failure:
            self._failure = failure
            _log.error("the key ring was not read again, the old one stays: %s", failure)

    def _reread(self, ring: Keyring) -> None:
        self._failure = ""
        self._admit(ring)

    def _admit(self, ring: Keyring, spared: str = "") -> None:
        gone = dict(self._gate.admit(ring, time.time()))
        gone.pop(spared, None)
        self._expires_at = self._gate.expires_at()
        if gone:
            cut = self._connections.cut_keys(gone)
            _log.info(
                "%s out of the ring: %s cut", counted(len(gone), "key"), counted(cut, "connection")
            )
            self._left()

    def _enrolled(self, key: str, ring: Keyring | None, answer: Callable[[], None]) -> None:
        self._enrolments -= 1
        if ring is not None:
            self._admit(ring, spared=key)
        answer()
        if self._gate.holder(key) is None:
            self._connections.cut_later(key, time.monotonic() + ANSWER_S)


def enrol(
    keeper: RingKeeper | None,
    origin: MessageOrigin,
    message: msg.Enrol,
    send: Callable[[msg.ControlMessage], None],
    refuse: Callable[[MessageOrigin, RemoteProtocolError, str], None],
) -> None:
    """Enters the key of a site in the ring, or refuses it; `send` answers."""

    def answer(error: RemoteProtocolError | None) -> None:
        if error is not None:
            refuse(origin, error, f"Enrol from {origin.address}")
            send(refusal(error))
        elif origin.holder is not None:
            _log.info("%s has handed over a key", origin.holder.name)
            send(msg.Enrolled(origin.holder.name))

    if keeper is None or origin.holder is None:
        answer(RemoteProtocolError(ErrorCode.INVITATION, "this broker has no keys"))
        return
    try:
        keeper.enrol(origin.key, origin.holder, message.public_key, answer)
    except RemoteProtocolError as error:
        answer(error)


def _enrol(directory: Path, key: str, holder: KeyHolder, public: str) -> Keyring:
    """Changes the ring on disk. Raises ConfigError for an invitation that is none any more."""
    now = time.time()
    with edit_ring(directory) as rings:
        if any(grant.public == public for grant in rings[0].of(holder.name)):
            pass  # The answer was lost, and the site asks again.
        elif holder.role is KeyRole.ENROL:
            rings[0] = rings[0].enrol(key, public, now=now)
        elif any(grant.holder == holder for grant in rings[0].of(holder.name)):
            rings[0] = rings[0].allow(holder, public, now=now)
        else:
            raise ConfigError(f"{holder.name} has no key any more")
        return rings[0]


def _refused(holder: KeyHolder, error: ConfigError | OSError) -> RemoteProtocolError:
    _log.warning("%s cannot enrol a key: %s", holder.name, error)
    if isinstance(error, OSError):
        return RemoteProtocolError(
            ErrorCode.INVITATION, "the broker cannot write its key ring",
            remedy="ask its operator; the invitation stays valid",
        )  # fmt: skip
    return RemoteProtocolError(
        ErrorCode.INVITATION, error.message, expected=error.expected, got=error.got,
        remedy=error.remedy,
    )  # fmt: skip


def _stamp(directory: Path) -> tuple[int, int, int] | None:
    """State of the ring's file as far as it shows a change."""
    try:
        status = ring_path(directory).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
