"""Virtual time, workers, and the network: delay, loss, order, breaks, frozen readers.

Control is ordered and reliable within a connection and dies with it. Data is ordered per stream;
a message may be lost (a full pipe drops whole messages) or come twice (asked for twice). A learner
whose process is frozen keeps what its pipes hold and loses the rest.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

from narrows.proto.ports import Done

Span: TypeAlias = tuple[float, float]
"""First second, and the second after the last one."""

PIPE_MESSAGES: Final = 24
"""Messages that pipes and kernel of a frozen reader hold; what comes after is lost."""


class Killed(BaseException):
    """The process dies here. Nothing but the simulator may catch it."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a virtual training thread; a loop catches it and goes on."""


class World:
    """The clock of one simulated run; everything that is drawn comes from its `rng`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` in `delay_s` seconds; events of one moment run in the order of this call."""
        self._count += 1
        heapq.heappush(self._events, (self.now + max(delay_s, 0.0), self._count, what))

    def happens(self, share: float) -> bool:
        """Draws what comes in this share of its chances; 0 draws nothing."""
        return share > 0 and self.rng.random() < share

    def is_within(self, span: Span) -> bool:
        """True while a fault lasts that was drawn for this span."""
        return span[0] <= self.now < span[1]

    def run(self, until: float) -> None:
        """Runs everything that is due up to `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until


class VirtualPool:
    """Workers whose work has two moments: it is done, and the loop hears of it.

    A process that dies between them leaves a round that is durable and that nobody has seen. A pool
    that is not alive does neither. `turn` lets the loop do what is due, `die` ends its process.
    `reach` is called before work is taken, and may raise.
    """

    def __init__(
        self,
        world: World,
        turn: Callable[[float], None],
        die: Callable[[], None],
        *,
        slow: Span = (0.0, 0.0),
        reach: Callable[[], None] = lambda: None,
    ) -> None:
        self._world = world
        self._turn = turn
        self._die = die
        self._slow = slow
        self._reach = reach
        self.alive = True

    def run(self, work: Callable[[], Any], done: Done) -> None:
        world = self._world
        self._reach()
        longest_s = 0.55 if world.is_within(self._slow) else 0.05

        def finish() -> None:
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            world.after(world.rng.uniform(0.0, 0.02), lambda: self._guard(tell, result))

        def tell(result: Any) -> None:
            done(result, world.now)
            self._turn(world.now)

        world.after(world.rng.uniform(0.0, longest_s), lambda: self._guard(finish))

    def spread(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [call(item) for item in items]

    def _guard(self, moment: Callable[..., None], *given: Any) -> None:
        if self.alive:
            try:
                moment(*given)
            except Killed:
                self._die()


class Weather(NamedTuple):
    """How bad the lines of a run are; drawn from its seed."""

    loss: float = 0.0
    """Share of data messages that are lost."""
    twice: float = 0.0
    """Share of data messages that come twice."""
    delay_s: float = 0.02
    """Mean delay of a message, exponentially distributed."""


class Line:
    """The connections of one learner to the broker."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world = world
        self._weather = weather
        self.generation = 0
        """Counts the connections: what was sent on an older one is lost."""
        self.subscribed = False
        """The learner's subscriptions are at the broker: data goes to it."""
        self._dialled = False
        self._frozen_until = 0.0
        self._last: dict[str, float] = {}
        """When the last message of each stream arrives."""
        self._pipe: deque[Callable[[], None]] = deque()

    def data(self, stream: str, deliver: Callable[[], None]) -> None:
        """In order within a stream; lost or doubled as the weather has it."""
        rng = self._world.rng
        for _ in range(1 + (rng.random() < self._weather.twice)):
            if rng.random() >= self._weather.loss:
                self.in_order(stream, deliver)

    def in_order(self, stream: str, deliver: Callable[[], None]) -> None:
        """In order within a stream, never lost within a connection."""
        now = self._world.now
        arrives = now + self._world.rng.expovariate(1.0) * self._weather.delay_s
        self._last[stream] = max(self._last.get(stream, 0.0), arrives)
        self._within_connection(self._last[stream] - now, deliver)

    def dial(self, subscribe: Callable[[], None]) -> None:
        """The data sockets dial at the first word after a break. Their subscriptions may arrive
        before a Hello that follows them, or after the first Fetch."""
        if not self._dialled:
            self._dialled = True
            delay_s = self._world.rng.uniform(0.0, 8.0 * self._weather.delay_s)
            self._within_connection(delay_s, subscribe)

    def _within_connection(self, delay_s: float, what: Callable[[], None]) -> None:
        generation = self.generation

        def arrive() -> None:
            if generation == self.generation:
                what()

        self._world.after(delay_s, arrive)

    def break_off(self) -> None:
        """The connections end, and with them all that is on its way."""
        self.generation += 1
        self.subscribed = False
        self._dialled = False
        self._last.clear()
        self._pipe.clear()

    def freeze(self, seconds: float) -> None:
        """The learner's process stands still; its kernel goes on."""
        self._frozen_until = self._world.now + seconds
        self._world.after(seconds, self._thaw)

    @property
    def frozen(self) -> bool:
        return self._world.now < self._frozen_until

    def arrive(self, deliver: Callable[[], None]) -> None:
        """A message has reached the learner's machine."""
        if not self.frozen:
            deliver()
        elif len(self._pipe) < PIPE_MESSAGES:
            self._pipe.append(deliver)

    def _thaw(self) -> None:
        while self._pipe and not self.frozen:
            self._pipe.popleft()()
