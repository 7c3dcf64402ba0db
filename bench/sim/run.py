"""One simulated run and its faults: kills, restarts, freezes, full disks, restored states.

The seed draws settings, speeds, lines and faults. The store is the real one in a temporary folder,
without fsync; the pool's two moments leave every prefix of durability behind a kill.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from narrows.bench.sim.checkers import Checkers, Wrong
from narrows.bench.sim.lines import Line, Weather
from narrows.bench.sim.wild import NAME as WILD
from narrows.bench.sim.wild import WildPeer
from narrows.bench.sim.world import Killed, VirtualPool, World
from narrows.broker.config import BrokerConfig, load_broker
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.broker.records import Version
from narrows.broker.store import Store
from narrows.learner.host import LearnerHost
from narrows.learner.island import Island
from narrows.proto.codec import F32
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DtypeName, Layout, LayoutEntry
from narrows.proto.wire import asked_topic, live_topic

LAYOUT: Final = Layout(
    0,
    (
        LayoutEntry("embedding", (40, 32), "float32", "mean"),
        LayoutEntry("attention", (48, 64), "float32", "rda"),
        LayoutEntry("bias", (64,), "float32", "mean"),
        LayoutEntry("mlp", (64, 48), "bfloat16", "rda"),
    ),
)
TOKENS: Final = 32
"""Tokens of one inner step."""

QUIET_S: Final = 45.0
"""Seconds without faults at the end: everybody has time to come back."""


@dataclass
class Draw:
    """The meaning of one seed: settings, speeds, lines and the moments of all faults."""

    settings: dict[str, object]
    steps_s: list[float]
    weather: Weather
    ends: float = 60.0
    kills: list[float] = field(default_factory=list)
    crash_share: float = 0.0
    """Share of the visits of a crash place at which the broker dies."""
    breaks: list[tuple[float, int]] = field(default_factory=list)
    restarts: list[tuple[float, int]] = field(default_factory=list)
    freezes: list[tuple[float, int, float]] = field(default_factory=list)
    pauses: list[tuple[float, int, float]] = field(default_factory=list)
    full_disk: tuple[float, float] | None = None
    slow_disk: tuple[float, float] | None = None
    restore: tuple[float, float] | None = None
    """(time of the copy, time at which it is put back)."""
    wild: bool = False

    @classmethod
    def of(cls, seed: int) -> Draw:
        """Every fault comes in a share of the seeds."""
        rng = Random(seed)
        learners = rng.choice([2, 2, 3, 3, 4])
        steps_s = [0.03 * 10 ** rng.uniform(0, 1.6) for _ in range(learners)]
        codec = rng.choice(["int4-zstd", "int4-zstd", "int8-zstd", "f32-blosc2"])
        settings: dict[str, object] = {
            "fragments.count": rng.randint(1, 4),
            "fragments.sync_period_steps": rng.choice([6, 10, 20]),
            "fragments.overlap_steps": rng.randint(0, 4),
            "merge.quorum": rng.choice([1, 1, 2, 0]),
            "codec.push": codec,
            "codec.publish": codec,
            "run.learners_at_start": rng.choice([1, 1, 2]),
            "run.mode": rng.choice(["decoupled", "decoupled", "decoupled", "streaming", "diloco"]),
            "broker.keep_history": rng.random() < 0.5,
        }
        if settings["run.mode"] == "diloco":
            settings["fragments.count"] = 1
        if rng.random() < 0.4:
            rate = f"{rng.choice([400, 1000, 4000])}kbit/s"
            settings |= {"wan.total_down": rate, "wan.total_up": rate}
        if rng.random() < 0.5:
            settings["run.goal_tokens"] = int(40 * TOKENS * sum(1 / s for s in steps_s))
        weather = Weather(
            loss=rng.choice([0.0, 0.0, 0.02, 0.15]),
            twice=rng.choice([0.0, 0.05]),
            delay_s=rng.choice([0.005, 0.02, 0.1]),
        )
        draw = cls(settings, steps_s, weather)

        def who() -> int:
            return rng.randrange(learners)

        def when() -> float:
            return rng.uniform(2, draw.ends - 15)

        draw.kills = [when() for _ in range(rng.choice([0, 0, 1, 2, 4]))]
        draw.crash_share = rng.choice([0.0, 0.0, 0.005, 0.02])
        draw.breaks = [(when(), who()) for _ in range(rng.choice([0, 1, 3]))]
        draw.restarts = [(when(), who()) for _ in range(rng.choice([0, 0, 1, 2]))]
        draw.freezes = [(when(), who(), rng.uniform(0.5, 12)) for _ in range(rng.choice([0, 0, 1]))]
        draw.pauses = [(when(), who(), rng.uniform(0.5, 12)) for _ in range(rng.choice([0, 0, 1]))]
        if rng.random() < 0.25:
            draw.full_disk = (when(), rng.uniform(1, 8))
        if rng.random() < 0.25:
            draw.slow_disk = (when(), rng.uniform(1, 8))
        if rng.random() < 0.15:
            draw.restore = (rng.uniform(8, 15), rng.uniform(20, 35))
        draw.wild = rng.random() < 0.2
        return draw


class Parameters:
    """Tensors that walk towards a target of their own; the loss is not the point here."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.tensors: list[F32] = []
        for entry in LAYOUT.entries:
            values = rng.standard_normal(int(np.prod(entry.shape))).astype(np.float32)
            self.tensors.append(values)
        self._round()

    def step(self) -> None:
        """One inner step."""
        for values in self.tensors:
            noise = self._rng.standard_normal(values.size, np.float32)
            values -= np.float32(0.02) * (values + noise)
        self._round()

    def read(self, fragment: Fragment, out: F32) -> None:
        for piece in fragment.pieces:
            out[piece.offset : piece.offset + piece.count] = self.view(piece)

    def write(self, fragment: Fragment, values: F32) -> None:
        for piece in fragment.pieces:
            self.view(piece)[:] = values[piece.offset : piece.offset + piece.count]
        self._round()

    def view(self, piece: Piece) -> F32:
        return self.tensors[piece.tensor][piece.start : piece.start + piece.count]

    def dtype(self, piece: Piece) -> DtypeName:
        return LAYOUT.entries[piece.tensor].dtype

    def _round(self) -> None:
        for entry, values in zip(LAYOUT.entries, self.tensors, strict=True):
            if entry.dtype == "bfloat16":
                bits = values.view(np.uint32)
                bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
                bits &= np.uint32(0xFFFF0000)


