"""Causes that the log names once in a while, because a peer could repeat them for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

NAMED_MAX: Final = 1024
"""Causes that are remembered. A flood of new ones is not named beyond it."""

NAMED_S: Final = 3600.0
"""Time after which a cause is forgotten, and named again if it is still there."""


@dataclass
class Named:
    """Causes with the time at which each was named."""

    _at: dict[str, float] = field(default_factory=dict[str, float])
    """The one that was named longest ago comes first."""

    def is_due(self, about: str, now: float) -> bool:
        """True if `about` is to be named now; then it has been."""
        while self._at and now >= next(iter(self._at.values())) + NAMED_S:
            del self._at[next(iter(self._at))]
        if about in self._at or len(self._at) >= NAMED_MAX:
            return False
        self._at[about] = now
        return True
