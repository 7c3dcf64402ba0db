"""Between the simulated processes: lines, control messages, data and subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from narrows.bench.sim.broker import SimulatedBroker
from narrows.bench.sim.learner import SimulatedLearner
from narrows.bench.sim.line import Acknowledged, Crossing, Frames, Line, LineRoute
from narrows.bench.sim.virtual import Clock, Faults, Span
from narrows.broker.config import BrokerConfig
from narrows.learner.session import events as learner_events
from narrows.proto import messages as msg
from narrows.proto.flow import wire_bytes
from narrows.proto.frames import downlink_topic

MessageWatch: TypeAlias = Callable[[float, str, str, msg.ControlMessage], None]
LineWatch: TypeAlias = Callable[[Crossing | Acknowledged], None]


class Network:
    """A line from each learner process to the broker, and what travels on it."""

    def __init__(
        self,
        config: BrokerConfig,
        seed: int,
        faults: Faults,
        *,
        on_message: MessageWatch | None,
        on_line: LineWatch | None,
    ) -> None:
        self.config, self.faults = config, faults
        self.random, self.clock = Random(seed), Clock()
        self.learners: dict[str, SimulatedLearner] = {}
        self.broker: SimulatedBroker | None = None
        self._on_message, self._on_line = on_message, on_line
        self._lines: dict[str, Line] = {}
        self._names: dict[str, str] = {}
        """Learners by incarnation."""
        self._starts = 0
        """Number of the broker's starts."""
        self._restarting = False

    # Connections.

    def _cut(self, name: str) -> None:
        self._lines[name].cut()
        learner = self.learners.get(name)
        if learner is not None:
            learner.do(lambda: learner.hear_subscriptions(is_heard=False))

    def _reconnect(self, name: str, delay_s: Span) -> None:
        line = self._lines[name]

        def connect() -> None:
            learner = self.learners.get(name)
            if learner and self._lines[name] is line and not (line.up or self._restarting):
                line.connect()
                learner.do(lambda: learner.handle(learner_events.Connected()))
                self._subscribe(learner)

        self.clock.at(self.clock.now + self.random.uniform(*delay_s), connect)

    # What the processes call.

    def to_broker(self, learner: SimulatedLearner, message: msg.ControlMessage, size: int) -> bool:
        """Sends a message whose frame has `size` bytes; False if there is no connection."""
        name = learner.spec.name
        line = self._lines[name]
        self._told(name, "broker", message)

        def receive() -> None:
            broker = self.broker
            if broker is not None:
                peer, address = line.peer, f"tcp://{line.name}"
                broker.do(lambda: broker.receive(peer, message, address, size))

        if line.up:
            self._crosses(self._up(learner), wire_bytes(size))
        line.send(wire_bytes(size), receive, up=True)
        return line.up

    def to_learner(self, peer: bytes, message: msg.ControlMessage, size: int) -> bool:
        """Sends a message whose frame has `size` bytes; False if nobody has this routing id."""
        for name, learner in self.learners.items():
            line = self._lines[name]
            if line.up and line.peer == peer:
                self._told("broker", name, message)
                self._send_to(learner, line, message, size)
                return True
        self._told("broker", "nobody", message)
        return False

    def _send_to(
        self, learner: SimulatedLearner, line: Line, message: msg.ControlMessage, size: int
    ) -> None:
        self._crosses(self._down(learner.incarnation), wire_bytes(size))
        line.send(
            wire_bytes(size),
            lambda: learner.do(lambda: learner.receive(message, size)),
            up=False,
        )

    def data_to_broker(self, learner: SimulatedLearner, stream: int, frames: Frames) -> None:
        def receive() -> None:
            broker = self.broker
            if broker is not None:
                broker.do(lambda: broker.receive_data(frames))

        self._crosses(self._up(learner), wire_bytes(*map(len, frames)), stream, len(frames[2]))
        self._lines[learner.spec.name].send_data(stream, frames, receive, up=True)

    def data_to_learner(self, topic: bytes, frames: Frames) -> None:
        name, incarnation, number = topic.decode().split("/")
        stream = int(number)

        def receive() -> None:
            learner = self.learners.get(name)
            # The topic has the incarnation: an old process gets nothing of its successor.
            if learner is not None and learner.incarnation == incarnation:
                learner.do(lambda: learner.receive_data(frames))

        route = self._down(incarnation)
        self._crosses(route, wire_bytes(*map(len, frames)), stream, len(frames[2]))
        self._lines[name].send_data(stream, frames, receive, up=False)

    def open_streams(self, learner: SimulatedLearner) -> None:
        """A learner process connects its data sockets."""
        if self._lines[learner.spec.name].up:
            self._subscribe(learner)

    def _subscribe(self, learner: SimulatedLearner) -> None:
        """Both sides tell each other that they listen, over connections that have just begun."""
        settings = learner.session.settings
        if settings is None:
            return
        line, broker = self._lines[learner.spec.name], self.broker
        assert broker is not None
        streams = range(settings.streams)
        topics = {
            downlink_topic(learner.spec.name, learner.incarnation, stream) for stream in streams
        }
        size = wire_bytes(sum(map(len, topics)))
        line.send(size, lambda: broker.do(lambda: broker.subscribe(topics)), up=True)
        line.send(
            size, lambda: learner.do(lambda: learner.hear_subscriptions(is_heard=True)), up=False
        )

    # Who looks on.

    def acknowledged_up(self, learner: SimulatedLearner, positions: tuple[int, ...]) -> None:
        """A learner process has heard what has come of its data."""
        self._acknowledged(self._up(learner), positions)

    def acknowledged_down(self, incarnation: str, positions: tuple[int, ...]) -> None:
        """The broker has heard what has come of its data to a learner process."""
        self._acknowledged(self._down(incarnation), positions)

    def _acknowledged(self, route: LineRoute, positions: tuple[int, ...]) -> None:
        if self._on_line is not None:
            self._on_line(Acknowledged(self.clock.now, route, positions))

    def _up(self, learner: SimulatedLearner) -> LineRoute:
        return LineRoute(self._starts, learner.spec.name, learner.incarnation, True)

    def _down(self, incarnation: str) -> LineRoute:
        return LineRoute(self._starts, self._names[incarnation], incarnation, False)

    def _crosses(
        self, route: LineRoute, size: int, stream: int = -1, payload_bytes: int = 0
    ) -> None:
        if self._on_line is not None:
            learner, wan = self.learners.get(route.learner), self.config.wan
            told = learner.up_bits_per_s if learner else 0.0
            limits = (told, wan.total_up) if route.up else (wan.down, wan.total_down)
            self._on_line(Crossing(self.clock.now, route, size, *limits, stream, payload_bytes))

    def _told(self, sender: str, receiver: str, message: msg.ControlMessage) -> None:
        if self._on_message is not None:
            self._on_message(self.clock.now, sender, receiver, message)