class Disk(Store):
    """The real store on a disk that is full now and then."""

    full = False

    def commit(self, version: Version) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "the disk is full")
        super().commit(version)


class Site:
    """One learner: its process, its connections, its virtual training thread."""

    host_class: type[LearnerHost] = LearnerHost

    def __init__(self, run: Run, index: int, step_s: float) -> None:
        self.run, self.world, self.index, self.step_s = run, run.world, index, step_s
        self.name = f"site-{'abcdefgh'[index]}"
        self.line = Line(run.world, run.draw.weather)
        self.lives = 0
        self.restarted = False
        self.host: LearnerHost
        self.pool: VirtualPool
        self.left = False

    def boot(self) -> None:
        """A new process with the old name; what the old one had not pushed is gone with it."""
        world = self.world
        if self.lives:
            self.pool.alive, self.restarted = False, True
        self.lives += 1
        self.line.break_off()
        self.parameters = Parameters(np.random.default_rng(world.rng.getrandbits(32)))
        self.pool = VirtualPool(world, self._turn, self.boot)
        incarnation = f"{self.name}.{world.rng.getrandbits(32):08x}"
        host = self.run.site_host_class(
            self.name, incarnation, LAYOUT, Island(self.parameters), self, self.pool, world.now
        )
        self.host, self.left = host, False
        host.sender.ready = True
        host.saw = lambda header, values: self.run.checkers.saw(header, values)
        host.adopting = lambda effect: self.run.checkers.adopting(self, effect)
        host.lost(world.now)  # The connection is there at once.
        self._timer(host)
        self._train(host)

    # -- wires

    def control(self, peer: str, frames: list[bytes]) -> bool:
        run, peer = self.run, f"{self.name}#{self.line.generation}"
        host = run.host
        self.line.dial(self._subscribe)
        self.line.control("up", lambda: run.deliver_control(host, peer, self.name, frames))
        return True

    def _subscribe(self) -> None:
        """The subscriptions reach a broker that lives, or its next life."""
        run, incarnation = self.run, self.host.session.incarnation
        if run.host is None:
            self.line.dial(self._subscribe, again=True)
            return
        self.line.subscribed = True
        for stream in range(run.config.shared.streams):
            for topic in (live_topic(stream), asked_topic(incarnation, stream)):
                run.deliver_subscription(self.connection, topic)

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        run, host = self.run, self.run.host
        frames = [topic.encode(), header, payload]
        self.line.data(topic, lambda: run.deliver_data(host, self.name, frames))
        return True

    def receive_control(self, frames: list[bytes]) -> None:
        self._deliver(lambda host: host.control(frames, self.world.now))

    def receive_data(self, frames: list[bytes]) -> None:
        self._deliver(lambda host: host.data(frames, self.world.now))

    def _deliver(self, tell: Callable[[LearnerHost], None]) -> None:
        host = self.host

        def deliver() -> None:
            if host is self.host:
                tell(host)
                host.session.check()

        self.line.arrive(deliver)

    def broken(self) -> None:
        """The connection is made anew; the learner hears of it."""
        self.line.break_off()
        host = self.host
        self.world.after(
            self.world.rng.uniform(0.05, 0.5),
            lambda: host.lost(self.world.now) if host is self.host else None,
        )

    @property
    def connection(self) -> Connection:
        return Connection(self.index, self.line.generation)

    # -- threads

    def _turn(self, now: float) -> None:
        self.host.turn(now)

    def _timer(self, host: LearnerHost) -> None:
        if host is not self.host:
            return
        if not self.line.frozen:
            host.turn(self.world.now)
        wait_s = max(0.002, min(host.deadline(self.world.now) - self.world.now, 0.25))
        self.world.after(wait_s, lambda: self._timer(host))

    def _train(self, host: LearnerHost) -> None:
        """Does what a training thread does: join, step, wait where it must, leave at the end."""
        world, session = self.world, host.session
        if host is not self.host or session.ended:
            self.left = self.left or host is self.host
            return
        delay_s = 0.05
        if not self.line.frozen:
            if session.refused:
                raise Wrong(f"{self.name} is refused: {session.refused}")
            if not session.joined or session.must_wait(world.now):
                host.join(world.now)
            elif session.stopping:
                host.leave(world.now)
                host.join(world.now)
            elif world.now < self.run.draw.ends:
                self.parameters.step()
                host.boundary(TOKENS, 1.0, world.now)
                delay_s = self.step_s * world.rng.uniform(0.95, 1.05)
            else:
                host.join(world.now)
            session.check()
        world.after(delay_s, lambda: self._train(host))


