"""Everything that can go wrong between peers, by code, with the remedy.

An error says what was expected, what came, and what to do next. Its code is what other programs
read: it travels on the wire and stands in logs and counters, so it never changes its meaning.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Codes that travel on the wire, in logs and in counters. PROTOCOL.md lists them."""

    # The session is refused; the learner stops unless marked otherwise in RETRYABLE.
    PROTOCOL_VERSION = "protocol_version"
    LAYOUT_MISMATCH = "layout_mismatch"
    UNKNOWN_CODEC = "unknown_codec"
    WRONG_RUN = "wrong_run"
    NAME_IN_USE = "name_in_use"
    BAD_NAME = "bad_name"
    OVER_CAPACITY = "over_capacity"
    SUPERSEDED = "superseded"
    UNKNOWN_SESSION = "unknown_session"
    WRONG_EPOCH = "wrong_epoch"
    KEY_NAME = "key_name"
    KEY_ROLE = "key_role"
    INVITATION = "invitation"
    QUOTA = "quota"
    NOT_FOUNDER = "not_founder"
    # One message or one push is refused; the session goes on.
    BAD_FRAME = "bad_frame"
    BAD_MESSAGE = "bad_message"
    TOO_LARGE = "too_large"
    BAD_CHECKSUM = "bad_checksum"
    BAD_FRAGMENT = "bad_fragment"
    BAD_RANGE = "bad_range"
    BAD_PAYLOAD = "bad_payload"
    NOT_FINITE = "not_finite"
    CHUNK_CONFLICT = "chunk_conflict"
    PUSH_CONFLICT = "push_conflict"
    STALE_BASE = "stale_base"
    FUTURE_BASE = "future_base"
    NO_ROUND = "no_round"
    BAD_TOKENS = "bad_tokens"
    TOO_MANY_PUSHES = "too_many_pushes"
    QUARANTINED = "quarantined"
    OLD_INCARNATION = "old_incarnation"
    # Local: nothing was sent.
    CONFIG = "config"
    PORT_IN_USE = "port_in_use"
    INSECURE = "insecure"
    BROKER_UNREACHABLE = "broker_unreachable"
    KEY_REFUSED = "key_refused"
    STATE_LOCKED = "state_locked"
    STATE_DAMAGED = "state_damaged"
    RUN_SECRET = "run_secret"
    JOURNAL_FAILED = "journal_failed"
    UNFINISHED = "unfinished"
    MISUSE = "misuse"


#: Refusals of one message: it is dropped, the session goes on.
OF_ONE_MESSAGE = frozenset(
    {
        ErrorCode.BAD_FRAME,
        ErrorCode.BAD_MESSAGE,
        ErrorCode.TOO_LARGE,
        ErrorCode.BAD_CHECKSUM,
        ErrorCode.NOT_FOUNDER,
    }
)

#: Refusals of a session after which the learner says Hello again by itself, with back-off.
RETRYABLE = frozenset(
    {
        ErrorCode.UNKNOWN_SESSION,
        ErrorCode.WRONG_EPOCH,
        ErrorCode.OVER_CAPACITY,
        ErrorCode.QUOTA,
    }
)


LOG_CHARACTERS_MAX = 1000
"""Characters of a peer's text in one log line: a peer must not fill the disk with one message."""


class NarrowsError(Exception):
    """Base of every error that a user can see.

    `expected` and `got` are short texts; `remedy` tells the reader what to do next.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, expected: str = "", got: str = "", remedy: str = ""
    ) -> None:
        self.code = code
        self.message = message
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(describe(code, message, expected=expected, got=got, remedy=remedy))

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes of the benches hand their errors over; Exception would call __init__
        # with the text alone.
        return _rebuilt, (type(self), str(self)), self.__dict__


def _rebuilt(kind: type[NarrowsError], text: str) -> NarrowsError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


class LocalProtocolError(NarrowsError):
    """We broke the rules: the caller used an interface wrongly."""


class RemoteProtocolError(NarrowsError):
    """The peer broke the rules. Its message is refused with `code`; nothing else changes."""


class Refused(NarrowsError):
    """The broker refused this learner for good (wrong key, layout, version, name, ...)."""


class ConfigError(NarrowsError):
    """A configuration file, flag or value cannot be used."""

    def __init__(
        self, message: str, *, expected: str = "", got: str = "", remedy: str = ""
    ) -> None:
        super().__init__(ErrorCode.CONFIG, message, expected=expected, got=got, remedy=remedy)


class BrokerUnreachable(NarrowsError):
    """No broker answered within the time that the caller allowed."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(ErrorCode.BROKER_UNREACHABLE, message, remedy=remedy)


class Unfinished(NarrowsError):
    """The run is over for this learner, and its parameters are not the run's final model."""

    def __init__(self, message: str, *, got: str) -> None:
        super().__init__(
            ErrorCode.UNFINISHED,
            message,
            expected="the run's final model",
            got=got,
            remedy="when the run has ended, the broker has it: `narrows export`. A file that is"
            " saved from here is marked as not final",
        )


def describe(
    code: str, message: str, *, expected: str = "", got: str = "", remedy: str = ""
) -> str:
    """One line: `code: message (expected ..., got ...). remedy`."""
    detail = ", ".join(
        part
        for part in (f"expected {expected}" if expected else "", f"got {got}" if got else "")
        if part
    )
    text = f"{code}: {message}" + (f" ({detail})" if detail else "")
    return f"{text}. {remedy}" if remedy else text


def printable(text: str) -> str:
    """A peer's text for a log line: cut, control characters escaped.

    Escape sequences of a terminal could hide or forge lines of the log.
    """
    cut = text if len(text) <= LOG_CHARACTERS_MAX else text[:LOG_CHARACTERS_MAX] + " ..."
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    assert line.isprintable(), "a peer could forge lines of the log"
    return line
