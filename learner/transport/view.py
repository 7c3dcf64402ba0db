"""Shows the background to the training thread: one immutable view, replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.learner.session import DataConnections, SessionView
from narrows.proto.errors import NarrowsError


@dataclass(frozen=True)
class BackgroundView:
    """The only thing of the background that other threads read without its lock."""

    session: SessionView
    data: DataConnections | None = None
    """The data connections while the learner joins; None before they are dialled."""
    error: Exception | None = None
    """The error that ended the exchange; the training thread raises it."""
    obstacle: NarrowsError | None = None
    """The reason why the broker's socket does not let us in, while the learner joins."""

    @property
    def joined(self) -> bool:
        """Every fragment is adopted, and the broker listens to what will be pushed."""
        return self.session.ready and self.data is not None and self.data.uplink.is_open