class Run:
    """All of one seed. `finish` runs it to its end and lets the checkers judge."""

    def __init__(
        self,
        seed: int,
        path: Path,
        *,
        host_class: type[Host] = Host,
        site_host_class: type[LearnerHost] = LearnerHost,
        draw: Draw | None = None,
    ) -> None:
        self.world, self.path, self.draw = World(seed), path, draw or Draw.of(seed)
        self.host_class, self.site_host_class = host_class, site_host_class
        self.config: BrokerConfig = load_broker(None, self.draw.settings)
        self.checkers = Checkers(self)
        self.host: Host | None = None
        self.kills = 0
        self._wild: WildPeer | None = None
        self.finished = False
        self._restored = False
        self._boot()
        self.sites = [Site(self, i, step_s) for i, step_s in enumerate(self.draw.steps_s)]
        for index, site in enumerate(self.sites):
            self.world.after(0.3 * index, site.boot)
        self._wild = WildPeer(self, LAYOUT, self.draw.ends / 2) if self.draw.wild else None
        self._plan()

    def finish(self) -> None:
        """Raises Wrong with what the first checker found."""
        end = self.draw.ends + QUIET_S
        # What the broker sent last still arrives: it lingers.
        while self.world.now < end and not self.finished:
            self.world.run(min(self.world.now + 5.0, end))
        self.checkers.finish()
        self.store.close()

    # -- the broker's process

    def _boot(self) -> None:
        world = self.world
        self.store = Disk(
            self.path,
            durable=False,
            keep_history=self.config.broker.keep_history,
            reach=self._reach,
        )
        self.pool = VirtualPool(world, self._turn, self.kill)
        nonce = f"{world.rng.getrandbits(32):08x}"
        host = self.host_class(
            self.config,
            self,
            self.pool,
            self.store,
            world.now,
            nonce,
            now_unix=lambda: world.now,
            reach=self._reach,
        )
        self.checkers.booted(host)
        self.host = host
        self._timer(host)

    def _enter(self, host: Host | None, call: Callable[[Host], Any]) -> None:
        """Calls into a living broker; a crash place may end it."""
        if host is None or host is not self.host or self.finished:
            return
        host.downlink.keep_listeners(lambda each: self.sites[each[0]].connection == each)
        try:
            call(host)
        except Killed:
            self.kill()
            return
        host.syncer.check()
        if host.finished is not None:
            self.finished = True

    def _turn(self, now: float) -> None:
        self._enter(self.host, lambda host: host.turn(now))

    def _timer(self, host: Host) -> None:
        self._enter(host, lambda host: host.turn(self.world.now))
        if host is self.host:
            wait_s = max(0.001, min(host.deadline(self.world.now) - self.world.now, 0.25))
            self.world.after(wait_s, lambda: self._timer(host))

    def _reach(self, place: str) -> None:
        calm = self.world.now > self.draw.ends - 5
        if not calm and self.world.rng.random() < self.draw.crash_share:
            raise Killed

    def kill(self) -> None:
        """SIGKILL; another life begins on the same folder a second later."""
        if self.host is None or self.finished:
            return
        self.kills += 1
        self.checkers.killed(self.host)
        self.pool.alive, self.host = False, None
        self.store.close()
        for site in getattr(self, "sites", []):
            if site.lives:
                site.broken()
        self.world.after(1.0, self._boot)

    # -- wires of the broker

    def deliver_control(self, host: Host | None, peer: str, site: str, frames: list[bytes]) -> None:
        self._enter(host, lambda host: host.control(peer, site, frames, self.world.now))

    def deliver_subscription(self, connection: Connection, topic: str) -> None:
        now = self.world.now
        self._enter(self.host, lambda host: host.downlink.listens(connection, topic, True, now))

    def deliver_data(self, host: Host | None, site: str, frames: list[bytes]) -> None:
        self._enter(host, lambda host: host.data(site, frames, self.world.now))

    def control(self, peer: str, frames: list[bytes]) -> bool:
        name, generation = peer.split("#")
        if name == WILD and self._wild is not None:
            self._wild.hear(frames)
        for site in self.sites:
            if site.name == name and site.line.generation == int(generation):
                site.line.control("down", lambda site=site: site.receive_control(frames))  # type: ignore[misc]
                return True
        return False

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        frames = [topic.encode(), header, payload]
        self.checkers.sent(frames)
        for site in self.sites:
            if not site.line.subscribed:
                continue
            if topic.startswith("p/") or topic.split("/")[1:-1] == [site.host.session.incarnation]:
                site.line.data(topic, lambda site=site: site.receive_data(frames))  # type: ignore[misc]
        return True

    # -- faults

    def _plan(self) -> None:
        draw, after = self.draw, self.world.after
        for at in draw.kills:
            after(at, self.kill)
        for at, index in draw.breaks:
            after(at, lambda i=index: self.sites[i].broken())  # type: ignore[misc]
        for at, index in draw.restarts:
            after(at, lambda i=index: self._restart(self.sites[i]))  # type: ignore[misc]
        for at, index, seconds in draw.freezes:
            after(at, lambda i=index, s=seconds: self.sites[i].line.freeze(s))  # type: ignore[misc]
        for at, index, seconds in draw.pauses:
            after(at, lambda i=index, s=seconds: self._pause(self.sites[i], s))  # type: ignore[misc]
        if draw.full_disk:
            at, seconds = draw.full_disk
            after(at, lambda: self._fill(True))
            after(at + seconds, lambda: self._fill(False))
        if draw.slow_disk:
            at, seconds = draw.slow_disk
            after(at, lambda: setattr(self.pool, "slow_s", 0.5))
            after(at + seconds, lambda: setattr(self.pool, "slow_s", 0.0))
        if draw.restore:
            after(draw.restore[0], self._copy)
            after(draw.restore[1], self._put_back)

    def _restart(self, site: Site) -> None:
        if site.lives and not site.left:
            site.boot()

    def _pause(self, site: Site, seconds: float) -> None:
        host = site.host
        host.pause("evaluating", self.world.now)
        self.world.after(
            seconds, lambda: host.pause(None, self.world.now) if host is site.host else None
        )

    def _fill(self, full: bool) -> None:
        self.store.full = full

    @property
    def _backup(self) -> Path:
        return self.path.with_name(self.path.name + "-backup")

    def _copy(self) -> None:
        """A backup: the broker is killed, its folder copied."""
        if self.host is not None:
            self.kill()
            shutil.copytree(self.path, self._backup)

    def _put_back(self) -> None:
        """The backup takes the place of what came after it."""
        if self.host is None or not self._backup.exists():
            return
        self.kill()
        shutil.rmtree(self.path)
        shutil.copytree(self._backup, self.path)
        self._restored = True
        self.checkers.restored()

    @property
    def restored(self) -> bool:
        """Learners have seen versions that the broker no longer has."""
        return self._restored
