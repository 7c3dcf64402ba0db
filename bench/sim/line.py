"""The line of one simulated learner process: a control connection and the data streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, TypeAlias

from narrows.bench.sim.virtual import Action, Clock, Faults
from narrows.proto.flow import wire_bytes

Frames: TypeAlias = tuple[bytes, bytes, bytes]
"""Topic, header, payload."""


@dataclass(frozen=True)
class LineSpec:
    """Capacity and delay of a line; 0: no limit."""

    up_bits_per_s: float = 0.0
    down_bits_per_s: float = 0.0
    delay_s: float = 0.0
    """One way, beside the faults' latency."""


class LineRoute(NamedTuple):
    """Between two processes, in one direction."""

    broker: int
    """Number of the broker's start."""
    learner: str
    incarnation: str
    up: bool


class Crossing(NamedTuple):
    """Something that a process has put on its line, be it up or down."""

    at_s: float
    route: LineRoute
    wire_bytes: int
    limit_bits_per_s: float
    """Rate that is allowed this way, to or from one learner; 0: no limit."""
    total_bits_per_s: float
    """The same to or from all learners."""
    stream: int = -1
    """-1: a control message."""
    payload_bytes: int = 0


class Acknowledged(NamedTuple):
    """The process that sends on this route has heard what has come of its data."""

    at_s: float
    route: LineRoute
    positions: tuple[int, ...]


@dataclass
class _OneWay:
    bits_per_s: float
    free_at: float = 0.0
    """When all that has been put on the line has left it at the other end, but for the delay."""
    control_at: float = 0.0
    """Arrival of the newest control message."""
    arrivals: dict[int, float] = field(default_factory=dict[int, float])
    """Arrival of the newest data message by stream."""

    def carry(self, size_bytes: int, now: float) -> float:
        """When data have left the line; they wait for all that came before."""
        if not self.bits_per_s:
            return now
        self.free_at = max(self.free_at, now) + 8 * size_bytes / self.bits_per_s
        return self.free_at

    def carry_between(self, size_bytes: int, now: float) -> float:
        """The same for control: it has a connection of its own and does not wait for the data,
        but the data wait for it."""
        if not self.bits_per_s:
            return now
        duration_s = 8 * size_bytes / self.bits_per_s
        self.free_at = max(self.free_at, now) + duration_s
        return now + duration_s


class Line:
    """In order and reliable while it is up, but for what the faults do to data messages.

    What is sent while it is down is lost, as with IMMEDIATE in a ZeroMQ dealer; so is what is on
    its way when it breaks.
    """

    def __init__(
        self, clock: Clock, random: Random, faults: Faults, name: str, spec: LineSpec
    ) -> None:
        self.clock, self.random, self.faults, self.name = clock, random, faults, name
        self.generation = 0
        self.up = False
        self._spec = spec
        self._directions = self._idle()

    def _idle(self) -> dict[bool, _OneWay]:
        spec = self._spec
        return {True: _OneWay(spec.up_bits_per_s), False: _OneWay(spec.down_bits_per_s)}

    @property
    def peer(self) -> bytes:
        """The routing id that the broker sees: another one after each break."""
        return f"{self.name}#{self.generation}".encode()

    def connect(self) -> None:
        self.up = True

    def cut(self) -> None:
        """Breaks the connections; what is in flight is lost."""
        if self.up:
            self.up = False
            self.generation += 1
            self._directions = self._idle()

    def send(self, size_bytes: int, receive: Action, *, up: bool) -> None:
        """Delivers a control message behind all those sent before; `up`: to the broker."""
        if not self.up:
            return
        direction = self._directions[up]
        left_at = direction.carry_between(size_bytes, self.clock.now)
        arrival = left_at + self._spec.delay_s + self.random.uniform(*self.faults.latency_s)
        direction.control_at = arrival = max(arrival, direction.control_at)
        self._deliver(arrival, receive)

    def send_data(self, stream: int, frames: Frames, receive: Action, *, up: bool) -> None:
        """Delivers a data message: in order within a stream, not across streams."""
        faults, random, now = self.faults, self.random, self.clock.now
        if not self.up:
            return
        direction = self._directions[up]
        left_at = direction.carry(wire_bytes(*map(len, frames)), now)
        faulty = now < faults.until_s
        if faulty and random.random() < faults.loss:
            return
        arrival = left_at + self._spec.delay_s + random.uniform(*faults.latency_s)
        if faulty and random.random() < faults.slow:
            arrival += random.uniform(0.0, faults.slow_s)
        direction.arrivals[stream] = arrival = max(arrival, direction.arrivals.get(stream, 0.0))
        self._deliver(arrival, receive)
        if faulty and random.random() < faults.duplicate:
            self._deliver(arrival + random.uniform(0.0, faults.slow_s), receive)

    def _deliver(self, arrival: float, receive: Callable[[], None]) -> None:
        generation = self.generation

        def deliver() -> None:
            if self.generation == generation:
                receive()

        self.clock.at(arrival, deliver)
