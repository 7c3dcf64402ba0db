"""Performs a learner's decisions over three ports: wires, a pool of workers, and an island.

It has no socket, thread or clock of its own, so the simulator runs the same code. The caller holds
the learner's lock in every call. `boundary` and `join` come from the training thread, everything
else from the loop. The training thread alone touches parameters, between two steps: it copies them
and applies the rule of an adoption. To decode, digest, encode and send belongs to the pool and the
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from narrows.learner import effects as do
from narrows.learner.island import Adoption, CodedPush, Copy, Island
from narrows.learner.session import Session, refused
from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.codec import (
    F32,
    EncodedChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    encode_values,
    recut,
    values_of,
)
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError, fault
from narrows.proto.flow import Sender
from narrows.proto.layout import Fragment, check_layout, differences
from narrows.proto.messages import LOSSLESS, DataKind, Header
from narrows.proto.ports import Pool, Wires

SENDS_PER_TURN: Final = 16
"""Data messages that leave before the training thread may have the lock."""


class LearnerHost:
    """One learner. `session` decides; read it, but change nothing there.

    Hooks, which a checker or a log replaces: `saw(header, published)` when a published copy is
    complete, `adopting(effect)` before parameters move, `noted(note)` for each line of the log.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        layout: msg.Layout,
        island: Island,
        wires: Wires,
        pool: Pool,
        now: float,
        *,
        curve: bool = False,
    ) -> None:
        self.session = Session(name, incarnation, layout, now)
        self.sender = Sender(curve=curve, may_lose=False)
        """The uplink's queue; the link sets `ready` once the broker has subscribed."""
        self.saw: Callable[[Header, F32], None] = lambda header, published: None
        self.adopting: Callable[[do.Adopt], None] = lambda effect: None
        self.noted: Callable[[do.Note], None] = lambda note: None
        self._island, self._wires, self._pool = island, wires, pool
        self.payloads: dict[tuple[int, DataKind, int], dict[int, tuple[Header, bytes]]] = {}
        """Chunks that wait for the others of their transfer: by fragment, kind and version."""
        self._held: dict[int, Copy] = {}
        self._tip: dict[int, Copy] = {}
        self._pushed: dict[tuple[int, int], CodedPush] = {}
        """By fragment and push id, until the session has done with the push."""
        self.seeds: dict[int, list[EncodedChunk] | None] = {}
        """Fragments of version 0 that the broker wants, as coded; None: not yet."""
        self._seeding = False
        """A worker encodes one of them."""
        self._epoch = ""

    # Events.

    def control(self, frames: list[bytes], now: float) -> None:
        """A control message of the broker, as it came."""
        self.sender.received([len(frame) for frame in frames], now)
        try:
            message = wire.decode_control(frames, msg.CONTROL_BYTES_MAX)
        except RemoteProtocolError as error:
            self._refuse(error)
            if error.code is ErrorCode.PROTOCOL_VERSION:
                self.session.refused = refused(error.code, error)
            return
        if isinstance(message, msg.Refuse) and message.layout:
            message = _explained(message, self.session.layout)
        self.session.control(message, now)
        self._perform(now)
        self._pump(now)

    def data(self, frames: list[bytes], now: float) -> None:
        """A data message of the downlink, as it came: topic, header, payload."""
        self.sender.received([len(frame) for frame in frames], now)
        try:
            if len(frames) != 3:
                raise fault("data message", expected="3 frames", got=len(frames))
            header, payload = wire.decode_header(frames[1]), frames[2]
            if (digest := wire.digest(payload)) != header.payload_digest:
                raise fault(
                    f"payload of chunk {header.chunk} of fragment {header.fragment}",
                    expected=f"{header.payload_digest:016x}",
                    got=f"{digest:016x}",
                    code=ErrorCode.BAD_DIGEST,
                )
        except RemoteProtocolError as error:
            self._refuse(error)
            return
        if self.session.chunk(header, now):
            key = (header.fragment, header.kind, header.version)
            self.payloads.setdefault(key, {})[header.chunk] = (header, payload)
        self._perform(now)

    def join(self, now: float) -> bool:
        """Between two steps, while none is made: adopts what is here. True: the parameters stand on
        the run."""
        self._exchange(self.session.join, now)
        self._seed_next()
        return self.session.joined

    def boundary(self, tokens: int, loss: float | None, now: float) -> None:
        """After an inner step: the only time that the exchange takes from training."""
        self._exchange(lambda: self.session.boundary(tokens, loss, now), now)

    def turn(self, now: float) -> None:
        """The time has come, or a socket has room: sends what may leave."""
        self._perform(now)
        self._pump(now)

    def deadline(self, now: float) -> float:
        """When `turn` has something to do if nothing happens."""
        return min(self.session.deadline(now), self.sender.deadline(now))

    def lost(self, now: float) -> None:
        """There is a connection to the broker, the first or a new one."""
        self.session.lost(now)
        self._perform(now)

    def pause(self, reason: str | None, now: float) -> None:
        """The loop makes no steps for a while; None: it makes them again."""
        self._exchange(lambda: self.session.pause(reason), now)

    def leave(self, now: float) -> None:
        """The loop is over; call `join` until `session.ended`."""
        self._exchange(lambda: self.session.leave(now), now)

    # Effects.

    def _exchange(self, decide: Callable[[], None], now: float) -> None:
        """A call of the training thread. An exception may leave it anywhere, as that of a signal:
        then the session hears of what was not done, and the exception goes on."""
        decided = False
        try:
            decide()
            decided = True
            self._perform(now)
        except BaseException as error:
            self.session.broken_off(type(error).__name__, decided=decided)
            raise

    def _perform(self, now: float) -> None:
        session = self.session
        session.tick(now)
        self.sender.set_rate(now, total=session.beat.up_bits_per_s)
        while session.effects:
            if session.epoch != self._epoch:
                # Another life of the broker takes nothing that was queued for the old one.
                self._epoch = session.epoch
                self.seeds.clear()
                self.sender.discard(lambda header: header.epoch != session.epoch)
            match effect := session.effects[0]:
                case do.Send(message):
                    frames = wire.encode_control(message)
                    self.sender.charge([len(frame) for frame in frames], now)
                    self._wires.control("", frames)
                case do.SendChunks(DataKind.LAYOUT):
                    payload = wire.pack_layout(session.layout)
                    chunk = EncodedChunk(0, payload, wire.digest(payload))
                    self._put(effect, 0, LOSSLESS, [chunk])
                case do.SendChunks(DataKind.SEED, index):
                    if seed := self.seeds.setdefault(index):
                        self._put(effect, 0, LOSSLESS, seed)
                case do.SendChunks():
                    self._send_push(effect)
                case do.Assemble():
                    self._assemble(effect)
                case do.Snapshot():
                    self._snapshot(effect)
                case do.Adopt():
                    self._adopt(effect)
                case do.Note():
                    self.noted(effect)
            del session.effects[0]  # Not sooner: an exception may come between any two lines.
        self._drop_pushes()
        self._drop_payloads()

    def _drop_pushes(self) -> None:
        """Not sooner than here: in the session a push is over before its last effect comes."""
        parts, pushed = self.session.parts, self._pushed
        kept = {
            place: push for place, push in pushed.items() if parts[place[0]].push_id == place[1]
        }
        if len(kept) < len(pushed):
            gone = pushed.keys() - kept.keys()
            self.sender.discard(lambda header: (header.fragment, header.push_id) in gone)
            self._pushed = kept  # Last: what an exception leaves undone is done the next time.

    def _drop_payloads(self) -> None:
        parts = self.session.parts
        for fragment, kind, version in list(self.payloads):
            if (kind, version) not in parts[fragment].arriving:
                del self.payloads[fragment, kind, version]

    def _adopt(self, effect: do.Adopt) -> None:
        fragment, new = self._fragment(effect.fragment), self._tip[effect.fragment]
        self.adopting(effect)
        self.seeds.clear()  # Version 0 is durable.
        if effect.overwrite:
            self._island.overwrite(fragment, new)
        else:
            push = self._pushed[effect.fragment, effect.push_id] if effect.push_id else None
            old = self._held[effect.fragment]
            self._island.adopt(fragment, Adoption(old, new, push, effect.keep, effect.merged))
        self._held[effect.fragment] = new

    def _snapshot(self, effect: do.Snapshot) -> None:
        """The copy is taken now, its code is made by a worker."""
        index, push_id, base = effect
        fragment, settings = self._fragment(index), self.session.settings
        snapshot = self._island.snapshot(fragment, self._held[index])

        def coded(result: CodedPush | BaseException, now: float) -> None:
            if isinstance(result, BaseException):
                finite = getattr(result, "code", None) is not ErrorCode.NOT_FINITE
                reason = f"{type(result).__name__}: {result}"
                self.session.encode_failed(index, push_id, reason=reason, finite=finite)
            else:
                self._pushed[index, push_id] = result
                self.session.encoded(index, push_id, now)
            self._perform(now)
            self._pump(now)

        self._pool.run(lambda: snapshot.encode(fragment, base, settings), coded)

    def _assemble(self, effect: do.Assemble) -> None:
        kind, index, version = effect
        fragment, settings = self._fragment(index), self.session.settings
        chunks = [each for _, each in sorted(self.payloads[index, kind, version].items())]
        base = self._tip[index].values if kind is DataKind.PUBLICATION else None
        first = chunks[0][0]

        def work() -> tuple[Copy, bool]:
            size = settings.state_chunk_elements if base is None else settings.chunk_elements
            decoded = [
                decode_chunk(fragment, header.codec, size, header.chunk, payload)
                for header, payload in chunks
            ]
            if base is None:
                values = values_of(fragment, decoded)
            else:
                values = advance_copy(fragment, base, decoded)
            return self._island.copy(fragment, values), digest_of(values) == first.result_digest

        def made(result: tuple[Copy, bool] | BaseException, now: float) -> None:
            if isinstance(result, RemoteProtocolError):
                self._refuse(result)
                self.session.assembled(first, now, agrees=False)
            elif isinstance(result, BaseException):
                failure = f"{type(result).__name__}: {result}"
                self.session.assembled(first, now, agrees=False, failure=failure)
            elif self.session.assembled(first, now, agrees=result[1]):
                self._tip[index] = result[0]
                self.saw(first, result[0].values)
            self._perform(now)
            self._pump(now)

        self._pool.run(work, made)

    # The uplink.

    def _send_push(self, effect: do.SendChunks) -> None:
        place, fragment = (effect.fragment, effect.push_id), self._fragment(effect.fragment)
        push, size = self._pushed[place], self.session.settings.chunk_elements
        if push.chunk_elements != size:  # A new life of the broker has other sizes.
            decoded = [chunk.decoded for chunk in push.chunks]
            chunks = tuple(recut(fragment, decoded, codec=push.codec, chunk_elements=size))
            push = self._pushed[place] = replace(push, chunk_elements=size, chunks=chunks)
        self._put(effect, push.base, push.codec, push.chunks)

    def _seed_next(self) -> None:
        """On the training thread: reads a fragment of version 0 for a worker to encode. One at a
        time, because a lossless model is large; the next follows at the next call."""
        index = next((index for index, seed in self.seeds.items() if seed is None), None)
        if self._seeding or index is None:
            return
        fragment, epoch = self._fragment(index), self._epoch
        values, size = self._island.read(fragment), self.session.settings.state_chunk_elements

        def coded(result: list[EncodedChunk] | BaseException, now: float) -> None:
            self._seeding = False
            if epoch != self._epoch or index not in self.seeds:
                return  # The next life of the broker cuts other chunks, or version 0 is durable.
            if isinstance(result, NarrowsError):
                self.session.refused = refused(ErrorCode.NOT_FINITE_SEED, result)
            elif isinstance(result, BaseException):
                del self.seeds[index]  # The broker asks for it again.
                self._refuse(result)
            else:
                self.seeds[index] = result
                self._put(do.SendChunks(DataKind.SEED, index), 0, LOSSLESS, result)
            self._pump(now)

        self._pool.run(lambda: list(encode_values(fragment, values, chunk_elements=size)), coded)
        self._seeding = True  # Not sooner: an exception would end the seeding for good.

    def _put(
        self,
        effect: do.SendChunks,
        version: int,
        codec: msg.CodecName,
        chunks: Sequence[EncodedChunk],
    ) -> None:
        """Queues those of the chunks that the effect names, unless they wait there already."""
        session, ranges = self.session, effect.chunks
        if ranges is not None:
            chunks = [chunk for first, count in ranges for chunk in chunks[first : first + count]]
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
            if (entry := self.sender.due(now)) is None:
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
    text = f"{refuse.message}: {'; '.join(lines[:3])}" + ("; and more" if len(lines) > 3 else "")
    return structs.replace(
        refuse, message=text[: msg.TEXT_CHARACTERS_MAX], expected="", got="", layout=b""
    )
