"""The warnings of a learner that hears its broker not at all, or late; each is logged once."""

from __future__ import annotations

import math
from typing import Final

from narrows.learner.effects import Note

LATE_S: Final = 10.0
"""Copies that stay behind the heads for so long, while Beats come, are warned of."""


class Outage:
    """Warns of each reason of an outage once, and says when the outage is over."""

    def __init__(self) -> None:
        self._warned_of: set[str] = set()
        """The warnings of the present outage."""

    def goes_on(self, reason: object, *, paused_after_s: float | None) -> list[Note]:
        """Nobody answers; with `paused_after_s` training has paused after so many seconds."""
        event = "offline"
        text = f"training goes on without the broker: {reason}"
        if paused_after_s is not None:
            event = "paused"
            text = f"training pauses after {paused_after_s:.0f} s without the broker: {reason}"
        if text in self._warned_of:
            return []
        self._warned_of.add(text)
        return [Note(event, text)]

    def ends(self, epoch: str) -> list[Note]:
        """The broker has admitted this learner."""
        if not self._warned_of:
            return []
        self._warned_of.clear()
        return [Note("online", f"the broker is back, epoch {epoch}", warning=False)]


class Lateness:
    """Warns of copies that stay behind the heads, once until they are abreast again."""

    def __init__(self) -> None:
        self._abreast_at = math.inf
        """When the copies were abreast last; infinite: there is nothing to warn of."""

    def look(self, *, is_behind: bool, now: float) -> list[Note]:
        """A Beat has told the heads."""
        if not is_behind:
            self._abreast_at = now
        elif now >= self._abreast_at + LATE_S:
            self._abreast_at = math.inf
            text = "the downlink, or the relay, is late: work counts on the heads alone"
            return [Note("late", f"for {LATE_S:g} s all copies have been behind the heads: {text}")]
        return []
