"""An allowance of a peer: a number of things at once, and from then on a number per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Quota:
    """Counts what is used, and forgets it with time. Times are the caller's."""

    _at: float
    """When it was asked last; at first the present time."""
    used: float = 0.0
    left_out: int = 0
    """Times that it was refused since it was last granted."""

    def takes(self, at_once: float, per_s: float, now: float) -> bool:
        """Takes one. False: it is used up."""
        self.used = max(0.0, self.used - per_s * (now - self._at))
        self._at = now
        if self.used >= at_once:
            self.left_out += 1
            return False
        self.used += 1
        return True
