"""A whole run under a virtual clock: one broker, many learners, a network and processes that fail.

The state machines are the real ones; what is simulated is what surrounds them. The same seed
gives the same run. Tests check its trace, `bench goodput` reads its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from narrows.bench.sim.broker import SimulatedBroker
from narrows.bench.sim.learner import LearnerSpec, SimulatedLearner
from narrows.bench.sim.line import Line
from narrows.bench.sim.network import LineWatch, MessageWatch, Network
from narrows.bench.sim.virtual import Faults, Span
from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import Resumed
from narrows.broker.syncer import events as broker_events
from narrows.proto import messages as msg
from narrows.proto.socket_options import STREAM_WINDOW_BYTES

LAYOUT = (
    msg.LayoutEntry("embedding", (40, 64), "float32", "mean"),
    msg.LayoutEntry("hidden", (48, 50), "float32", "rda"),
    msg.LayoutEntry("bias", (700,), "float32", "mean"),
    msg.LayoutEntry("head", (30, 64), "float32", "mean"),
)


class Simulation(Network):
    """One seeded run; `run` may be called again to go on.

    `trace` holds records of type Committed, Installed, Adopted, Failed and Noted;
    `learners` the running process of each name, `ended` those that left or were refused.
    """

    def __init__(
        self,
        config: BrokerConfig,
        seed: int,
        faults: Faults,
        learners: Sequence[LearnerSpec],
        *,
        layout: tuple[msg.LayoutEntry, ...] = LAYOUT,
        window_bytes: int = STREAM_WINDOW_BYTES,
        on_message: MessageWatch | None = None,
        on_line: LineWatch | None = None,
    ) -> None:
        """`on_message(at_s, sender, receiver, message)` sees control messages that are sent,
        `on_line` all that goes onto the lines, and what comes of it. At most `window_bytes` of
        payload are unacknowledged per stream."""
        super().__init__(config, seed, faults, on_message=on_message, on_line=on_line)
        self.layout, self.window_bytes = layout, window_bytes
        self.trace: list[object] = []
        self.ended: dict[str, SimulatedLearner] = {}
        self.crashed: list[SimulatedLearner] = []
        self.specs = {spec.name: spec for spec in learners}
        self.finished = ""
        """Why the broker ended in order, "" while it has not."""
        self._life = 0
        self._copies: list[tuple[int, Resumed | None]] = []
        """Life and checkpoint in the state directory before each start of the broker."""
        self._restore = -1
        self._down_s = 0.0
        self.start_broker()
        for spec in learners:
            self.clock.at(spec.joins_at_s, partial(self.start_learner, spec.name))
        self._schedule_faults()

    def run(self, until_s: float) -> None:
        """Runs until the virtual time `until_s`, or until the broker has ended in order."""
        self.clock.run(until_s, lambda: bool(self.finished))

    # Processes.

    def make_broker(self, epoch: msg.Epoch, durable: Resumed | None) -> SimulatedBroker:
        """The process of a new life of the broker."""
        return SimulatedBroker(
            self.clock, self.random, self.faults, self, self.config, epoch=epoch, durable=durable,
            window_bytes=self.window_bytes,
        )  # fmt: skip

    def make_learner(self, spec: LearnerSpec) -> SimulatedLearner:
        """The process of a new incarnation."""
        return SimulatedLearner(self.clock, self.random, self.faults, self, spec, self.layout)

    def start_broker(self) -> None:
        """Starts a life of the broker from what the one before had made durable."""
        self._copies.append((self._life, self.broker.durable if self.broker else None))
        self._life, durable = self._copies[self._copy_to_start()]
        self._life, self._starts = self._life + 1, self._starts + 1
        self._restarting, self._restore = False, -1
        self.broker = self.make_broker((0, self._life, self._starts), durable)
        for name in self.learners:
            self._reconnect(name, (0.0, 0.5))

    def _copy_to_start(self) -> int:
        """Which copy of the state directory the next life begins from; -1: the newest."""
        faults = self.faults
        if self._restore < 0 and faults.restores and self.clock.now < faults.until_s:
            if self.random.random() < faults.restores:
                return self.random.randrange(len(self._copies))
        return self._restore

    def restore_broker(self, start: int, down_s: float) -> None:
        """SIGKILL, and a restart from what the state directory held before start `start` (from 0)
        after `down_s`."""
        self._restore = start
        self.kill_broker(down_s)

    def kill_broker(self, down_s: float) -> None:
        """SIGKILL, and a restart from the newest checkpoint after `down_s`."""
        if self._restarting or self.finished or self.broker is None:
            return
        self._restarting, self.broker.alive = True, False
        for name in self._lines:
            self._cut(name)
        self.clock.at(self.clock.now + down_s, self.start_broker)

    def reload(self, config: BrokerConfig) -> None:
        """The operator has changed the rates and sends SIGHUP; later lives begin with them."""
        self.config = config
        if self.broker is not None:
            broker = self.broker
            broker.do(lambda: broker.handle(broker_events.ConfigRead(config)))

    def stop_broker(self, reason: str, down_s: float) -> None:
        """SIGTERM, and a restart `down_s` after the process has ended."""
        if self.broker is not None and self.broker.alive:
            broker, self._down_s = self.broker, down_s
            broker.do(lambda: broker.handle(broker_events.StopRequested(reason)))

    def start_learner(self, name: str) -> None:
        """Starts a new incarnation of a learner."""
        if name in self.ended or name in self.learners:
            return
        spec, identity = self.specs[name], f"{name}/{self.random.getrandbits(32):x}"
        line = self._lines[name] = Line(self.clock, self.random, self.faults, identity, spec.line)
        if not self._restarting:
            line.connect()
        self.learners[name] = learner = self.make_learner(spec)
        self._names[learner.incarnation] = name

    def kill_learner(self, name: str, down_s: float) -> None:
        """SIGKILL, and a restart under the old name after `down_s`."""
        learner = self.learners.pop(name, None)
        if learner is not None:
            learner.alive = False
            self.crashed.append(learner)
            self._cut(name)
            self.clock.at(self.clock.now + down_s, lambda: self.start_learner(name))

    def freeze_learner(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        learner = self.learners.get(name)
        if learner is not None:
            learner.frozen_until = max(learner.frozen_until, self.clock.now + seconds)

    def break_line(self, name: str, seconds: float) -> None:
        """The control connection breaks; the process connects again after `seconds`."""
        line = self._lines.get(name)
        if line is None or not line.up or name not in self.learners:
            return
        peer, broker = line.peer, self.broker
        self._cut(name)
        if broker is not None and self.random.random() < 0.5:
            # A router may notice at once or never.
            broker.do(lambda: broker.handle(broker_events.PeerLost(peer)))
        self._reconnect(name, (seconds, seconds))

    # What the processes call.

    def record(self, record: object) -> None:
        self.trace.append(record)

    def broker_finished(self, reason: str) -> None:
        assert self.broker is not None
        if not self.broker.syncer.lifecycle.stopping:
            self.finished = reason
            return
        self.broker.alive, self._restarting = False, True
        for name in self._lines:
            self._cut(name)
        self.clock.at(self.clock.now + self._down_s, self.start_broker)

    def learner_ended(self, learner: SimulatedLearner) -> None:
        self.ended[learner.spec.name] = self.learners.pop(learner.spec.name)

    # The faults.

    def _schedule_faults(self) -> None:
        faults = self.faults
        for name in self.specs:
            for rate, span, action in (
                (faults.breaks_per_s, faults.break_s, self.break_line),
                (faults.crashes_per_s, faults.restart_s, self.kill_learner),
                (faults.freezes_per_s, faults.freeze_s, self.freeze_learner),
                (faults.pauses_per_s, faults.pause_s, self._pause_learner),
            ):
                self._repeat(rate, span, partial(action, name))
        self._repeat(faults.broker_crashes_per_s, faults.broker_down_s, self._end_broker)

    def _repeat(self, rate_per_s: float, span: Span, action: Callable[[float], None]) -> None:
        """Calls `action` with drawn durations at drawn times until the faults end."""
        if rate_per_s <= 0:
            return

        def fire() -> None:
            action(self.random.uniform(*span))
            self._repeat(rate_per_s, span, action)

        at = self.clock.now + self.random.expovariate(rate_per_s)
        if at < self.faults.until_s:
            self.clock.at(at, fire)

    def _pause_learner(self, name: str, seconds: float) -> None:
        learner = self.learners.get(name)
        if learner is not None:
            learner.do(lambda: learner.pause(seconds))

    def _end_broker(self, down_s: float) -> None:
        if self.random.random() < 0.3:
            self.stop_broker("stopped by the simulator", down_s)
        else:
            self.kill_broker(down_s)
