"""Virtual time: a clock, a queue of events, and workers whose results are heard of later."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from narrows.proto.ports import Done


class Killed(BaseException):
    """The process dies here. Nothing but the simulator may catch it."""


class World:
    """The clock of one simulated run; everything that is drawn comes from its `rng`."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` in `delay_s` seconds; events of one moment run in the order of this call."""
        self._count += 1
        heapq.heappush(self._events, (self.now + max(delay_s, 0.0), self._count, what))

    def run(self, until: float) -> None:
        """Runs everything that is due up to `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until


class VirtualPool:
    """Workers whose work has two moments: it is done, and the loop hears of it.

    A process that dies between them leaves a round that is durable and that nobody has seen. A pool
    that is not alive does neither.
    """

    def __init__(
        self, world: World, turn: Callable[[float], None], die: Callable[[], None]
    ) -> None:
        self._world, self._turn, self._die = world, turn, die
        self.alive = True
        self.slow_s = 0.0
        """Extra seconds that work may take: a slow disk, a busy machine."""

    def run(self, work: Callable[[], Any], done: Done) -> None:
        rng = self._world.rng
        self._world.after(rng.uniform(0.0, 0.05 + self.slow_s), lambda: self._finish(work, done))

    def _finish(self, work: Callable[[], Any], done: Done) -> None:
        if not self.alive:
            return
        result: Any
        try:
            result = work()
        except Killed:
            self._die()
            return
        except Exception as error:
            result = error
        delay_s = self._world.rng.uniform(0.0, 0.02)
        self._world.after(delay_s, lambda: self._tell(result, done))

    def _tell(self, result: Any, done: Done) -> None:
        if not self.alive:
            return
        try:
            done(result, self._world.now)
            self._turn(self._world.now)
        except Killed:
            self._die()
