"""Names on the command line, such as systems or groups, checked against those that exist."""

from __future__ import annotations

from collections.abc import Sequence

from narrows.proto.config import nearest
from narrows.proto.errors import ConfigError


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for a name that is not known. `what`: a singular, such as system."""
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no such {what}",
                expected=" | ".join(known),
                got=repr(name),
                remedy=nearest(name, known),
            )
