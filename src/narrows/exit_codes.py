"""Exit codes of the command, by the error that ended it."""

from __future__ import annotations

from typing import Final

from narrows.proto.errors import BrokerUnreachable, ConfigError, ErrorCode, NarrowsError, Refused

EXIT_CODES: Final = (
    "Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 refused by the peer, 4 broker not "
    "reachable, 130 interrupted."
)
EXIT_FAILURE, EXIT_USAGE, EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2, 3, 4


def exit_code(error: NarrowsError) -> int:
    """Exit code of a command that ended with `error`."""
    if isinstance(error, BrokerUnreachable):
        return EXIT_UNREACHABLE
    if isinstance(error, Refused):
        return EXIT_REFUSED
    if isinstance(error, ConfigError) or error.code in (ErrorCode.CONFIG, ErrorCode.INSECURE):
        return EXIT_USAGE
    return EXIT_FAILURE
