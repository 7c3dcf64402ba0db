"""A broker's Refuse as the error that a user sees."""

from __future__ import annotations

from narrows.proto.errors import ErrorCode, Refused
from narrows.proto.messages import Refuse


def error_of(refuse: Refuse) -> Refused:
    """The refusal of a session, or of a request, as an error."""
    known = refuse.code in set(ErrorCode)
    return Refused(
        # A newer broker may send a code that this side does not know.
        ErrorCode(refuse.code) if known else ErrorCode.BAD_MESSAGE,
        refuse.message,
        expected=refuse.expected,
        got=refuse.got,
        remedy=refuse.remedy,
    )
