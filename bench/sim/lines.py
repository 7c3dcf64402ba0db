"""The network between one broker and its learners: delay, loss, order, breaks, frozen readers.

Control is ordered and reliable within a connection and dies with it. Data is ordered per stream;
a message may be lost (a full pipe drops whole messages) or come twice (asked for twice). A learner
whose process is frozen keeps what its pipes hold and loses the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from narrows.bench.sim.world import World
from narrows.proto.flow.budget import wire_bytes

PIPE_MESSAGES: Final = 24
"""Messages that pipes and kernel of a frozen reader hold; what comes after is lost."""


@dataclass
class Weather:
    """How bad the lines of a run are; drawn from its seed."""

    loss: float = 0.0
    """Share of data messages that are lost."""
    twice: float = 0.0
    """Share of data messages that come twice."""
    delay_s: float = 0.02
    """Mean delay of a message, exponentially distributed."""


@dataclass
class Line:
    """The connections of one learner to the broker."""

    world: World
    weather: Weather
    generation: int = 0
    """Counts the connections: what was sent on an older one is lost."""
    frozen_until: float = 0.0
    subscribed: bool = False
    """The learner's subscriptions are at the broker: data goes to it."""
    _dialled: bool = False
    _last: dict[str, float] = field(default_factory=dict)
    _pipe: deque[Callable[[], None]] = field(default_factory=deque)

    def control(self, direction: str, deliver: Callable[[], None]) -> None:
        """In order, never lost within a connection."""
        self._in_order(f"control {direction}", deliver)

    def dial(self, subscribe: Callable[[], None], *, again: bool = False) -> None:
        """The data sockets dial at the first word after a break. Their subscriptions may arrive
        before a Hello that follows them, or after the first Fetch."""
        if again or not self._dialled:
            self._dialled, generation = True, self.generation
            self.world.after(
                self.world.rng.uniform(0.0, 8.0 * self.delay_s),
                lambda: subscribe() if generation == self.generation else None,
            )

    def data(self, stream: str, deliver: Callable[[], None]) -> None:
        """In order within a stream; lost or doubled as the weather has it."""
        rng = self.world.rng
        for _ in range(1 + (rng.random() < self.weather.twice)):
            if rng.random() >= self.weather.loss:
                self._in_order(stream, deliver)

    def break_off(self) -> None:
        """The connections end, and with them all that is on its way."""
        self.generation += 1
        self.subscribed = self._dialled = False
        self._last.clear()
        self._pipe.clear()

    def freeze(self, seconds: float) -> None:
        """The learner's process stands still; its kernel goes on."""
        self.frozen_until = self.world.now + seconds
        self.world.after(seconds, self._thaw)

    @property
    def frozen(self) -> bool:
        return self.world.now < self.frozen_until

    def arrive(self, deliver: Callable[[], None]) -> None:
        """A message has reached the learner's machine."""
        if not self.frozen:
            deliver()
        elif len(self._pipe) < PIPE_MESSAGES:
            self._pipe.append(deliver)

    def _in_order(self, stream: str, deliver: Callable[[], None]) -> None:
        world, generation = self.world, self.generation
        at = max(self._last.get(stream, 0.0), world.now + world.rng.expovariate(1.0) * self.delay_s)
        self._last[stream] = at
        world.after(at - world.now, lambda: deliver() if generation == self.generation else None)

    @property
    def delay_s(self) -> float:
        return self.weather.delay_s

    def _thaw(self) -> None:
        while self._pipe and not self.frozen:
            self._pipe.popleft()()


class Meter:
    """Bytes that left in any stretch of one second, and the largest such sum."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()
        self._sum = 0
        self.busiest_bytes = 0
        self.total_bytes = 0

    def sent(self, frames: tuple[bytes, ...], copies: int, now: float) -> None:
        """Counts one message to `copies` receivers as the line sees it."""
        size = copies * wire_bytes([len(frame) for frame in frames], curve=False)
        self._recent.append((now, size))
        self._sum += size
        self.total_bytes += size
        while self._recent[0][0] <= now - 1.0:
            self._sum -= self._recent.popleft()[1]
        self.busiest_bytes = max(self.busiest_bytes, self._sum)
