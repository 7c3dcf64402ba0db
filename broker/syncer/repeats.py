"""Lines of the log and the journal that peers cause: few of a kind, the others counted. [pure]

A peer must not fill the disk. So lines about one peer of one kind are limited, and all such lines
together: a peer without a key may come under ever new names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LINES: Final = 10
"""Lines of one kind about one peer that pass at once."""

LINE_EVERY_S: Final = 10.0
"""Time in which one more passes."""

BYTES: Final = 64 << 10
"""Bytes of such lines that pass at once: hundreds of learners may come back together."""

BYTES_PER_S: Final = 3000.0
"""Bytes of such lines per second after that; the log and the journal have as many each."""

KINDS_MAX: Final = 4096
"""Kinds that are remembered; beyond it the one that was seen longest ago is forgotten."""


@dataclass
class _Kind:
    lines: float
    at: float
    suppressed: int = 0


@dataclass
class Repeats:
    """Says which lines pass."""

    suppressed: int = 0
    """Lines left out since the start."""
    _kinds: dict[str, _Kind] = field(default_factory=dict[str, _Kind])
    _bytes: float = BYTES
    _at: float = 0.0

    def let_pass(self, about: str, size_bytes: int, now: float) -> int | None:
        """Lines about the same that were left out since the last one; None: leave it out too."""
        assert now >= self._at, "time does not run backwards"
        self._bytes = min(BYTES, self._bytes + BYTES_PER_S * (now - self._at))
        self._at = now
        kind = self._kinds.pop(about, None) or _Kind(LINES, now)
        self._kinds[about] = kind
        if len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        kind.lines = min(LINES, kind.lines + (now - kind.at) / LINE_EVERY_S)
        kind.at = now
        if kind.lines < 1.0 or self._bytes < size_bytes:
            kind.suppressed += 1
            self.suppressed += 1
            return None
        kind.lines -= 1.0
        self._bytes -= size_bytes
        before, kind.suppressed = kind.suppressed, 0
        return before


def with_count(text: str, suppressed: int) -> str:
    """The line, and how many like it were left out before it."""
    return f"{text} (and {suppressed} more like it before)" if suppressed else text
