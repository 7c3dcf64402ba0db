"""One run in virtual time and its faults: kills, restarts, freezes, full disks, restored states,
exceptions in a training thread.

A plan says what happens: the simulator draws all of it from a seed, and the benches of quality and
goodput plan calm runs with learners of their own. Either way the seed decides everything, however
busy the machine is. The store is the real one in a temporary folder, without fsync; the pool's two
moments leave every prefix of durability behind a kill.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Final, Protocol

import numpy as np

from narrows.bench.sim.checkers import Checkers, Learner, Wrong, standings
from narrows.bench.sim.wild import WILD, WildPeer
from narrows.bench.sim.world import Interrupted, Killed, Line, Span, VirtualPool, Weather, World
from narrows.broker.config import load_broker
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.broker.records import Version
from narrows.broker.store import History, Recovered, Store
from narrows.broker.syncer.events import Note
from narrows.learner.boundary import Boundary
from narrows.learner.host import LearnerHost
from narrows.learner.island import HandOver, HostIsland, ParameterSource
from narrows.learner.session import Session
from narrows.proto.codec import CODECS, F32, round_to_dtype
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DtypeName, Layout, LayoutEntry
from narrows.proto.ports import Adoption, Copy, Prepared
from narrows.proto.wire import asked_topic, live_topic

ENTRIES: Final = (
    LayoutEntry("embedding", (40, 32), "float32", "mean"),
    LayoutEntry("attention", (48, 64), "float32", "rda"),
    LayoutEntry("bias", (64,), "float32", "mean"),
    LayoutEntry("mlp", (64, 48), "bfloat16", "rda"),
)
LAYOUT: Final = Layout(0, ENTRIES)
TOKENS: Final = 32
"""Tokens of one inner step."""

QUIET_S: Final = 45.0
"""Seconds without faults at the end: everybody has time to come back."""


class Trainee(Protocol):
    """One life of a learner: its parameters and its training loop."""

    @property
    def source(self) -> ParameterSource: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def hand_over(self) -> HandOver | None: ...

    def step(self, session: Session, now: float) -> int:
        """Makes a step, which ends now; its tokens."""
        ...

    def step_s(self, now: float) -> float:
        """Seconds that the step takes which begins now."""
        ...


@dataclass
class Plan:
    """Settings and learners of a run, and all that befalls it: here nothing but short delays."""

    seed: int
    settings: dict[str, object]
    steps_s: Sequence[float]
    """Seconds of a step of each learner."""
    begin: Callable[[Site], Trainee]
    """Begins a learner's life."""
    faults: list[tuple[float, Callable[[Simulation], None]]] = field(default_factory=list)
    """Times, and what befalls the run then."""

    # A plan that wants others sets them.
    ends = 60.0
    """Nobody trains after this second, nor does a fault begin."""
    weather = Weather(delay_s=0.01)
    crash_share = 0.0
    """Share of the visits of a crash place at which the broker dies."""
    replays_s: Sequence[float] = (1.0,)
    """Seconds that a start of the broker may take."""
    full_disk = (0.0, 0.0)
    slow_disk = (0.0, 0.0)
    end_kills: Sequence[float] = ()
    """Kills of the broker, in seconds after the goal is reached."""
    interrupted = 0.0
    """Share of the calls of a training thread out of which an exception may come."""
    short_of_memory = 0.0
    """Share of the published copies that a learner cannot make at the first try."""
    wild = False
    island: int | None = None
    """This learner is an island of ranks: it keeps to the order of calls of one."""

    def befalls(self, at: float, index: int, fault: Callable[..., None], *given: object) -> None:
        """A learner meets with a fault, a method of Site, at this time."""
        self.faults.append((at, lambda run: fault(run.sites[index], *given)))


