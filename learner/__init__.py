"""The public face of a learner: `from narrows.learner import Learner`.

User code imports `Learner` and the errors that it may raise. `learner`, `loop`, `parameters` and
`weights` face the training loop; `exchange` waits where the loop must. `session` and `fragment`
decide and know no clock. `host` and `boundary` do what they decide, with the parameters of `island`
and `gpu`. `link` and `sockets` reach one broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrows.proto.errors import (
    BrokerUnreachable,
    ConfigError,
    ErrorCode,
    LocalProtocolError,
    NarrowsError,
    Refused,
    Unfinished,
)

if TYPE_CHECKING:
    from narrows.learner.learner import Learner
else:

    def __getattr__(name: str) -> object:
        # torch takes seconds to import and the session does without it: it is loaded on first use.
        if name != "Learner":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from narrows.learner.learner import Learner

        return Learner


__all__ = [
    "BrokerUnreachable",
    "ConfigError",
    "ErrorCode",
    "Learner",
    "LocalProtocolError",
    "NarrowsError",
    "Refused",
    "Unfinished",
]
