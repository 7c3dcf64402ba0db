"""Everything that can go wrong between peers, by code, with the remedy.

An error says what was expected, what came, and what to do next. Its code is what other programs
read: it travels on the wire and stands in logs, so it never changes its meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ErrorCode(StrEnum):
    """Codes on the wire, in logs and in the status. PROTOCOL.md lists those that travel."""

    # The session is refused. A learner raises, unless the code is in RETRIED.
    PROTOCOL_VERSION = "protocol_version"
    LAYOUT_DIFFERS = "layout_differs"
    WRONG_RUN = "wrong_run"
    NAME_IN_USE = "name_in_use"
    BAD_NAME = "bad_name"
    KEY_NAME = "key_name"
    OVER_CAPACITY = "over_capacity"
    NOT_FINITE_SEED = "not_finite_seed"
    # One message or one push is refused; the session goes on.
    BAD_MESSAGE = "bad_message"
    TOO_LARGE = "too_large"
    BAD_CHUNK = "bad_chunk"
    BAD_PAYLOAD = "bad_payload"
    NOT_FINITE = "not_finite"
    MERGE_FAILED = "merge_failed"
    # A data message is damaged: it is dropped, noted, and asked for again.
    BAD_DIGEST = "bad_digest"
    # Local: nothing was sent.
    CONFIG = "config"
    ADDRESS_IN_USE = "address_in_use"
    INSECURE = "insecure"
    BROKER_UNREACHABLE = "broker_unreachable"
    KEY_REFUSED = "key_refused"
    STATE_LOCKED = "state_locked"
    STATE_DAMAGED = "state_damaged"
    DISK_FULL = "disk_full"
    UNFINISHED = "unfinished"
    MISUSE = "misuse"

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode:
        """A code that a newer peer sends refuses a message, no session."""
        return cls.BAD_MESSAGE


RETRIED: Final = frozenset({ErrorCode.NAME_IN_USE, ErrorCode.OVER_CAPACITY})
"""Refusals of a session that end by themselves: the learner says Hello again."""

LOG_CHARACTERS_MAX: Final = 1000
"""Characters of a peer's text in one log line: a peer must not fill the disk with one message."""


class NarrowsError(Exception):
    """Base of every error that a user can see.

    `expected` and `got` are short texts; `remedy` tells the reader what to do next. As a text it is
    one line: `code: message (expected ..., got ...). remedy`.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, expected: str = "", got: str = "", remedy: str = ""
    ) -> None:
        self.code = code
        self.message = message
        self.expected = expected
        self.got = got
        self.remedy = remedy
        details = [f"expected {expected}"] if expected else []
        details += [f"got {got}"] if got else []
        text = f"{code}: {message}" + (f" ({', '.join(details)})" if details else "")
        super().__init__(f"{text}. {remedy}" if remedy else text)


class LocalProtocolError(NarrowsError):
    """We broke the rules: the caller used an interface wrongly."""


class RemoteProtocolError(NarrowsError):
    """The peer broke the rules. Its message is refused with `code`; nothing else changes."""


class Refused(NarrowsError):
    """The broker refused this learner for good: its key, layout, version or name."""


class StateError(NarrowsError):
    """The state directory cannot be used: locked, damaged, or its database failed."""


class BrokerUnreachable(NarrowsError):
    """No broker answered within the time that the caller allowed."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(ErrorCode.BROKER_UNREACHABLE, message, remedy=remedy)


class ConfigError(NarrowsError):
    """A configuration file, flag or value cannot be used."""

    def __init__(
        self, message: str, *, expected: str = "", got: str = "", remedy: str = ""
    ) -> None:
        super().__init__(ErrorCode.CONFIG, message, expected=expected, got=got, remedy=remedy)


class Unfinished(NarrowsError):
    """The run is over for this learner, and its parameters are not the run's final model."""

    def __init__(self, message: str, *, got: str) -> None:
        super().__init__(
            ErrorCode.UNFINISHED,
            message,
            expected="the run's final model",
            got=got,
            remedy="when the run has ended, the broker has it: `narrows export`",
        )


def exit_code(error: Exception) -> int:
    """Exit code of a command: 1 failure, 2 usage, 3 refused by the peer, 4 broker not reachable."""
    if isinstance(error, BrokerUnreachable):
        return 4
    if isinstance(error, Refused):
        return 3
    usage = (ErrorCode.CONFIG, ErrorCode.INSECURE)
    return 2 if isinstance(error, NarrowsError) and error.code in usage else 1


def printable(text: str) -> str:
    """A peer's text for a log line: cut, control characters escaped.

    Escape sequences of a terminal could hide or forge lines of the log.
    """
    cut = text if len(text) <= LOG_CHARACTERS_MAX else text[:LOG_CHARACTERS_MAX] + " ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
