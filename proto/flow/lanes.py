"""Which message leaves first: fragments of open rounds, or whole states. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

STATE_FLOOR: Final = 1 / 8
"""Least share of the bytes that states get while some wait, so that a joiner arrives at last."""


class Lane(IntEnum):
    """The order of departure: fragments of open rounds first, then transfers of whole states."""

    FRAGMENT = 0
    STATE = 1


@dataclass
class StateDebt:
    """Whose turn it is where both wait: of the bytes, STATE_FLOOR are states.

    No more than one message is ever owed. A joiner that is cut off would else save up a share for
    the next one, which then had the line to itself.
    """

    owed_bytes: float = 0.0
    _message_bytes: int = 0
    """Size of the largest state message so far."""

    def expect(self, size_bytes: int) -> None:
        """A state message of this size waits."""
        self._message_bytes = max(self._message_bytes, size_bytes)

    def is_due(self, size_bytes: int) -> bool:
        """A state message of this size goes next."""
        return self.owed_bytes >= size_bytes

    def settle(self, lane: Lane, size_bytes: int) -> None:
        """A message of this lane has left."""
        if lane is Lane.STATE:
            self.owed_bytes = max(0.0, self.owed_bytes - size_bytes)
        else:
            owed_bytes = self.owed_bytes + size_bytes * STATE_FLOOR / (1 - STATE_FLOOR)
            self.owed_bytes = min(owed_bytes, float(self._message_bytes))

    def forget(self) -> None:
        """No state waits: what fragments take now is not at its expense."""
        self.owed_bytes = 0.0
