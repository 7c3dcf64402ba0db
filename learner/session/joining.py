"""Says when a join has failed: no broker, or data ports that let nothing through. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.errors import BrokerUnreachable
from narrows.proto.limits import RATE_MIN


@dataclass(frozen=True)
class DataConnection:
    """One direction of the data path."""

    port: int
    is_open: bool
    """Every stream has a connection; for the uplink: the broker has subscribed on it."""
    is_due: bool
    """Something waits to be sent, or to be received."""
    progress: int
    """Bytes that got through; it changes with every message."""


@dataclass(frozen=True)
class DataConnections:
    """The data connections of a learner that has a session."""

    uplink: DataConnection
    downlink: DataConnection
    message_bytes: int
    """Size of the largest regular message."""

    def __post_init__(self) -> None:
        assert self.message_bytes > 0, self.message_bytes


@dataclass
class _Direction:
    """Measures for how long nothing has got through. Times are in seconds."""

    name: str
    nothing: str
    """For the error: the thing that does not happen on a connection that stands."""
    since: float
    has_opened: bool = False
    _progress: int = 0

    def look(self, line: DataConnection, now: float) -> None:
        progressed = line.progress != self._progress or (line.is_open and not self.has_opened)
        if progressed or (line.is_open and not line.is_due):
            self.since = now
        # Not each time: a path that loses large packets only has it closed and opened for ever.
        self.has_opened |= line.is_open
        self._progress = line.progress

    def is_stuck(self, now: float, timeout_s: float, message_s: float) -> bool:
        # The first message on a slow line takes long, and shows nothing before its end.
        patience_s = max(timeout_s, message_s) if self.has_opened else timeout_s
        return now - self.since > patience_s

    def described(self, line: DataConnection) -> str:
        return f"{line.port} ({self.name}: {self.nothing if self.has_opened else 'no connection'})"


@dataclass
class JoinWatch:
    """Says when to give up.

    To wait for other learners, with nothing to send or to receive, may last as long as it likes.
    """

    broker: str
    timeout_s: float
    started_at: float
    _heard_at: float = field(init=False)
    _directions: tuple[_Direction, _Direction] = field(init=False)

    def __post_init__(self) -> None:
        self._heard_at = self.started_at
        self._begin(self.started_at)

    def look(self, path: DataConnections | None, now: float) -> BrokerUnreachable | None:
        """Returns the error to raise, None to wait on. `path`: None without a session."""
        assert now >= self._heard_at, (now, self._heard_at)
        if path is None:
            # Without a session nothing can come: both directions get their time anew.
            self._begin(now)
            return self._no_broker() if now - self._heard_at > self.timeout_s else None
        self._heard_at = now
        lines = (path.uplink, path.downlink)
        # Seconds for one message on the slowest line that a budget can name.
        message_s = 8 * path.message_bytes / RATE_MIN
        for direction, line in zip(self._directions, lines, strict=True):
            direction.look(line, now)
        stuck = [
            direction.described(line)
            for direction, line in zip(self._directions, lines, strict=True)
            if direction.is_stuck(now, self.timeout_s, message_s)
        ]
        return self._blocked(stuck) if stuck else None

    def _begin(self, now: float) -> None:
        self._directions = (
            _Direction("uplink", "connected, but nothing is acknowledged", now),
            _Direction("downlink", "connected, but nothing comes", now),
        )

    def _no_broker(self) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"no broker answered at {self.broker} for {self.timeout_s:g} s",
            remedy="is `narrows broker` running, is the address right, does a firewall "
            "block the port? A longer join timeout waits longer",
        )

    def _blocked(self, stuck: list[str]) -> BrokerUnreachable:
        ports = "port" if len(stuck) == 1 else "ports"
        return BrokerUnreachable(
            f"the broker at {self.broker} answers, but nothing gets through on its data {ports} "
            f"{' and '.join(stuck)} for {self.timeout_s:g} s or more",
            remedy="does a firewall or NAT on the way block the port? Is the path's MTU right, "
            "where a connection stands? A longer join timeout waits longer",
        )
