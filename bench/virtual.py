"""A run in virtual time: the real hosts of a broker and its learners, in one thread.

The seed decides everything, so a busy machine changes nothing, and hours of a run take minutes. The
line delays each message by DELAY_S and loses none; `sim` has bad lines and every other fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Final, Protocol

from narrows.bench.sim.world import VirtualPool, World
from narrows.broker.config import load_broker
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.broker.store import History, Store
from narrows.learner.host import LearnerHost
from narrows.learner.island import Island, ParameterSource
from narrows.learner.session import Session
from narrows.proto.messages import Layout
from narrows.proto.wire import asked_topic, live_topic

DELAY_S: Final = 0.01
LOOK_S: Final = 0.05
"""Time between two looks of a learner that waits."""
TURN_S: Final = 0.25
"""Longest time between two turns of a host."""


class Trainee(Protocol):
    """One life of a learner: its parameters and its training loop."""

    @property
    def source(self) -> ParameterSource: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def ramp_steps(self) -> int:
        """Steps until its optimizer's moments mean something, for a life that joins late."""
        ...

    def step_s(self, now: float) -> float:
        """Seconds that the step takes which begins now."""
        ...

    def step(self, session: Session, now: float) -> int:
        """Makes a step, which ends now; its tokens."""
        ...


class Site:
    """A learner of the run. `start` begins a life, `kill` ends it without a word."""

    def __init__(self, run: VirtualRun, index: int, name: str) -> None:
        self.run, self.index, self.name = run, index, name
        self.lives = 0
        self.host: LearnerHost | None = None
        self.trainee: Trainee

    def start(self) -> None:
        """A new process; what an older one had not pushed is gone with it."""
        run, world = self.run, self.run.world
        self.lives += 1
        self.trainee = run.make_trainee(self.index)
        self.pool = VirtualPool(world, self._turn, self.kill)
        incarnation = f"{self.name}.{world.rng.getrandbits(32):08x}"
        host = self.host = LearnerHost(
            self.name, incarnation, self.trainee.layout, Island(self.trainee.source), self,
            self.pool, world.now,
        )  # fmt: skip
        host.sender.ready = True
        for stream in range(run.config.shared.streams):
            for topic in (live_topic(stream), asked_topic(incarnation, stream)):
                run.host.downlink.listens(self.connection, topic, True, world.now)
        host.lost(world.now)  # The connection is there at once.
        self._timer(host)
        self._join(host)

    def kill(self) -> None:
        """SIGKILL: its connections end, and the broker hears of nothing else."""
        if self.host is not None:
            self.host, self.pool.alive = None, False
            gone = self.connection
            self.run.host.downlink.keep_listeners(lambda each: each != gone)

    @property
    def connection(self) -> Connection:
        return Connection(self.index, self.lives)

    def control(self, peer: str, frames: list[bytes]) -> bool:
        peer = f"{self.name}#{self.lives}"
        self.run.tell(lambda host, now: host.control(peer, None, frames, now))
        return True

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        frames = [topic.encode(), header, payload]
        self.run.tell(lambda host, now: host.data(None, frames, now))
        return True

    def hear(self, call: Callable[[LearnerHost, float], None]) -> None:
        """Delivers a message to this life, if it still lives then."""
        host, world = self.host, self.run.world
        world.after(DELAY_S, lambda: call(host, world.now) if host and host is self.host else None)

    def _turn(self, now: float) -> None:
        if self.host is not None:
            self.host.turn(now)

    def _timer(self, host: LearnerHost) -> None:
        now = self.run.world.now
        if host is self.host:
            host.turn(now)
            wait_s = max(0.002, min(host.deadline(now) - now, TURN_S))
            self.run.world.after(wait_s, lambda: self._timer(host))

    def _join(self, host: LearnerHost) -> None:
        """Until the first step, as `Learner.__enter__`."""
        world, session = self.run.world, host.session
        if host is self.host and not host.join(world.now):
            world.after(LOOK_S, lambda: self._join(host))
        elif host is self.host:
            is_late = any(part.held > 0 for part in session.parts)
            session.ramp_steps = self.trainee.ramp_steps if is_late else 0
            self._train(host)

    def _train(self, host: LearnerHost) -> None:
        """Between two steps: begins the next one, or waits where a training loop waits."""
        world, session = self.run.world, host.session
        if host is not self.host or session.ended:
            return
        if session.refused:
            raise session.refused
        if session.stopping:
            host.leave(world.now)
        if session.stopping or session.must_wait(world.now):
            host.join(world.now)
            world.after(LOOK_S, lambda: self._train(host))
        else:
            world.after(self.trainee.step_s(world.now), lambda: self._end_step(host))

    def _end_step(self, host: LearnerHost) -> None:
        if host is self.host:
            now = self.run.world.now
            host.boundary(self.trainee.step(host.session, now), 1.0, now)
            self._train(host)


class VirtualRun:
    """A broker and its learners, which join at once; `make_trainee(index)` begins a learner's life.

    `folder` is the state directory.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        names: Sequence[str],
        make_trainee: Callable[[int], Trainee],
        *,
        seed: int,
        folder: Path,
    ) -> None:
        self.world, self.make_trainee = World(seed), make_trainee
        given = {"run.learners_at_start": len(names), "broker.state_dir": str(folder), **settings}
        self.config = load_broker(None, given)
        pool = VirtualPool(
            self.world, lambda now: self.enter(lambda host, now: host.turn(now)), _never
        )
        self._store = Store(folder, durable=False)
        self.host = Host(
            self.config, self, pool, self._store, 0.0, f"{seed:08x}",
            now_unix=lambda: self.world.now,
        )  # fmt: skip
        self.sites = [Site(self, index, name) for index, name in enumerate(names)]
        self._timer()
        for site in self.sites:
            self.world.after(0.0, site.start)

    def until(self, until_s: float) -> None:
        """Goes on until this time, or to the end of the run."""
        while self.host.finished is None and self.world.now < until_s:
            self.world.run(min(self.world.now + 1.0, until_s))

    def close(self) -> float:
        """Ends the process of the broker; learners per merge, over all durable rounds."""
        self._store.close()
        with closing(History(self._store.folder)) as history:
            rounds = [row.round_ for row in history.rounds()]
        return fmean(len(each.contributions) for each in rounds if each.version)

    def tell(self, call: Callable[[Host, float], object]) -> None:
        """Delivers a message to the broker."""
        self.world.after(DELAY_S, lambda: self.enter(call))

    def enter(self, call: Callable[[Host, float], object]) -> None:
        """A call into the broker, until it has finished."""
        if self.host.finished is None:
            call(self.host, self.world.now)

    def control(self, peer: str, frames: list[bytes]) -> bool:
        for site in self.sites:
            if peer == f"{site.name}#{site.lives}" and site.host is not None:
                site.hear(lambda host, now: host.control(frames, now))
                return True
        return False

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        frames = [topic.encode(), header, payload]
        for site in self.sites:
            if site.host is None:
                continue
            if topic.startswith("p/") or topic.split("/")[1] == site.host.session.incarnation:
                site.hear(lambda host, now: host.data(frames, now))
        return True

    def _timer(self) -> None:
        now = self.world.now
        self.enter(lambda host, now: host.turn(now))
        wait_s = max(0.001, min(self.host.deadline(now) - now, TURN_S))
        self.world.after(wait_s, self._timer)


def _never() -> None:
    raise AssertionError("no crash place is armed")