class Draw(Plan):
    """The meaning of one seed: settings, speeds, lines and the moments of all faults, each of which
    comes in a share of the seeds."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        learners = rng.choice([2, 2, 3, 3, 4])
        steps_s = [0.03 * 10 ** rng.uniform(0, 1.6) for _ in range(learners)]
        codec = rng.choice([next(iter(CODECS)), *CODECS])  # The default one twice as often.
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
        super().__init__(seed, settings, steps_s, Walk)
        self.island = seed % learners
        self.weather = Weather(
            loss=rng.choice([0.0, 0.0, 0.02, 0.15]),
            twice=rng.choice([0.0, 0.05]),
            delay_s=rng.choice([0.005, 0.02, 0.1]),
        )

        def who() -> int:
            return rng.randrange(learners)

        def when() -> float:
            return rng.uniform(2, self.ends - 15)

        def span(share: float) -> Span:
            """Some seconds in this share of the seeds, in the others none."""
            if rng.random() >= share:
                return (0.0, 0.0)
            begin = when()
            return (begin, begin + rng.uniform(1, 8))

        self.faults += [(when(), Simulation.kill) for _ in range(rng.choice([0, 0, 1, 2, 4]))]
        self.crash_share = rng.choice([0.0, 0.0, 0.005, 0.02])
        for fault, counts in ((Site.broken, [0, 1, 3]), (Site.restart, [0, 0, 1, 2])):
            for _ in range(rng.choice(counts)):
                self.befalls(when(), who(), fault)
        for spell in (Site.freeze, Site.pause):
            for _ in range(rng.choice([0, 0, 1])):
                self.befalls(when(), who(), spell, rng.uniform(0.5, 12))
        self.full_disk = span(0.25)
        self.slow_disk = span(0.25)
        if rng.random() < 0.15:
            self.faults.append((rng.uniform(8, 15), Simulation.copy))
            self.faults.append((rng.uniform(20, 35), Simulation.put_back))
        self.wild = rng.random() < 0.2
        if rng.random() < 0.2:  # While version 0 is being made.
            self.faults.append((rng.uniform(0.1, 2.5), Simulation.kill))
        self.replays_s = (0.2, 0.5, 1.0, 6.0)
        first_s = rng.uniform(0, 3)
        second_s = first_s + rng.uniform(0.5, 5)
        self.end_kills = rng.choice([(), (), (first_s,), (first_s, second_s)])
        self.interrupted = rng.choice([0.0, 0.0, 0.03])
        self.short_of_memory = rng.choice([0.0, 0.0, 0.0, 0.03])


class Walk:
    """The simulator's trainee and its parameters: tensors that walk to zero, with noise; the loss
    is not the point here."""

    layout = LAYOUT
    hand_over: HandOver | None = None

    def __init__(self, site: Site) -> None:
        self.source = self
        self._site = site
        self._rng = site.world.rng
        self._noise = np.random.default_rng(self._rng.getrandbits(32))
        self.tensors: list[F32] = [
            self._noise.standard_normal(math.prod(entry.shape)).astype(np.float32)
            for entry in ENTRIES
        ]
        self._round()

    def step(self, session: Session, now: float) -> int:
        for values in self.tensors:
            noise = self._noise.standard_normal(values.size, np.float32)
            values -= np.float32(0.02) * (values + noise)
        self._round()
        return TOKENS

    def step_s(self, now: float) -> float:
        return self._site.step_s * self._rng.uniform(0.95, 1.05)

    def read(self, fragment: Fragment, out: F32) -> None:
        for piece in fragment.pieces:
            out[piece.offset : piece.offset + piece.count] = self.view(piece)

    def write(self, fragment: Fragment, values: F32) -> None:
        for piece in fragment.pieces:
            self.view(piece)[:] = values[piece.offset : piece.offset + piece.count]
        self._round()

    def arrays(self, fragment: Fragment) -> list[F32]:
        return [self.view(piece) for piece in fragment.pieces]

    def view(self, piece: Piece) -> F32:
        return self.tensors[piece.tensor][piece.start : piece.start + piece.count]

    def dtype(self, piece: Piece) -> DtypeName:
        return ENTRIES[piece.tensor].dtype

    def _round(self) -> None:
        for entry, values in zip(ENTRIES, self.tensors, strict=True):
            round_to_dtype(values, entry.dtype, values)


class Disk(Store):
    """The real store on a disk that is full now and then."""

    def __init__(self, run: Simulation) -> None:
        self._run = run
        keep_history = run.config.broker.keep_history
        super().__init__(run.path, durable=False, keep_history=keep_history, reach=run.reach)
        self.is_read = False
        """The time that a start takes is over."""

    def recover(self, now_unix: float) -> Recovered:
        recovered = super().recover(now_unix)
        self.is_read = True
        return recovered

    def commit(self, version: Version) -> None:
        if self._run.world.is_within(self._run.plan.full_disk):
            raise OSError(errno.ENOSPC, "the disk is full")
        super().commit(version)


class Watched(HostIsland):
    """Says on which version each fragment stands, and may be interrupted half way."""

    def __init__(self, source: ParameterSource, site: Site) -> None:
        super().__init__(source, site.trainee.hand_over)
        self._site = site
        self._bases: dict[int, Copy] = {}
        """By fragment, the copy that was adopted last."""

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        run = self._site.run
        if run.world.happens(run.share(run.plan.short_of_memory)):
            raise MemoryError("no room for a copy")
        return super().copy(fragment, values)

    def adopt(self, fragment: Fragment, prepared: Prepared) -> None:
        site = self._site
        # With keep 0 the parameters are overwritten, whatever they were.
        if prepared.keep > 0 and fragment.index not in site.versions:
            raise Wrong(f"whole: {site.name} adopts {fragment.index}, which stands on nothing")
        effect = site.adopting
        new = site.host.tips[fragment.index]
        old = self._bases.get(fragment.index, new)
        push = site.host.pushes[fragment.index, effect.push_id] if effect.push_id else None
        due = super().prepare(fragment, Adoption(old, new, push, effect.keep, effect.merged))
        site.run.checkers.prepared(site, prepared, due)
        # An exception comes before a fragment is written, or else it counts as half written.
        site.reach()
        site.versions.pop(fragment.index, None)
        super().adopt(fragment, prepared)
        self._bases[fragment.index] = new
        site.reach()
        site.versions[fragment.index] = site.host.session.parts[fragment.index].base


class Site(Learner):
    """One learner: its process, its connections, its virtual training thread."""

    def __init__(self, run: Simulation, index: int, step_s: float) -> None:
        line = Line(run.world, run.plan.weather)
        super().__init__(f"site-{ascii_lowercase[index]}", step_s, line)
        self.run = run
        self.world = run.world
        self.index = index
        self.pool: VirtualPool
        self._places_left = 0
        """An exception comes at the last of so many places of a call; 0: at none."""
        self._is_island = index == run.plan.island
        self._meets = True
        """The ranks meet at the coming boundary, which may exchange something or wait."""
        self._late_tokens = 0
        """Tokens of the last step that its boundary has not counted."""

    def boot(self) -> None:
        """A new process with the old name; what the old one had not pushed is gone with it."""
        world = self.world
        if self.lives:
            self.pool.alive = False
        self.lives += 1
        self.left = False
        self._meets = True
        self._late_tokens = 0
        self.line.break_off()
        self.trainee = self.run.plan.begin(self)
        self.pool = VirtualPool(world, lambda _: self._turn(), self.boot, reach=self.reach)
        incarnation = f"{self.name}.{world.rng.getrandbits(32):08x}"
        self.versions = {}
        host = LearnerHost(
            self.name, incarnation, self.trainee.layout, Watched(self.trainee.source, self),
            self, self.pool, world.now,
        )  # fmt: skip
        host.noted = lambda note: self.reach()
        self.run.spoil(host)
        self.host = host
        self.boundary = Boundary(host)
        self.boundary.adopting = partial(self.run.checkers.adopting, self)
        self.run.spoil(self.boundary)
        host.sender.ready = True
        host.saw = self.run.checkers.saw
        host.lost(world.now)  # The connection is there at once.
        self._timer()
        self._train()

    def _in_this_life(self, what: Callable[[], None]) -> Callable[[], None]:
        """Does `what` if the process that lives now still does then."""
        host = self.host

        def unless_dead() -> None:
            if host is self.host:
                what()

        return unless_dead

    # -- wires

    @property
    def peer(self) -> str:
        """The control connection, as the broker knows it."""
        return f"{self.name}#{self.line.generation}"

    @property
    def connection(self) -> Connection:
        """The data connection, as the broker knows it."""
        return Connection(self.index, self.line.generation)

    def control(self, peer: str, frames: list[bytes]) -> bool:
        self.reach()
        self.line.dial(self._subscribe)
        enter = partial(self.run.enter, Host.control, self.peer, self.name, frames)
        self.line.in_order("control up", enter)
        return True

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        frames = [topic.encode(), header, payload]
        self.line.data(topic, partial(self.run.enter, Host.data, self.name, frames))
        return True

    def _subscribe(self) -> None:
        """The subscriptions reach a broker that lives, or wait for its next life."""
        incarnation = self.host.session.incarnation
        self.line.subscribed = True

        def listen(host: Host, now: float) -> None:
            for stream in range(self.run.config.shared.streams):
                for topic in (live_topic(stream), asked_topic(incarnation, stream)):
                    host.downlink.listens(self.connection, topic, True, now)

        self.run.enter(listen)

    def receive(self, call: Callable[..., None], frames: list[bytes]) -> None:
        """A message has reached the machine; `call` is the method that its host has for it."""

        def deliver() -> None:
            call(self.host, frames, self.world.now)
            self._turn()

        self.line.arrive(self._in_this_life(deliver))

    # -- threads

    def _after_event(self) -> None:
        session = self.host.session
        session.check()
        self.foretold = session.due(self.world.now)

    def _turn(self) -> None:
        self.host.turn(self.world.now)
        self._after_event()

    def _timer(self) -> None:
        if not self.line.frozen:
            self._turn()
        wait_s = max(0.002, min(self.host.deadline(self.world.now) - self.world.now, 0.25))
        self.world.after(wait_s, self._in_this_life(self._timer))

    def _train(self) -> None:
        """Does what a training thread does: join, step, wait where it must, leave at the end."""
        world = self.world
        host = self.host
        session = host.session
        if session.ended:
            self.left = True
            return
        delay_s = 0.05
        if not self.line.frozen:
            if session.refused:
                raise Wrong(f"{self.name} is refused: {session.refused}")
            waits = session.must_wait(world.now) and self._meets
            if not session.joined or waits:
                self._exchange_without_step()
            elif session.stopping:
                self._count_late()
                self._call(lambda: session.leave(world.now))
                self._exchange_without_step()
            elif world.now < self.run.plan.ends:
                before = standings(session)
                if self._step(session):
                    self.run.checkers.stepped(self, before)
                delay_s = self.trainee.step_s(world.now)
            else:
                self._exchange_without_step()
            self._after_event()
        world.after(delay_s, self._in_this_life(self._train))

    def _exchange_without_step(self) -> None:
        self._count_late()
        self._call(self.host.session.exchange_without_step)

    def _count_late(self) -> None:
        """Ranks that meet tell first what no boundary has counted."""
        if self._late_tokens:
            self.host.session.count(self._late_tokens)
            self._late_tokens = 0

    def _step(self, session: Session) -> bool:
        """Makes a step and its boundary. False: an exception came.

        An island's ranks have agreed at the boundary before whether they meet at this one. If not,
        the tokens of this step count at the next.
        """
        now = self.world.now
        tokens = self.trainee.step(session, now)
        meets = self._meets
        if not self._is_island:
            return self._call(lambda: session.boundary(tokens, 1.0, now), is_step=True)
        counted = self._late_tokens
        self._late_tokens = tokens
        if meets:
            counted += tokens
            self._late_tokens = 0
        is_whole = self._call(
            lambda: session.boundary(counted, 1.0, now, exchanges=meets),
            exchanges=meets,
            is_step=True,
        )
        self._meets = session.due(now)
        return is_whole

    def _call(
        self, decide: Callable[[], None], *, exchanges: bool = True, is_step: bool = False
    ) -> bool:
        """A boundary of the training thread, whose loop survives an exception and goes on. False:
        one came."""
        run = self.run
        if run.world.happens(run.share(run.plan.interrupted)):
            self._places_left = run.world.rng.randint(1, 8)
        is_whole = True
        try:
            self.boundary.perform(decide, run.world.now, exchanges=exchanges, is_step=is_step)
        except (Interrupted, MemoryError):
            is_whole = False
        self._places_left = 0
        run.checkers.came_back(self)
        return is_whole

    def reach(self) -> None:
        """A place where an exception may come out of an effect."""
        self._places_left -= 1
        if self._places_left == 0:
            raise self.world.rng.choice([Interrupted, MemoryError])

    # -- faults

    def broken(self) -> None:
        """The connection is made anew; the learner hears of it."""
        self.line.break_off()
        delay_s = self.world.rng.uniform(0.05, 0.5)
        hear = self._in_this_life(lambda: self.host.lost(self.world.now))
        self.world.after(delay_s, hear)

    def restart(self) -> None:
        """SIGKILL, and a new process at once."""
        if self.lives and not self.left:
            self.boot()

    def die(self, seconds: float) -> None:
        """SIGKILL, and a new process after so many seconds."""
        self.pool.alive = False
        self.line.break_off()
        self.line.freeze(seconds)
        self.world.after(seconds, self.boot)

    def freeze(self, seconds: float) -> None:
        """The process stands still."""
        self.line.freeze(seconds)

    def pause(self, seconds: float) -> None:
        """The loop evaluates the model."""
        self._pause("evaluating")
        self.world.after(seconds, self._in_this_life(lambda: self._pause(None)))

    def _pause(self, reason: str | None) -> None:
        self.boundary.perform(lambda: self.host.session.pause(reason), self.world.now)


class Simulation:
    """A broker and its learners. `finish` runs to the end and lets the checkers judge.

    `path` is the state directory. `spoil` is shown every store, host and boundary before it begins,
    and may plant a bug there.
    """

    def __init__(
        self, plan: Plan, path: Path, spoil: Callable[[object], None] = lambda part: None
    ) -> None:
        self.world = World(plan.seed)
        self.path = path
        self.plan = plan
        self.spoil = spoil
        self.config = load_broker(None, plan.settings)
        self.checkers = Checkers(self.world, path)
        self.host: Host | None = None
        self.finished = False
        self.sites = [Site(self, index, step_s) for index, step_s in enumerate(plan.steps_s)]
        self._wild: WildPeer | None = None
        self._backup = path.with_name(f"{path.name}-backup")
        self._end_kills = list(plan.end_kills)
        self._waiting: list[Callable[[], None]] = []
        """Messages at the sockets of a broker that reads its state."""
        self._boot(self.world.now)
        for site in self.sites:
            self.world.after(0.3 * site.index, site.boot)
        if plan.wild:
            self._wild = WildPeer(self.world, self.enter, LAYOUT, plan.ends / 2)
        for at, fault in plan.faults:
            self.world.after(at, partial(fault, self))

    def finish(self) -> None:
        """Raises Wrong with what the first checker found."""
        self.until(self.plan.ends + QUIET_S)
        self.checkers.finish(self.config, self.sites)
        self.store.close()

    def until(self, until_s: float) -> None:
        """Goes on until this time, or to the end of the run."""
        # What the broker sent last still arrives: it lingers.
        while self.world.now < until_s and not self.finished:
            self.world.run(min(self.world.now + 5.0, until_s))

    def contributors_mean(self) -> float:
        """Learners per merge, over all durable rounds; the run is over."""
        self.store.close()
        rounds = "SELECT count(*) FROM rounds WHERE version > 0"
        with closing(History(self.path)) as history:
            ((mean,),) = history.query(f"SELECT 1.0 * count(*) / ({rounds}) FROM contributions")
        return float(mean)

    # -- the broker's process

    def _boot(self, bound_at: float) -> None:
        """The replay is over. What waits at the sockets is read before anything else is done."""
        world = self.world
        store = Disk(self)
        self.store = store
        self.spoil(store)
        self.pool = VirtualPool(
            world, lambda _: self.enter(Host.turn), self.kill, slow=self.plan.slow_disk
        )
        nonce = f"{world.rng.getrandbits(32):08x}"
        host = Host(
            self.config, self, self.pool, store,
            lambda: world.now if store.is_read else bound_at, nonce,
            now_unix=lambda: world.now, reach=self.reach, on_note=self._noted,
        )  # fmt: skip
        self.spoil(host)
        self.checkers.booted(host)
        self.host = host
        while self._waiting:
            self._waiting.pop(0)()
        self._timer(host)

    def _noted(self, note: Note) -> None:
        if note.event == "stood_still":
            raise Wrong(f"invariants: no broker stands still here, but {note.text}")
        while note.event == "goal" and self._end_kills:
            self.world.after(self._end_kills.pop(), self.kill)

    def enter(self, call: Callable[..., object], *given: object) -> None:
        """Calls a method of the broker, with the time as its last argument; a broker that is dead
        hears of it in its next life. A crash place may end it."""
        host = self.host
        if host is None:
            self._waiting.append(partial(self.enter, call, *given))
        elif not self.finished:
            host.downlink.keep_listeners(
                lambda each: self.sites[each.descriptor].connection == each
            )
            try:
                call(host, *given, self.world.now)
            except Killed:
                self.kill()
            else:
                host.syncer.check()
                self.finished = host.finished is not None

    def _timer(self, host: Host) -> None:
        if host is not self.host:
            return
        self.enter(Host.turn)
        if host is self.host:
            wait_s = max(0.001, min(host.deadline(self.world.now) - self.world.now, 0.25))
            self.world.after(wait_s, lambda: self._timer(host))

    def reach(self, place: str) -> None:
        """A crash place: the broker may die here, as long as there are faults."""
        if self.world.happens(self.share(self.plan.crash_share)):
            raise Killed

    def share(self, of_faults: float) -> float:
        """A share of the plan as long as there are faults, then 0."""
        return of_faults if self.world.now <= self.plan.ends - 5 else 0.0

    def kill(self) -> None:
        """SIGKILL; another life binds at once and reads the same folder, which takes some time."""
        if self.host is None or self.finished:
            return
        self.checkers.killed()
        self.pool.alive = False
        self.host = None
        self.store.close()
        for site in self.sites:
            if site.lives:
                site.broken()
        replay_s = self.world.rng.choice(self.plan.replays_s)
        self.world.after(replay_s, partial(self._boot, self.world.now))

    # -- wires of the broker

    def control(self, peer: str, frames: list[bytes]) -> bool:
        if self._wild is not None and peer.startswith(WILD):
            self._wild.hear(frames)
        for site in self.sites:
            if site.peer == peer:
                site.line.in_order(
                    "control down", partial(site.receive, LearnerHost.control, frames)
                )
                return True
        return False

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        frames = [topic.encode(), header, payload]
        self.checkers.sent(frames, self.sites)
        _, *asked_by, _ = topic.split("/")
        for site in self.sites:
            if site.line.subscribed and asked_by in ([], [site.host.session.incarnation]):
                site.line.data(topic, partial(site.receive, LearnerHost.data, frames))
        return True

    # -- faults

    def copy(self) -> None:
        """A backup: the broker is killed, its folder copied."""
        if self.host is not None:
            self.kill()
            shutil.copytree(self.path, self._backup)

    def put_back(self) -> None:
        """The backup takes the place of what came after it."""
        if self.host is not None and self._backup.exists():
            self.kill()
            shutil.rmtree(self.path)
            shutil.copytree(self._backup, self.path)
            self.checkers.restored()
