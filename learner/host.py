"""Performs a learner's decisions over three ports: wires, a pool of workers, and an island.

It has no socket, thread or clock of its own, so the simulator runs the same code. The caller holds
the learner's lock in every call. learner/boundary.py calls the session on the training thread, asks
for the `tasks` that follow for the parameters, and hands their results back. Then it calls
`perform`, but after an inner step only if there are effects. Everything else is called from the
loop. To decode, digest, encode and send belongs to the pool and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from msgspec import structs

from narrows.learner import effects as do
from narrows.learner.session import Session
from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.codec import (
    F32,
    EncodedChunk,
    Spread,
    assemble,
    encode_values,
    recut,
)
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, fault
from narrows.proto.flow import Sender
from narrows.proto.layout import Fragment, check_layout, differences
from narrows.proto.messages import LOSSLESS, DataKind, Header
from narrows.proto.ports import Adoption, CodedPush, CodingPool, Copy, Island, Prepared, Wires

SENDS_PER_TURN: Final = 16
"""Data messages that leave before the training thread may have the lock."""

PREPARED_MAX: Final = 2
"""Adoptions that are prepared ahead: at most two rounds are in flight. Each takes 4 bytes an
element; with a hand-over of momentum 8, or 4 if it is the new copy itself because nothing is kept.
A learner that makes no steps for a while would prepare its whole model."""


@dataclass(eq=False)
class Ahead:
    """An adoption that a worker prepares before its boundary."""

    rule: Adoption
    prepared: Prepared | None = None
    """None: not yet."""


class LearnerHost:
    """One learner, whose `session` decides.

    Hooks, which a checker or a log replaces: `saw(header, published)` when a published copy is
    complete, `noted(note)` for each line of the log.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        layout: msg.Layout,
        island: Island,
        wires: Wires,
        pool: CodingPool,
        now: float,
        *,
        curve: bool = False,
    ) -> None:
        self.session = Session(name, incarnation, layout, now)
        self.sender = Sender(curve=curve)
        """The uplink's queue; the link sets `ready` once the broker has subscribed."""
        self.island = island
        """The host calls its `copy` on workers; the rest is for the training thread."""
        self.saw: Callable[[Header, F32], None] = lambda header, published: None
        self.noted: Callable[[do.Note], None] = lambda note: None
        self.payloads: dict[tuple[int, DataKind, int], dict[int, tuple[Header, bytes]]] = {}
        """Chunks that wait for the others of their transfer: by fragment, kind and version."""
        self.tips: dict[int, Copy] = {}
        """By fragment, the newest published copy that is whole here."""
        self.pushes: dict[tuple[int, int], CodedPush] = {}
        """By fragment and push id, until the session has done with the push."""
        self.ahead: dict[int, Ahead] = {}
        """By fragment, the adoption that its next boundary will make, as far as is known."""
        self.seeds: dict[int, list[EncodedChunk] | None] = {}
        """Fragments of version 0 that the broker wants, as coded; None: not yet."""
        self._wires = wires
        self._pool = pool
        self._bases: dict[int, Copy] = {}
        """By fragment, the published copy that the parameters stand on."""
        self._seeding = False
        """A worker encodes a fragment of version 0."""
        self._epoch = ""

    # Events on the loop.

    def control(self, frames: list[bytes], now: float) -> None:
        """A control message of the broker, as it came."""
        self.sender.received([len(frame) for frame in frames], now)
        try:
            message = wire.decode_control(frames, msg.CONTROL_BYTES_MAX)
        except RemoteProtocolError as error:
            self._refuse(error)
            if error.code is ErrorCode.PROTOCOL_VERSION:
                self.session.refuse(error.code, error)
            return
        if isinstance(message, msg.Refuse) and message.layout:
            message = _explained(message, self.session.layout)
        self.session.control(message, now)
        self.turn(now)

    def data(self, frames: list[bytes], now: float) -> None:
        """A data message of the downlink, as it came: topic, header, payload. `turn` follows: once
        for all messages that came together, since it costs several times as much as a message."""
        self.sender.received([len(frame) for frame in frames], now)
        try:
            header = _checked_header(frames)
        except RemoteProtocolError as error:
            self._refuse(error)
            return
        if self.session.chunk(header, now):
            key = (header.fragment, header.kind, header.version)
            self.payloads.setdefault(key, {})[header.chunk] = (header, frames[2])

    def turn(self, now: float) -> None:
        """The time has come, or a socket has room: sends what may leave."""
        self.perform(now)
        self._prepare(now)
        self._pump(now)

    def deadline(self, now: float) -> float:
        """When `turn` has something to do if nothing happens."""
        return min(self.session.deadline(now), self.sender.deadline(now))

    def lost(self, now: float) -> None:
        """There is a connection to the broker, the first or a new one."""
        self.session.lost(now)
        self.perform(now)

    # The training thread: what it does between two steps, and what it hands back.

    def tasks(self) -> list[do.Task]:
        """All adoptions and snapshots that are decided, each with what it needs. If there is none,
        a fragment of version 0 is read that the broker wants."""
        tasks: list[do.Task] = []
        bases = dict(self._bases)  # As they are once the tasks before are done.
        for effect in self.session.effects:
            match effect:
                case do.Snapshot(index):
                    tasks.append(do.TakeSnapshot(effect, self._fragment(index), bases[index]))
                case do.Adopt(index):
                    rule = self._rule(effect, bases)
                    bases[index] = rule.new
                    ahead = self.ahead.pop(index, None)  # A worker that has not begun need not.
                    prepared = None
                    if ahead is not None and ahead.rule == rule:
                        prepared = ahead.prepared
                    tasks.append(do.Move(effect, self._fragment(index), rule, prepared))

        # One at a time, because a lossless model is large; the next follows at the next call.
        wanted = [index for index, seed in self.seeds.items() if seed is None]
        if wanted and not tasks and not self._seeding:
            tasks.append(do.Read(self._fragment(wanted[0])))
        return tasks

    def _rule(self, effect: do.Adopt, bases: Mapping[int, Copy]) -> Adoption:
        index = effect.fragment
        settings = self.session.settings
        new = self.tips[index]
        # Version 0 is nobody's movement.
        share = settings.handover if effect.base > 0 else 0.0
        steps = settings.sync_period_steps * (effect.version - effect.base)
        # An adoption that keeps nothing, such as the first, needs no old copy.
        old = bases[index] if effect.keep > 0 or share > 0 else new
        push = self.pushes[index, effect.push_id] if effect.push_id else None
        return Adoption(old, new, push, effect.keep, effect.merged, share, steps)

    def _prepare(self, now: float) -> None:
        """A worker computes what the next boundary will adopt, so that the training thread performs
        the last pass alone. Where the rule is another one at the boundary, as when the share that
        it keeps has changed, that thread prepares it anew."""
        foreseen: dict[int, Adoption] = {}
        if not self.session.effects:  # Else a task is under way that moves bases.
            for effect in self.session.foreseen(now)[:PREPARED_MAX]:
                foreseen[effect.fragment] = self._rule(effect, self._bases)
        self.ahead = {
            index: each for index, each in self.ahead.items() if foreseen.get(index) == each.rule
        }
        for index, rule in foreseen.items():
            if index not in self.ahead:
                ahead = self.ahead[index] = Ahead(rule)
                self._pool.run(partial(self._prepare_ahead, index, ahead), self._prepared)

    def _prepare_ahead(self, index: int, ahead: Ahead) -> None:
        """On a worker: a boundary takes the result as soon as it is there."""
        if self.ahead.get(index) is ahead:  # Else it is adopted, or stale.
            ahead.prepared = self.island.prepare(self._fragment(index), ahead.rule)

    def _prepared(self, result: BaseException | None, now: float) -> None:
        if result is not None:
            self._refuse(result)  # The training thread prepares it.

    def adopted(self, effect: do.Adopt, new: Copy) -> None:
        """The parameters of the fragment have moved to this copy."""
        self.seeds.clear()  # Version 0 is durable.
        self._bases[effect.fragment] = new
        self._drop_effect(effect)  # Last: an exception may come between any two lines.

    def snapshot_taken(self, effect: do.Snapshot, work: Callable[[Spread], CodedPush]) -> None:
        """The parameters are copied; a worker codes what they differ from their base."""
        index = effect.fragment

        def coded(result: CodedPush | BaseException, now: float) -> None:
            if isinstance(result, BaseException):
                finite = getattr(result, "code", None) is not ErrorCode.NOT_FINITE
                reason = f"{type(result).__name__}: {result}"
                self.session.encode_failed(index, effect.push_id, reason=reason, finite=finite)
            else:
                self.pushes[index, effect.push_id] = result
                self.session.encoded(index, effect.push_id, now)
            self.turn(now)

        self._pool.run(lambda: work(self._pool.spread), coded)
        self._drop_effect(effect)

    def seed_read(self, fragment: Fragment, values: F32) -> None:
        """The parameters of a fragment are read for version 0; a worker encodes them."""
        index = fragment.index
        epoch = self._epoch
        size = self.session.settings.state_chunk_elements

        def coded(result: list[EncodedChunk] | BaseException, now: float) -> None:
            self._seeding = False
            if epoch != self._epoch or index not in self.seeds:
                return  # The next life of the broker cuts other chunks, or version 0 is durable.
            if isinstance(result, NarrowsError):
                self.session.refuse(ErrorCode.NOT_FINITE_SEED, result)
            elif isinstance(result, BaseException):
                del self.seeds[index]  # The broker asks for it again.
                self._refuse(result)
            else:
                self.seeds[index] = result
                self._put(do.SendChunks(DataKind.SEED, index), 0, LOSSLESS, result)
            self._pump(now)

        def work() -> list[EncodedChunk]:
            spread = self._pool.spread
            return list(encode_values(fragment, values, chunk_elements=size, spread=spread))

        self._pool.run(work, coded)
        self._seeding = True  # Not sooner: an exception would end the seeding for good.

    def _drop_effect(self, effect: do.Effect) -> None:
        """By identity: an equal one may be decided again."""
        self.session.effects = [each for each in self.session.effects if each is not effect]

    # Effects.

    def perform(self, now: float) -> None:
        """Performs what the session has decided, up to what the training thread is about to do."""
        session = self.session
        session.tick(now)
        self.sender.total.set_rate(session.beat.up_bits_per_s, now)
        if session.epoch != self._epoch:
            # Another life of the broker takes nothing that was queued for the old one.
            self.seeds.clear()
            self.sender.discard(lambda header: header.epoch != session.epoch)
            self._epoch = session.epoch
        while session.effects:
            match effect := session.effects[0]:
                case do.Adopt() | do.Snapshot():
                    # Only for an island that performs tasks without the lock; none does yet.
                    return
                case do.SendChunks():
                    self._send_chunks(effect)
                case do.Assemble():
                    self._assemble(effect)
                case do.Note():
                    self.noted(effect)
                case message:
                    frames = wire.encode_control(message)
                    self.sender.charge([len(frame) for frame in frames], now)
                    self._wires.control("", frames)
            del session.effects[0]  # Not sooner: an exception may come between any two lines.
        self._drop_pushes()
        self._drop_payloads()

    def _drop_pushes(self) -> None:
        """Not sooner than here: in the session a push is over before its last effect comes."""
        parts = self.session.parts
        gone = {
            (index, push_id) for index, push_id in self.pushes if parts[index].push_id != push_id
        }
        if gone:
            self.sender.discard(lambda header: (header.fragment, header.push_id) in gone)
        for place in gone:  # Last: what an exception leaves undone is done the next time.
            del self.pushes[place]

    def _drop_payloads(self) -> None:
        parts = self.session.parts
        for index, kind, version in list(self.payloads):
            if (kind, version) not in parts[index].arriving:
                del self.payloads[index, kind, version]

    def _assemble(self, effect: do.Assemble) -> None:
        index = effect.fragment
        fragment = self._fragment(index)
        settings = self.session.settings
        arrived = self.payloads[index, effect.kind, effect.version]
        first, _ = arrived[0]
        payloads = [(arrived[chunk][0].codec, arrived[chunk][1]) for chunk in sorted(arrived)]
        # A state stands alone, a publication is added to the copy before it.
        previous = None
        size = settings.state_chunk_elements
        if effect.kind is DataKind.PUBLICATION:
            previous = self.tips[index].values
            size = settings.chunk_elements

        def work() -> tuple[Copy, bool]:
            spread = self._pool.spread
            values, digest = assemble(
                fragment, previous, payloads, chunk_elements=size, spread=spread
            )
            return self.island.copy(fragment, values), digest == first.result_digest

        def made(result: tuple[Copy, bool] | BaseException, now: float) -> None:
            if isinstance(result, RemoteProtocolError):
                self._refuse(result)
                self.session.assembled(first, now, agrees=False)
            elif isinstance(result, BaseException):
                failure = f"{type(result).__name__}: {result}"
                self.session.assembled(first, now, agrees=False, failure=failure)
            else:
                copy, agrees = result
                if self.session.assembled(first, now, agrees=agrees):
                    self.tips[index] = copy
                    self.saw(first, copy.values)
            self.turn(now)

        self._pool.run(work, made)

    # The uplink.

    def _send_chunks(self, effect: do.SendChunks) -> None:
        match effect.kind:
            case DataKind.LAYOUT:
                payload = wire.pack_layout(self.session.layout)
                self._put(effect, 0, LOSSLESS, [EncodedChunk(0, payload, wire.digest(payload))])
            case DataKind.SEED:
                # What is not coded yet is wanted from now on.
                chunks = self.seeds.setdefault(effect.fragment, None)
                if chunks is not None:
                    self._put(effect, 0, LOSSLESS, chunks)
            case _:
                push = self._coded_push(effect)
                self._put(effect, push.base, push.codec, push.chunks)

    def _coded_push(self, effect: do.SendChunks) -> CodedPush:
        """The push in chunks of this life of the broker, whose size may be another one.

        To cut it anew holds the lock for about 10 ns an element, once a push in such a life.
        """
        place = (effect.fragment, effect.push_id)
        push = self.pushes[place]
        size = self.session.settings.chunk_elements
        if push.chunk_elements != size:
            decoded = [chunk.decoded for chunk in push.chunks]
            fragment = self._fragment(effect.fragment)
            chunks = tuple(recut(fragment, decoded, codec=push.codec, chunk_elements=size))
            push = replace(push, chunk_elements=size, chunks=chunks)
            self.pushes[place] = push
        return push

    def _put(
        self,
        effect: do.SendChunks,
        version: int,
        codec: msg.CodecName,
        chunks: Sequence[EncodedChunk],
    ) -> None:
        """Queues those of the chunks that the effect names, unless they wait there already."""
        session = self.session
        if effect.chunks is not None:
            ranges = [slice(first, first + count) for first, count in effect.chunks]
            chunks = [chunk for each in ranges for chunk in chunks[each]]
        for chunk in chunks:
            header = Header(
                session.epoch, effect.kind, session.incarnation, effect.fragment, version,
                effect.push_id, chunk.index, codec, chunk.payload_digest, 0,
            )  # fmt: skip
            topic = wire.uplink_topic(chunk.index % session.settings.streams)
            self.sender.put(topic, header, chunk.payload)

    def _pump(self, now: float) -> None:
        """Sends what the rate allows and the sockets take."""
        for _ in range(SENDS_PER_TURN):
            entry = self.sender.due(now)
            if entry is None:
                return
            if self._wires.data(entry.topic, entry.header, entry.payload):
                self.sender.sent(entry, now)
                self.session.sent(now)
            else:
                self.sender.blocked(entry, now)

    def _fragment(self, index: int) -> Fragment:
        return self.session.parts[index].fragment

    def _refuse(self, error: BaseException) -> None:
        """Something came that cannot be used, or a worker failed: it is asked for again."""
        self.noted(do.Note("refused", f"{type(error).__name__}: {error}"))


def _checked_header(frames: list[bytes]) -> Header:
    """The header of a data message whose payload is what was sent. Raises RemoteProtocolError."""
    if len(frames) != 3:
        raise fault("data message", expected="3 frames", got=len(frames))
    _, encoded, payload = frames
    header = wire.decode_header(encoded)
    wire.check_payload(header, payload)
    return header


def _explained(refuse: msg.Refuse, ours: msg.Layout) -> msg.Refuse:
    """A refused layout is explained by its first differences from the run's."""
    try:
        theirs = wire.unpack_layout(refuse.layout)
        check_layout(theirs)
    except NarrowsError:
        return refuse
    lines = differences(theirs.entries, ours.entries)
    if not lines and theirs.frozen_digest != ours.frozen_digest:
        lines = ["the parameters that are not trained have other names or values"]
    if len(lines) > 3:
        lines[3:] = ["and more"]
    text = f"{refuse.message}: {'; '.join(lines)}"
    return structs.replace(
        refuse, message=text[: msg.TEXT_CHARACTERS_MAX], expected="", got="", layout=b""
    )
