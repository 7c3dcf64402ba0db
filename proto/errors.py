"""Everything that can go wrong between peers, by code, with the remedy.

An error says what was expected, what came, and what to do next. Its code is what other programs
read: it travels on the wire and stands in logs, so it never changes its meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

SAME_VERSION: Final = "install the same version on both sides"


class ErrorCode(StrEnum):
    """Codes on the wire, in logs and in the status, each with its meaning and the usual remedy.

    PROTOCOL.md lists those that travel; the documents' table of all of them is made from this one.
    """

    meaning: str
    remedy: str
    """In general; "": the message says it. Most errors know more than this."""

    # fmt: off
    # The session is refused. A learner raises, unless the code is in RETRIED.
    PROTOCOL_VERSION = "protocol_version", "another version of the wire", SAME_VERSION
    LAYOUT_DIFFERS = "layout_differs", "not the run's model", "the run's model code, or another run"
    WRONG_RUN = "wrong_run", "the learner has another run", "start the broker with that run's files"
    NAME_IN_USE = "name_in_use", "another process has this name", "stop it, or use another name"
    BAD_NAME = "bad_name", "incarnation and name do not fit", "make the incarnation of the name"
    KEY_NAME = "key_name", "the key speaks for another site", "use a name of the key's site"
    OVER_CAPACITY = "over_capacity", "no place left, or a name restarts too fast", "wait"
    NOT_FINITE_SEED = "not_finite_seed", "NaN or infinity in version 0", "start with finite values"
    # One message or one push is refused; the session goes on.
    BAD_MESSAGE = "bad_message", "a message outside of PROTOCOL.md", SAME_VERSION
    TOO_LARGE = "too_large", "above a bound or the memory", "a smaller model, or the same version"
    BAD_CHUNK = "bad_chunk", "no such chunk, or another codec", SAME_VERSION
    BAD_PAYLOAD = "bad_payload", "a payload that no encoder writes", SAME_VERSION
    NOT_FINITE = "not_finite", "NaN or infinity from a learner", "lower its learning rate"
    MERGE_FAILED = "merge_failed", "a sum was not finite", "see that learner's loss"
    # A data message is damaged: it is dropped, noted, and asked for again.
    BAD_DIGEST = "bad_digest", "damaged bytes, sent again", "if it repeats: memory and network"
    # Local: nothing was sent.
    CONFIG = "config", "a setting, file or flag cannot be used", ""
    ADDRESS_IN_USE = "address_in_use", "another process listens here", "another port with --listen"
    INSECURE = "insecure", "an address off loopback, and no keys", "make keys: `narrows keys new`"
    BROKER_UNREACHABLE = "broker_unreachable", "nobody answers", "is it running? is the port open?"
    KEY_REFUSED = "key_refused", "not admitted, or only one side has keys", ""
    STATE_LOCKED = "state_locked", "another broker has the state directory", "stop that broker"
    STATE_DAMAGED = "state_damaged", "a file is not as it was written", "restore a backup"
    DISK_FULL = "disk_full", "the broker cannot start on a full disk", "make room, start it again"
    UNFINISHED = "unfinished", "ended without the final model", "`narrows export` at the broker"
    RANK_LOST = "rank_lost", "another rank of this learner has ended", "see its log"
    MISUSE = "misuse", "a call that cannot work", ""
    # fmt: on

    def __new__(cls, code: str, meaning: str = "", remedy: str = "") -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        return member

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode:
        """A code that a newer peer sends refuses a message, no session."""
        return cls.BAD_MESSAGE


RETRIED: Final = frozenset({ErrorCode.NAME_IN_USE, ErrorCode.OVER_CAPACITY, ErrorCode.WRONG_RUN})
"""Refusals of a session that end without the learner's doing: it says Hello again. A broker holds
the wrong run when its state directory was not mounted, and the right one after its next start."""

PEER_TEXT_CHARACTERS_MAX: Final = 80
"""Characters that the broker keeps of a peer's own words (the reason of a pause or a Bye, the name
of another run): a Status shows those of 1,024 learners, and must stay below CONTROL_BYTES_MAX."""

GOT_CHARACTERS_MAX: Final = 200
"""Characters of what came, in the error for a peer's message."""

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
        text = f"{code}: {message}"
        details = [
            f"{word} {said}" for word, said in (("expected", expected), ("got", got)) if said
        ]
        if details:
            text += f" ({', '.join(details)})"
        if remedy:
            text += f". {remedy}"
        super().__init__(text)


class LocalProtocolError(NarrowsError):
    """We broke the rules: the caller used an interface wrongly."""


class RemoteProtocolError(NarrowsError):
    """The peer broke the rules. Its message is refused with `code`; nothing else changes."""


def fault(
    what: str,
    expected: str,
    got: object,
    remedy: str = "",
    code: ErrorCode = ErrorCode.BAD_MESSAGE,
) -> RemoteProtocolError:
    """The error for a peer's message that is not as PROTOCOL.md says, or not in its place.

    Without a `remedy` it names the usual one of the code. A peer's bytes may stand in `got`, so its
    text is cut.
    """
    return RemoteProtocolError(
        code,
        what,
        expected=expected,
        got=str(got)[:GOT_CHARACTERS_MAX],
        remedy=remedy or code.remedy,
    )


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


def short(text: str) -> str:
    """A peer's own words as the broker shows them: cut, and printable."""
    return printable(text[:PEER_TEXT_CHARACTERS_MAX])


def printable(text: str) -> str:
    """A peer's text for a log line: cut, control characters escaped.

    Escape sequences of a terminal could hide or forge lines of the log.
    """
    if len(text) > LOG_CHARACTERS_MAX:
        text = text[:LOG_CHARACTERS_MAX] + " ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
