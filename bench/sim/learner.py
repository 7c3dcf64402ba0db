"""A learner process in the simulator: a real Session, its shell without sockets and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from narrows.bench.sim.line import Frames, LineSpec
from narrows.bench.sim.payloads import Content, codec_for, decode_content, digest_of, encode_content
from narrows.bench.sim.records import AdoptionRecord, Failed, Installed
from narrows.bench.sim.virtual import Clock, Faults, Host, Noted
from narrows.learner.session import Identity, Session
from narrows.learner.session import events as ev
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC
from narrows.proto.flow import Parcel, Sender, wire_bytes
from narrows.proto.fragments import Fragment
from narrows.proto.frames import UPLINK_TOPIC, decode_data, encode_control

TORN = (-1, 0)
"""In place of version and digest: the parameters hold a part of what was to be adopted."""

IDLE_S = 0.1
"""The training thread looks around so often while it waits."""


@dataclass(frozen=True)
class LearnerSpec:
    """One learner: its name stays, its processes come and go."""

    name: str
    step_s: float = 0.5
    tokens_per_step: int = 100
    joins_at_s: float = 0.0
    contribute_after_steps: int = 0
    leaves_after_steps: int = 0
    """Its loop ends after so many steps; 0: at the end of the run."""
    line: LineSpec = field(default_factory=LineSpec)


class LearnerWorld(Protocol):
    """The simulation, as a learner process sees it."""

    @property
    def window_bytes(self) -> int: ...
    def to_broker(
        self, learner: SimulatedLearner, message: msg.ControlMessage, size: int
    ) -> bool: ...
    def data_to_broker(self, learner: SimulatedLearner, stream: int, frames: Frames) -> None: ...
    def open_streams(self, learner: SimulatedLearner) -> None: ...
    def acknowledged_up(self, learner: SimulatedLearner, positions: tuple[int, ...]) -> None: ...
    def learner_ended(self, learner: SimulatedLearner) -> None: ...
    def record(self, record: object) -> None: ...


@dataclass
class _Push:
    fragment: int
    base_version: int
    content: Content
    sent: list[Parcel]


class SimulatedLearner(Host):
    """One incarnation of a learner."""

    machine: Session

    def __init__(
        self,
        clock: Clock,
        random: Random,
        faults: Faults,
        world: LearnerWorld,
        spec: LearnerSpec,
        layout: tuple[msg.LayoutEntry, ...],
    ) -> None:
        incarnation = self.incarnation = f"{random.getrandbits(128):032x}"
        identity = Identity(spec.name, incarnation, layout, 0)
        ramp_steps = spec.contribute_after_steps
        session = Session(identity, jitter=random.random, contribute_after_steps=ramp_steps)
        super().__init__(clock, random, session)
        self.faults, self.world, self.spec, self.session = faults, world, spec, session
        self.store: dict[int, Content] = {}
        self.parameters: dict[int, tuple[int, int]] = {}
        """(version, digest) adopted by fragment."""
        self.published: dict[int, tuple[int, int]] = {}
        self.blocked_s = 0.0
        """Time in which the training loop had to wait after it had begun."""
        self._handle = 0
        self._applied: dict[tuple[int, int], int] = {}
        self._pushes: dict[int, _Push] = {}
        self.sender = Sender(
            spec.name, incarnation, topic=lambda _: UPLINK_TOPIC, window_bytes=world.window_bytes
        )
        self.up_bits_per_s = 0.0
        """Rate that the broker has told it to keep to; 0: no limit."""
        self._table: tuple[Fragment, ...] = ()
        self._paused_until = 0.0
        self._perform: dict[type, Callable[..., None]] = {
            ev.Send: self._send,
            ev.OpenStreams: self._open_streams,
            ev.Identify: self._identify,
            ev.SendFounding: self._send_founding,
            ev.Apply: self._apply,
            ev.Install: self._install,
            ev.Drop: self._drop,
            ev.Adopt: self._adopt,
            ev.Snapshot: self._snapshot,
            ev.Resend: self._resend,
            ev.SettlePush: self._settle,
            ev.Acknowledge: self._acknowledge,
            ev.Redial: self._ignore,
            ev.SetRate: self._set_rate,
            ev.Fail: self._fail,
            ev.Left: self._left,
            ev.Note: self._note,
        }
        self.arm()
        self.later(0.0, self._train)

    def handle(self, event: ev.Event) -> None:
        effects = self.session.handle(event, now=self.clock.now)
        self.session.check()
        failed: list[ev.Copy] = []
        for effect in effects:
            if isinstance(effect, ev.Copy) and self._copy_fails():
                failed.append(effect)
                if isinstance(effect, ev.Adopt):
                    self.parameters[effect.fragment] = TORN
            else:
                self._perform[type(effect)](effect)
        for copy in failed:
            self.handle(ev.CopyFailed(copy, "MemoryError: simulated"))
        self.pump()
        self.arm()

    def pump(self) -> None:
        if self.session.online:
            for datagram in self.sender.due(self.clock.now):
                self.world.data_to_broker(self, datagram.stream, datagram.frames)

    def pump_at(self) -> float | None:
        return self.sender.next_deadline(self.clock.now) if self.session.online else None

    def reach_deadline(self) -> None:
        self.handle(ev.DeadlineReached())

    def receive(self, message: msg.ControlMessage, size_bytes: int) -> None:
        """A control message of so many bytes has come."""
        self.sender.received(size_bytes, self.clock.now)
        self.handle(ev.Received(message))

    def receive_data(self, frames: Frames) -> None:
        header, payload = decode_data(frames)
        self._handle += 1
        self.store[self._handle] = decode_content(payload)
        self.sender.received(sum(map(len, frames)), self.clock.now)
        self.handle(ev.ChunkDecoded(header, self._handle))

    def hear_subscriptions(self, *, is_heard: bool) -> None:
        """The broker listens to every stream from now on, perhaps again, or it has gone."""
        self.sender.is_heard = is_heard
        if is_heard:
            for stream in self.sender.dead:
                self.sender.reconnect(stream, self.clock.now)
            self.pump()
            self.arm()

    def pause(self, seconds: float) -> None:
        """The training thread evaluates for a while."""
        if self.session.fragments.ready and self.clock.now >= self._paused_until:
            self._paused_until = self.clock.now + seconds
            self.handle(ev.Paused("evaluating"))

    # The training loop.

    def _train(self) -> None:
        session, now = self.session, self.clock.now
        if now < self._paused_until:
            self.later(self._paused_until - now, self._train)
            return
        if self._paused_until:
            self._paused_until = 0.0
            self.handle(ev.Continued())
        limit, view, asked = self.spec.leaves_after_steps, session.view(), session.leaving.asked
        over = view.should_stop or (limit and view.steps >= limit)
        if not view.ready or view.must_wait(now) or over or asked:
            ends = over and view.ready and not asked
            self.handle(ev.LoopEnded() if ends else ev.BoundaryReached())
            self.blocked_s += IDLE_S if session.fragments.ready and not over else 0.0
            self.later(IDLE_S, self._train)
        else:
            self.later(self.step_lasts_s(), self._step)

    def step_lasts_s(self) -> float:
        """How long the step that begins now will take."""
        return self.spec.step_s * self.random.uniform(0.9, 1.1)

    def step_tokens(self) -> int:
        """Tokens of the step that ends now."""
        return self.spec.tokens_per_step

    def _step(self) -> None:
        self.handle(ev.StepTaken(self.step_tokens()))
        if self.alive:
            self._train()

    def _adopt(self, effect: ev.Adopt) -> None:
        version, digest = self.published[effect.fragment]
        assert version == effect.version, (version, effect)
        self.parameters[effect.fragment] = (version, digest)
        self.world.record(AdoptionRecord(*self._where(), effect.fragment, version, digest))

    def _snapshot(self, effect: ev.Snapshot) -> None:
        version, digest = self.parameters[effect.fragment]
        assert version == effect.base_version, (version, effect)
        assert self.published[effect.fragment] == (version, digest)
        source = f"{self.spec.name}/{self.incarnation}/{effect.push_id}"
        push = _Push(effect.fragment, version, Content(source, digest, 0), [])
        self._pushes[effect.push_id] = push
        reason = "not finite" if self._fails() else self.encode(effect)
        if reason:
            self._work(lambda: self.handle(ev.EncodeFailed(effect.push_id, reason)))
        else:
            self._work(lambda: self._encoded(effect.push_id))

    def encode(self, effect: ev.Snapshot) -> str:
        """Why the snapshot cannot be sent, "" if it can."""
        return ""

    def _send(self, effect: ev.Send) -> None:
        size = len(encode_control(effect.message))
        if self.world.to_broker(self, effect.message, size):
            self.sender.charge(wire_bytes(size), self.clock.now)

    def _acknowledge(self, effect: ev.Acknowledge) -> None:
        self.world.acknowledged_up(self, effect.positions)
        self.sender.acknowledge(effect.positions, self.clock.now)

    def _set_rate(self, effect: ev.SetRate) -> None:
        self.up_bits_per_s = effect.bits_per_s
        self.sender.set_rate(effect.bits_per_s, self.clock.now)

    def _ignore(self, _: ev.Redial) -> None:
        """The simulated lines never look alive only."""

    def _left(self, _: ev.Left) -> None:
        self.alive = False
        self.world.learner_ended(self)

    def _note(self, effect: ev.Note) -> None:
        self.world.record(Noted(self.clock.now, self.spec.name, effect.level, effect.text))

    def _where(self) -> tuple[float, str, str, msg.Epoch]:
        return self.clock.now, self.spec.name, self.incarnation, self.session.epoch

    def _work(self, action: Callable[[], None]) -> None:
        self.later(self.random.uniform(*self.faults.work_s), action)

    def _copy_fails(self) -> bool:
        share = self.faults.copies
        return share > 0 and self.clock.now < self.faults.until_s and self.random.random() < share

    def _fails(self) -> bool:
        return self.clock.now < self.faults.until_s and self.random.random() < self.faults.damage

    # Down.

    def _apply(self, effect: ev.Apply) -> None:
        contents = {self.store[handle] for handle in effect.handles}
        # A publication builds on the copy before, a state on nothing.
        builds = effect.kind is msg.DataKind.PUBLICATION
        base = self.published[effect.fragment][1] if builds else 0
        fits = contents == {Content("", base, effect.digest)} and not self._fails()

        def done() -> None:
            told = (effect.fragment, effect.version, effect.digest)
            if fits:
                self._applied[effect.fragment, effect.version] = effect.digest
            self.handle(ev.Applied(*told) if fits else ev.ApplyFailed(*told))

        self._work(done)

    def _install(self, effect: ev.Install) -> None:
        digest = self._applied.pop((effect.fragment, effect.version))
        self.published[effect.fragment] = (effect.version, digest)
        self.world.record(Installed(*self._where(), effect.fragment, effect.version, digest))

    def _drop(self, effect: ev.Drop) -> None:
        for handle in effect.handles:
            self.store.pop(handle, None)

    # Up.

    def _open_streams(self, effect: ev.OpenStreams) -> None:
        is_first = not self._table
        self._table = effect.table
        self.sender.open_streams(effect.settings.streams)
        if is_first:
            self.world.open_streams(self)

    def _identify(self, effect: ev.Identify) -> None:
        self.sender.identify(effect.run_id, effect.epoch)

    def _parcels(
        self, kind: msg.DataKind, fragment: int, version: int, push_id: int, content: Content
    ) -> list[Parcel]:
        settings = self.session.settings
        assert settings is not None
        is_state = kind is msg.DataKind.FOUND
        codec = STATE_CODEC if is_state else codec_for(settings.push_codec)
        chunks = encode_content(content, self._table[fragment], settings, codec)
        return [Parcel(kind, fragment, version, push_id, codec, chunk) for chunk in chunks]

    def _send_founding(self, effect: ev.SendFounding) -> None:
        digest = digest_of("version 0", self.incarnation, effect.fragment)
        content = Content(self.incarnation, 0, digest)
        parcels = self._parcels(msg.DataKind.FOUND, effect.fragment, 0, 0, content)
        self.sender.put_again(parcels, effect.ranges, self.clock.now)

    def _encoded(self, push_id: int) -> None:
        push = self._pushes.get(push_id)
        if push is None:
            return  # Settled meanwhile.
        kind = msg.DataKind.PUSH
        push.sent = self._parcels(kind, push.fragment, push.base_version, push_id, push.content)
        for parcel in push.sent:
            self.sender.put(parcel)
        self.pump()
        self.arm()

    def _resend(self, effect: ev.Resend) -> None:
        push = self._pushes.get(effect.push_id)
        if push is not None and effect.ranges:
            self.sender.put_again(push.sent, effect.ranges, self.clock.now)

    def _settle(self, effect: ev.SettlePush) -> None:
        if self._pushes.pop(effect.push_id, None) is not None:
            self.sender.discard(lambda parcel: parcel.push_id == effect.push_id)

    def _fail(self, effect: ev.Fail) -> None:
        self.alive = False
        self.world.record(Failed(self.clock.now, self.spec.name, self.incarnation, effect.error))
        self.world.learner_ended(self)
