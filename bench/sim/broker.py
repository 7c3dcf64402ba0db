"""A broker process in the simulator: a real Syncer, its shell without sockets and tensors.

Instead of parameters a fragment has a digest: that of version v + 1 follows from that of version
v and the contributions merged, so equal digests stand for equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from narrows.bench.sim.line import Frames
from narrows.bench.sim.payloads import Content, codec_for, decode_content, digest_of, encode_content
from narrows.bench.sim.published import SimulatedModel
from narrows.bench.sim.virtual import Clock, Faults, Host, Noted
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import EncodedVersion
from narrows.broker.process import Downlink, Subscriptions
from narrows.broker.syncer import Resumed, RunSecret, Syncer
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC
from narrows.proto.errors import ErrorCode
from narrows.proto.flow import wire_bytes
from narrows.proto.frames import decode_data, encode_control
from narrows.proto.socket_options import STREAM_WINDOW_BYTES

_SECRET = RunSecret(b"simulated secret of all brokers.."[:32])

EncodedDone = Callable[[EncodedVersion, float], None]


class SimulatedContributor(NamedTuple):
    """Whose push was merged."""

    learner: str
    incarnation: str
    push_id: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class SimulatedRound:
    """Version `version` of a fragment exists."""

    at_s: float
    epoch: msg.Epoch
    fragment: int
    version: int
    base: int
    """Digest of the version before."""
    digest: int
    contributors: tuple[SimulatedContributor, ...]
    live: int
    """Learners that were ready."""
    reason: str


class BrokerWorld(Protocol):
    """The simulation, as a broker process sees it."""

    def to_learner(self, peer: bytes, message: msg.ControlMessage, size: int) -> bool: ...
    def data_to_learner(self, topic: bytes, frames: Frames) -> None: ...
    def acknowledged_down(self, incarnation: str, positions: tuple[int, ...]) -> None: ...
    def broker_finished(self, reason: str) -> None: ...
    def record(self, record: object) -> None: ...


class SimulatedWires:
    """The downlink's socket: what it sends goes to the simulation."""

    def __init__(self, world: BrokerWorld) -> None:
        self.subscribed = Subscriptions()
        self._world = world

    def send_data(self, topic: bytes, header: bytes, payload: bytes) -> None:
        self._world.data_to_learner(topic, (topic, header, payload))


