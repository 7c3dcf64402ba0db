"""A broker process in the simulator: a real Syncer, its shell without sockets and tensors.

Instead of parameters a fragment has a digest: that of version v + 1 follows from that of version
v and the contributions merged, so equal digests stand for equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

import xxhash

from narrows.bench.sim.virtual import Clock, Faults, Host, Noted
from narrows.broker.config import BrokerConfig
from narrows.broker.syncer import Resumed, Syncer
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.flow import Lane, Outbox
from narrows.proto.limits import PROTOCOL, PUBLICATIONS_KEPT

MESSAGE_BYTES = 1000
WINDOW_BYTES = 16_000


class SimulatedContributor(NamedTuple):
    """Whose push was merged."""

    learner: str
    incarnation: str
    push_id: int
    tokens: int
    steps: int


def digest_of(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(parts).encode())


class Content(NamedTuple):
    """What a payload stands for."""

    source: str
    """Incarnation of a founder; name and push of a contributor; "" from the broker."""
    base: int
    """Digest of the published copy that it builds on, 0: none."""
    result: int
    """Digest of the published copy that it makes, 0 for a push."""


class SimulatedParcel(NamedTuple):
    """A data message that waits in an outbox."""

    kind: msg.DataKind
    fragment: int
    version: int
    push_id: int
    offset: int
    elements: int
    codec: str
    content: Content

    def header(
        self, run: tuple[str, msg.Epoch], learner: tuple[str, str], place: tuple[int, int]
    ) -> msg.Header:
        """Header for (run id, epoch), (learner, incarnation) and (stream, position)."""
        return msg.Header(
            protocol=PROTOCOL,
            run_id=run[0],
            epoch=run[1],
            kind=self.kind,
            learner=learner[0],
            incarnation=learner[1],
            fragment=self.fragment,
            version=self.version,
            push_id=self.push_id,
            offset=self.offset,
            count=self.elements,
            codec=self.codec,
            payload_digest=digest_of(self.content, self.offset),
            result_digest=self.content.result,
            stream=place[0],
            position=place[1],
        )


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
    """What a broker process needs of the simulation."""

    def to_learner(self, peer: bytes, message: msg.ControlMessage) -> bool: ...
    def data_to_learner(self, header: msg.Header, content: Content) -> None: ...
    def broker_finished(self, reason: str) -> None: ...
    def record(self, record: object) -> None: ...


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
    ) -> None:
        syncer = Syncer(config, run_id="run", epoch=epoch, now=clock.now, resumed=durable)
        super().__init__(clock, random, syncer)
        self.faults, self.world, self.syncer = faults, world, syncer
        self.durable = durable
        self.store: dict[int, Content] = {}
        self.busy: set[int] = set()
        """Payloads that are being decoded."""
        self._handle = 0
        self._model = [(head.version, head.digest) for head in durable.heads] if durable else []
        self._kept: dict[tuple[int, int], Content] = {}
        self._outboxes: dict[str, tuple[str, Outbox[SimulatedParcel]]] = {}
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
            ev.Erase: self._ignore,
            ev.LogFate: self._ignore,
            ev.RatesChanged: self._ignore,
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
        self._pump()
        self.arm()

    def reach_deadline(self) -> None:
        self.handle(ev.DeadlineReached())

    def receive_data(self, header: msg.Header, content: Content) -> None:
        self._handle += 1
        self.store[self._handle] = content
        self.handle(ev.ChunkArrived(header, self._handle))

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
        if not self.world.to_learner(effect.peer, effect.message):
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
            self._model = [(0, digest) for digest in digests]
            return ev.Founded(tuple(digests))

        self._work(done)

    def _merge(self, effect: ev.StartMerge) -> None:
        version, before = self._model[effect.fragment]
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
            self._model[effect.fragment] = (effect.version, digest)
            self._kept[effect.fragment, effect.version] = Content("", before, digest)
            self._kept.pop((effect.fragment, effect.version - PUBLICATIONS_KEPT), None)
            epoch = self.syncer.state.epoch
            self.world.record(
                SimulatedRound(
                    self.clock.now,
                    epoch,
                    effect.fragment,
                    effect.version,
                    before,
                    digest,
                    who,
                    live,
                    effect.reason,
                )
            )
            return ev.Merged(effect.fragment, effect.version, digest, 0)

        self._work(merged)

    def _checkpoint(self, _: ev.WriteCheckpoint) -> None:
        state = self.syncer.state
        stored = state.phase.stored
        phase = msg.Phase.RUNNING if stored is msg.Phase.FOUNDING else stored
        heads = tuple(msg.FragmentHead(*head) for head in self._model)
        tokens = state.clock.run_tokens
        pushes = dict(state.merged_pushes)
        snapshot = Resumed(state.layout, state.frozen_digest, heads, tokens, phase, pushes)
        failed = self._fails()

        def done() -> ev.Event:
            if failed:
                return ev.CheckpointFailed("no space left on the simulated device")
            self.durable = snapshot
            return ev.CheckpointWritten(sum(head.version for head in heads))

        self._work(done)

    def _ignore(self, _: ev.Erase | ev.LogFate | ev.RatesChanged) -> None:
        """The simulated broker keeps no journal, and its lines are wide."""

    def _finish(self, effect: ev.Finish) -> None:
        self.alive = False
        self.world.broker_finished(effect.reason)

    # The downlink.

    def _admit(self, effect: ev.Admit) -> None:
        outbox = Outbox[SimulatedParcel](self.syncer.state.settings.streams, WINDOW_BYTES)
        self._outboxes[effect.learner] = (effect.incarnation, outbox)

    def _note(self, effect: ev.Note) -> None:
        self.world.record(Noted(self.clock.now, "broker", effect.level, effect.text))

    def _forget(self, effect: ev.Forget) -> None:
        self._outboxes.pop(effect.learner, None)

    def _acknowledge(self, effect: ev.Acknowledge) -> None:
        if effect.learner in self._outboxes:
            self._outboxes[effect.learner][1].acknowledge(effect.positions, self.clock.now)

    def _publish(self, effect: ev.Publish) -> None:
        state = self.syncer.state
        if effect.learner not in self._outboxes:
            return
        outbox = self._outboxes[effect.learner][1]
        version, ranges = effect.version, effect.ranges
        if effect.kind is msg.DataKind.STATE:
            newest, digest = self._model[effect.fragment]
            ranges = ranges if version == newest else ()
            version, content, lane = newest, Content("", 0, digest), Lane.STATE
        else:
            content, lane = self._kept[effect.fragment, version], Lane.FRAGMENT
        outbox.discard(lambda p: p[:3] == (effect.kind, effect.fragment, version))
        for offset, count in state.table[effect.fragment].chunks(state.settings.chunk_elements):
            if not ranges or any(o < offset + count and offset < o + c for o, c in ranges):
                parcel = SimulatedParcel(
                    effect.kind, effect.fragment, version, effect.push_id, offset, count,
                    state.settings.publish_codec, content,
                )  # fmt: skip
                outbox.put(parcel, MESSAGE_BYTES, lane)

    def _pump(self) -> None:
        state = self.syncer.state
        for learner, (incarnation, outbox) in self._outboxes.items():
            outbox.renew_stalled(self.clock.now)
            while (departure := outbox.take(self.clock.now)) is not None:
                parcel, *place = departure
                run, addressee = (state.run_id, state.epoch), (learner, incarnation)
                header = parcel.header(run, addressee, (place[0], place[1]))
                self.world.data_to_learner(header, parcel.content)
