"""A virtual clock, a faulty network and the hosts' part that both kinds share."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeAlias

Action: TypeAlias = Callable[[], None]
Span: TypeAlias = tuple[float, float]
"""Smallest and largest duration in seconds; drawn uniformly."""


@dataclass(frozen=True)
class Faults:
    """The mishaps until `until_s`. Rates are per second and host, shares per message."""

    until_s: float = math.inf
    loss: float = 0.0
    """Share of data messages that are lost."""
    duplicate: float = 0.0
    """Share of data messages that arrive twice."""
    slow: float = 0.0
    """Share of data messages that arrive up to `slow_s` later."""
    slow_s: float = 1.0
    damage: float = 0.0
    """Share of decoded chunks, merges, encodings and checkpoints that fail."""
    copies: float = 0.0
    """Share of the copies out of and into a learner's parameters that fail, half made."""
    breaks_per_s: float = 0.0
    """Control connections that break; messages in flight are lost."""
    break_s: Span = (0.05, 3.0)
    crashes_per_s: float = 0.0
    """Learners that die; a new incarnation comes back under the old name."""
    restart_s: Span = (0.1, 15.0)
    freezes_per_s: float = 0.0
    """Learners that are stopped (SIGSTOP) and continued."""
    freeze_s: Span = (0.1, 15.0)
    pauses_per_s: float = 0.0
    """Learners that evaluate for a while."""
    pause_s: Span = (0.2, 6.0)
    broker_crashes_per_s: float = 0.0
    broker_down_s: Span = (0.1, 8.0)
    restores: float = 0.0
    """Share of the broker's returns that begin from an older copy of its state directory."""
    latency_s: Span = (0.001, 0.02)
    """Delay of every message, faults or not."""
    work_s: Span = (0.001, 0.03)
    """Duration of every piece of slow work, faults or not."""


@dataclass(frozen=True)
class Noted:
    """A line for the log of `process`."""

    at_s: float
    process: str
    level: str
    text: str


class Clock:
    """Runs actions in the order of their virtual times; equal times in the order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._entries, (max(time, self.now), self._count, action))

    def run(self, until: float, stop: Callable[[], bool]) -> None:
        while self._entries and self._entries[0][0] <= until and not stop():
            self.now, _, action = heapq.heappop(self._entries)
            action()
        if not stop():
            self.now = until


class Machine(Protocol):
    """The part of Syncer and Session that a host needs."""

    def next_deadline(self) -> float | None: ...
    def check(self) -> None: ...


class Host:
    """A process: it dies, freezes, and wakes its machine when that wants to be woken."""

    def __init__(self, clock: Clock, random: Random, machine: Machine) -> None:
        self.clock, self.random, self.machine = clock, random, machine
        self.alive = True
        self.frozen_until = 0.0
        self._timer_at = math.inf
        self._postponed: deque[Action] = deque()

    def later(self, delay_s: float, action: Action) -> None:
        """Runs `action` unless the process is dead by then; after the thaw if it is frozen."""
        self.clock.at(self.clock.now + delay_s, lambda: self.do(action))

    def do(self, action: Action) -> None:
        """Runs `action` unless the process is dead; while it is frozen, later and in order."""
        if not self.alive:
            return
        if self.clock.now >= self.frozen_until and not self._postponed:
            action()
            return
        self._postponed.append(action)
        if len(self._postponed) == 1:
            self.clock.at(self.frozen_until, self._thaw)

    def _thaw(self) -> None:
        while self._postponed and self.alive:
            if self.clock.now < self.frozen_until:
                self.clock.at(self.frozen_until, self._thaw)
                return
            # It stays in the queue while it runs: what it leads to comes after the others.
            self._postponed[0]()
            self._postponed.popleft()

    def pump(self) -> None:
        """Sends what credit and rates allow."""

    def pump_at(self) -> float | None:
        """When `pump` is to be called even if nothing else happens; None: never."""
        return None

    def arm(self) -> None:
        """Sees to it that machine and pump are woken in time."""
        times = [
            time for time in (self.machine.next_deadline(), self.pump_at()) if time is not None
        ]
        deadline = min(times, default=math.inf)
        if deadline < self._timer_at:
            self._timer_at = deadline
            self.clock.at(deadline, lambda: self.do(lambda: self._wake(deadline)))

    def _wake(self, armed_for: float) -> None:
        if armed_for != self._timer_at:
            return  # An earlier one was armed since; else both would go on for ever.
        self._timer_at = math.inf
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline <= self.clock.now:
            self.reach_deadline()
            after = self.machine.next_deadline()
            assert after is None or after > self.clock.now, "busy loop: a deadline stays due"
        else:
            self.pump()
        if math.isinf(self._timer_at):  # Else it was armed by what it has done.
            self.arm()

    def reach_deadline(self) -> None:
        raise NotImplementedError