class SimulatedBroker(Host):
    """One life of the broker."""

    machine: Syncer

    def __init__(
        self,
        clock: Clock,
        random: Random,
        faults: Faults,
        world: BrokerWorld,
        config: BrokerConfig,
        *,
        epoch: msg.Epoch,
        durable: Resumed | None,
        window_bytes: int = STREAM_WINDOW_BYTES,
    ) -> None:
        syncer = Syncer(
            config, run_id="run", epoch=epoch, secret=_SECRET, now=clock.now, resumed=durable
        )
        super().__init__(clock, random, syncer)
        self.faults, self.world, self.syncer = faults, world, syncer
        self.durable = durable
        self.store: dict[int, Content] = {}
        self.busy: set[int] = set()
        """Payloads that are being decoded."""
        self._handle = 0
        heads = [(head.version, head.digest) for head in durable.heads] if durable else []
        self._model = SimulatedModel(heads)
        self._wires = SimulatedWires(world)
        self.downlink = Downlink(
            self._wires, syncer.state, {}, self._encode_state, self._warn,
            window_bytes=window_bytes,
        )  # fmt: skip
        self._perform: dict[type, Callable[..., None]] = {
            ev.Send: self._send,
            ev.Unpack: self._unpack,
            ev.Drop: self._drop_payloads,
            ev.Found: self._found,
            ev.StartMerge: self._merge,
            ev.Publish: self._publish,
            ev.Admit: self._admit,
            ev.Acknowledge: self._acknowledge,
            ev.Forget: self._forget,
            ev.Erase: self._erase,
            ev.LogFate: self._ignore,
            ev.RatesChanged: self._set_rates,
            ev.WriteCheckpoint: self._checkpoint,
            ev.Finish: self._finish,
            ev.Note: self._note,
        }
        self.arm()

    def handle(self, event: ev.Event) -> None:
        effects = self.syncer.handle(event, now=self.clock.now)
        self.syncer.check()
        for effect in effects:
            self._perform[type(effect)](effect)
        self.pump()
        self.arm()

    def reach_deadline(self) -> None:
        self.handle(ev.DeadlineReached())

    def pump(self) -> None:
        self.downlink.pump(self.clock.now)

    def pump_at(self) -> float | None:
        return self.downlink.hub.next_deadline(self.clock.now)

    def receive(self, peer: bytes, message: msg.ControlMessage, address: str, size: int) -> None:
        """A control message of so many bytes has come."""
        member = self.syncer.state.roster.by_peer(peer)
        sent = self.downlink.sent(member.name) if member is not None else ()
        self.handle(ev.Received(peer, message, address, sent=sent))
        member = self.syncer.state.roster.by_peer(peer)
        if member is not None:
            self.downlink.hub.received(member.name, size, self.clock.now)

    def receive_data(self, frames: Frames) -> None:
        header, payload = decode_data(frames)
        self._handle += 1
        self.store[self._handle] = decode_content(payload)
        size = sum(map(len, frames))
        if self.syncer.state.roster.get(header.learner) is not None:
            self.downlink.hub.received(header.learner, size, self.clock.now)
        self.handle(ev.ChunkArrived(header, self._handle, size))

    def subscribe(self, topics: Set[bytes]) -> None:
        """A learner process listens to its streams, perhaps again."""
        for topic in topics:
            self._wires.subscribed.take(b"\1" + topic)
        self.downlink.reconnect(topics, self.clock.now)
        self.pump()
        self.arm()

    def _work(self, done: Callable[[], ev.Event]) -> None:
        """Slow work on the pool: its event comes later."""
        delay_s = self.random.uniform(*self.faults.work_s)
        self.later(delay_s, lambda: self.handle(done()))

    def _fails(self) -> bool:
        return self.clock.now < self.faults.until_s and self.random.random() < self.faults.damage

    def _drop_payloads(self, effect: ev.Drop) -> None:
        self._drop(effect.handles)

    def _drop(self, handles: tuple[int, ...]) -> None:
        for handle in handles:
            self.store.pop(handle, None)

    def _send(self, effect: ev.Send) -> None:
        member = self.syncer.state.roster.by_peer(effect.peer)
        size = len(encode_control(effect.message))
        if member is not None:
            self.downlink.hub.charge(member.name, wire_bytes(size), self.clock.now)
        if not self.world.to_learner(effect.peer, effect.message, size):
            self.later(0.0, lambda: self.handle(ev.PeerLost(effect.peer)))

    def _unpack(self, effect: ev.Unpack) -> None:
        header, handle = effect.header, effect.handle
        damaged = header.kind is msg.DataKind.PUSH and self._fails()
        self.busy.add(handle)

        def done() -> ev.Event:
            self.busy.remove(handle)
            if damaged:
                return ev.ChunkDamaged(header, handle, ErrorCode.BAD_PAYLOAD, "by the simulator")
            return ev.ChunkUnpacked(header, handle)

        self._work(done)

    def _found(self, effect: ev.Found) -> None:
        assert effect.handles is not None
        handles = effect.handles
        digests: list[int] = []
        for part in handles:
            results = {self.store[handle].result for handle in part}
            assert len(results) == 1, "version 0 is made of two founders' chunks"
            digests.append(results.pop())

        def done() -> ev.Event:
            for part in handles:
                self._drop(part)
            self._model.heads = [(0, digest) for digest in digests]
            return ev.Founded(tuple(digests))

        self._work(done)

    def _merge(self, effect: ev.StartMerge) -> None:
        version, before = self._model.heads[effect.fragment]
        assert effect.version == version + 1
        for done in effect.contributions:
            contents = {self.store[handle] for handle in done.handles}
            source = f"{done.learner}/{done.incarnation}/{done.push_id}"
            assert contents == {Content(source, before, 0)}, (contents, source, before)
        handles = tuple(h for done in effect.contributions for h in done.handles)
        who = tuple(
            SimulatedContributor(c.learner, c.incarnation, c.push_id, c.tokens, c.steps)
            for c in effect.contributions
        )
        live, failed = len(self.syncer.state.roster.ready()), self._fails()

        def merged() -> ev.Event:
            self._drop(handles)
            if failed:
                return ev.MergeFailed(effect.fragment, "failed by the simulator")
            digest = digest_of(before, who)
            content = Content("", before, digest)
            self._model.publish(
                effect.fragment, self._encode(effect.fragment, effect.version, content)
            )
            now, fragment, version = self.clock.now, effect.fragment, effect.version
            epoch, why = self.syncer.state.epoch, effect.reason
            self.world.record(
                SimulatedRound(now, epoch, fragment, version, before, digest, who, live, why)
            )
            return self._judged(ev.Merged(fragment, version, digest, 0))

        self._work(merged)

    def _judged(self, merged: ev.Merged) -> ev.Merged:
        """The event with what the watch says. Pushes without values give it nothing to judge."""
        return merged

    def _checkpoint(self, _: ev.WriteCheckpoint) -> None:
        state = self.syncer.state
        stored = state.phase.stored
        phase = msg.Phase.RUNNING if stored is msg.Phase.FOUNDING else stored
        heads = tuple(msg.FragmentHead(*head) for head in self._model.heads)
        tokens, parts = divmod(state.clock.units, state.clock.fragments)
        pushes = dict(state.merged_pushes)
        snapshot = Resumed(
            state.layout, state.frozen_digest, heads, tokens, phase, pushes, token_parts=parts
        )
        failed = self._fails()

        def done() -> ev.Event:
            if failed:
                return ev.CheckpointFailed("no space left on the simulated device")
            self.durable = snapshot
            return ev.CheckpointWritten(sum(head.version for head in heads))

        self._work(done)

    def _ignore(self, fate: ev.LogFate) -> None:
        """The simulated broker keeps no journal."""

    def _finish(self, effect: ev.Finish) -> None:
        self.alive = False
        self.world.broker_finished(effect.reason)

    # The downlink.

    def _encode(self, fragment: int, version: int, content: Content) -> EncodedVersion:
        """A publication, or a state if it builds on nothing."""
        part, settings = self.syncer.state.table[fragment], self.syncer.state.settings
        codec = codec_for(settings.publish_codec) if content.base else STATE_CODEC
        chunks = encode_content(content, part, settings, codec)
        return EncodedVersion(version, content.result, codec, 0.0, chunks)

    def _encode_state(self, fragment: int, done: EncodedDone) -> None:
        version, digest = self._model.heads[fragment]
        state = self._encode(fragment, version, Content("", 0, digest))

        def finish() -> None:
            done(state, self.clock.now)
            self.pump()
            self.arm()

        self.later(self.random.uniform(*self.faults.work_s), finish)

    def _admit(self, effect: ev.Admit) -> None:
        self.downlink.admit(effect.learner, effect.incarnation)
        # What an earlier session has sent to this process counts as arrived or lost.
        begins_at = self.downlink.hub.senders[effect.learner].positions
        self.world.acknowledged_down(effect.incarnation, begins_at)

    def _forget(self, effect: ev.Forget) -> None:
        self.downlink.forget(effect.learner)

    def _erase(self, effect: ev.Erase) -> None:
        self.downlink.erase(effect.learner)

    def _set_rates(self, effect: ev.RatesChanged) -> None:
        self.downlink.set_rates(effect.wan, self.clock.now)

    def _acknowledge(self, effect: ev.Acknowledge) -> None:
        sender = self.downlink.hub.senders.get(effect.learner)
        if sender is not None:
            self.world.acknowledged_down(sender.incarnation, effect.positions)
        self.downlink.acknowledge(effect.learner, effect.positions, self.clock.now)

    def _publish(self, effect: ev.Publish) -> None:
        self.downlink.publish(effect, self._model, self.clock.now)

    def _note(self, effect: ev.Note) -> None:
        self.world.record(Noted(self.clock.now, "broker", effect.level, effect.text))

    def _warn(self, text: str) -> None:
        self.world.record(Noted(self.clock.now, "broker", "warning", text))
