"""The way down: publications to everybody, and on its own topic what a learner asked for.

A publication is encoded once and sent once. A state is encoded once for all who ask, on a worker,
and stays as it is while somebody fetches it, although the head moves on: else a slow fetch would
never end. What is due and when is the sender's business (proto/flow).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from narrows.broker.config import BrokerConfig
from narrows.broker.process.pipeline import Pipeline
from narrows.broker.rounds import FragmentState, Version
from narrows.proto import messages as msg
from narrows.proto.codec import EncodedChunk, encode_values
from narrows.proto.flow import Entry, Sender
from narrows.proto.ports import BrokerWires, Pool
from narrows.proto.timing import REPAIR_S
from narrows.proto.wire import asked_topic, live_topic, name_of

Connection: TypeAlias = tuple[int, int]
"""Identifies a connection that listens; no later one is equal to it."""

COPIES_MAX: Final = 2
"""Copies of a fragment's state that are served at once: one that is being fetched, and a newer."""

PINNED_S: Final = 10.0
"""A copy that was asked for within this time is being fetched: learners ask again after 8 s."""

TOPICS_MAX: Final = 4096
"""Topics of a connection that are remembered; a relay has two for each learner of its site."""

IDLE_S: Final = 60.0
"""Seconds after which a copy that nobody asks for is forgotten: it takes as much memory as the
fragment."""

MESSAGES_PER_PUMP: Final = 64
"""Messages that are sent before the loop looks at its sockets again."""


@dataclass(eq=False)
class _StateCopy:
    """One version of a fragment, whole, with whose pushes it holds."""

    state: FragmentState
    merged: dict[str, int]
    """Incarnation -> newest push id of this version; that of the head may be newer."""
    asked_at: float
    chunks: tuple[EncodedChunk, ...] = ()
    """Empty while a worker encodes."""
    waiting: list[tuple[str, msg.Fetch]] = field(default_factory=list)


class Downlink:
    """Fills the sender, and empties it into the socket."""

    def __init__(
        self, config: BrokerConfig, epoch: str, wires: BrokerWires, pool: Pool, pipeline: Pipeline
    ) -> None:
        self._settings, self._epoch = config.shared, epoch
        self._wires, self._pool, self._pipeline = wires, pool, pipeline
        self.sender = Sender(
            total=float(config.wan.total_down),
            each=float(config.wan.down),
            curve=bool(config.broker.keys),
        )
        self.sender.fan_out = 0
        self._listeners: dict[Connection, dict[str, None]] = {}
        """Topics that each connection listens to."""
        self._counts: Counter[str] = Counter()
        """Connections that listen to a topic."""
        self._early: dict[str, list[tuple[float, msg.Fetch]]] = {}
        """By incarnation: what it asked for before it listened, and when."""
        self._copies: dict[int, list[_StateCopy]] = {}
        """By fragment, the newest last."""
        self.asked_bytes: Counter[str] = Counter()
        """By learner."""
        self.live_bytes = self.fanned_bytes = 0
        """Bytes of publications, and the same times the connections that they went to."""

    # -- who listens

    def listens(self, connection: Connection, topic: str, is_on: bool, now: float) -> None:
        """A connection subscribes to a topic, or ends that. Said twice it changes nothing: else a
        peer could have publications charged to the budget that go nowhere."""
        topics = self._listeners.setdefault(connection, {})
        if is_on == (topic in topics) or (is_on and len(topics) >= TOPICS_MAX):
            return
        if not is_on:
            del topics[topic]
            self._count_out([topic])
            return
        topics[topic] = None
        self._counts[topic] += 1
        self.sender.fan_out = self._counts[live_topic(0)]
        incarnation = topic[2:-3]
        if incarnation in self._early and self._is_heard_by(incarnation):
            for _, fetch in self._early.pop(incarnation):
                self._answer(incarnation, fetch, now)
            self.pump(now)

    def keep_listeners(self, is_open: Callable[[Connection], bool]) -> None:
        """Forgets the connections that have ended."""
        for connection in [each for each in self._listeners if not is_open(each)]:
            self._count_out(list(self._listeners.pop(connection)))

    def _count_out(self, topics: list[str]) -> None:
        self._counts.subtract(topics)
        for topic in topics:
            if not self._counts[topic]:
                del self._counts[topic]
        self.sender.fan_out = self._counts[live_topic(0)]

    def _is_heard_by(self, incarnation: str) -> bool:
        """A learner listens to its own topic on every stream."""
        streams = range(self._settings.streams)
        return all(self._counts[asked_topic(incarnation, stream)] for stream in streams)

    # -- what is asked for

    def publish(self, fragment: int, number: int, now: float) -> None:
        """Queues a publication for everybody."""
        version = self._pipeline.publication(fragment, number)
        assert version is not None, f"version {number} of fragment {fragment} was just installed"
        # A line that cannot keep up must not fill the memory: who misses these fetches the state.
        oldest = number - msg.PUBLICATIONS_KEPT
        self.sender.discard(
            lambda header: (
                header.fragment == fragment
                and header.kind is msg.DataKind.PUBLICATION
                and header.version <= oldest
            )
        )
        for chunk in version.publication:
            topic = live_topic(chunk.index % self._settings.streams)
            self.sender.put_live(topic, self._publication(version, chunk, ""), chunk.payload)
        self.pump(now)

    def serve(self, incarnation: str, fetch: msg.Fetch, now: float) -> None:
        """Queues what a learner asked for, once it listens: its first Fetch overtakes its
        subscriptions, and what is sent before them is lost. Who does not listen after REPAIR_S is
        answered nevertheless, for it would ask again."""
        if self._is_heard_by(incarnation):
            self._answer(incarnation, fetch, now)
        else:
            self._early.setdefault(incarnation, []).append((now, fetch))

    def _answer(self, incarnation: str, fetch: msg.Fetch, now: float) -> None:
        """Queues what a learner asked for. In place of a publication that is no longer kept goes
        the first chunk of the state: the learner then fetches that."""
        if fetch.kind is msg.DataKind.PUBLICATION:
            version = self._pipeline.publication(fetch.fragment, fetch.version)
            if version is not None:
                for index in _indices(fetch):
                    chunk = version.publication[index]
                    self._put(incarnation, self._publication(version, chunk, incarnation), chunk)
                return
            fetch = msg.Fetch(msg.DataKind.STATE, fetch.fragment, fetch.version, 0, ((0, 1),))
        copy = self._copy(fetch, now)
        if copy.chunks:
            self._put_state(copy, incarnation, fetch)
        else:
            copy.waiting.append((incarnation, fetch))

    # -- states

    def _copy(self, fetch: msg.Fetch, now: float) -> _StateCopy:
        """The version that the learner is fetching if it is here, else the newest."""
        copies = self._copies.setdefault(fetch.fragment, [])
        state, merged = self._pipeline.head(fetch.fragment)
        copy = next((each for each in copies if each.state.version == fetch.version), None)
        if copy is None and copies:
            newest, oldest = copies[-1], copies[0]
            # With the publications after it a learner gets from this copy to the head.
            near = state.version - newest.state.version < msg.PUBLICATIONS_KEPT
            pinned = len(copies) == COPIES_MAX and now < oldest.asked_at + PINNED_S
            if newest.state.version == state.version or (near and pinned):
                copy = newest
        if copy is None:
            copy = _StateCopy(state, merged, now)
            del copies[: max(0, len(copies) + 1 - COPIES_MAX)]
            copies.append(copy)
            self._encode(copy)
        copy.asked_at = now
        return copy

    def _encode(self, copy: _StateCopy) -> None:
        fragment, published = self._pipeline.fragment(copy.state.fragment), copy.state.published
        elements = self._settings.state_chunk_elements
        self._pool.run(
            lambda: tuple(encode_values(fragment, published, chunk_elements=elements)),
            partial(self._encoded, copy),
        )

    def _encoded(self, copy: _StateCopy, result: Any, _now: float) -> None:
        if isinstance(result, BaseException):
            raise result
        copy.chunks = result
        waiting, copy.waiting = copy.waiting, []
        for incarnation, fetch in waiting:
            self._put_state(copy, incarnation, fetch)

    def _put_state(self, copy: _StateCopy, incarnation: str, fetch: msg.Fetch) -> None:
        """Queues chunks of a copy; their header says which push of this learner it holds."""
        newest = copy.merged.get(incarnation, 0)
        for index in _indices(fetch):
            chunk = copy.chunks[index]
            header = self._header(chunk, msg.DataKind.STATE, incarnation, copy.state, msg.LOSSLESS)
            self._put(incarnation, replace(header, push_id=newest), chunk)

    def _publication(self, version: Version, chunk: EncodedChunk, learner: str) -> msg.Header:
        """Header of a publication; that of chunk 0 says whose pushes it holds."""
        codec, pushes = version.round_.policy.codec, version.round_.contributions
        header = self._header(chunk, msg.DataKind.PUBLICATION, learner, version.state, codec)
        if chunk.index > 0:
            return header
        held = tuple(msg.Contributor(each.incarnation, each.push_id) for each in pushes)
        return replace(header, contributors=held)

    def _header(
        self,
        chunk: EncodedChunk,
        kind: msg.DataKind,
        learner: str,
        state: FragmentState,
        codec: msg.CodecName,
    ) -> msg.Header:
        place = state.fragment, state.version, 0, chunk.index
        digests = chunk.payload_digest, state.digests.published
        return msg.Header(self._epoch, kind, learner, *place, codec, *digests)

    def _put(self, incarnation: str, header: msg.Header, chunk: EncodedChunk) -> None:
        topic = asked_topic(incarnation, chunk.index % self._settings.streams)
        self.sender.put_asked(incarnation, topic, header, chunk.payload)

    # -- to the socket

    def pump(self, now: float) -> None:
        """Sends what is due, a bounded number of messages."""
        for _ in range(MESSAGES_PER_PUMP):
            entry = self.sender.due(now)
            if entry is None:
                return
            if self._wires.data(entry.topic, entry.header, entry.payload, lossy=entry.lossy):
                self.sender.sent(entry, now)
                self._count(entry)
            else:
                self.sender.blocked(entry, now)

    def _count(self, entry: Entry) -> None:
        size = len(entry.topic) + len(entry.header) + len(entry.payload)
        if entry.requester:
            self.asked_bytes[name_of(entry.requester)] += size
        else:
            self.live_bytes += size
            self.fanned_bytes += size * self.sender.fan_out

    def forget_all_but(self, incarnations: Collection[str]) -> None:
        """Drops answers for learners that are gone: they would cost the line and reach nobody."""
        self.sender.discard(lambda header: header.learner not in ("", *incarnations))
        for copies in self._copies.values():
            for copy in copies:
                copy.waiting[:] = [each for each in copy.waiting if each[0] in incarnations]

    def turn(self, now: float) -> None:
        """Answers who does not listen, forgets copies that nobody asks for, and sends."""
        for incarnation, asked in list(self._early.items()):
            if now >= asked[0][0] + REPAIR_S:
                for _, fetch in self._early.pop(incarnation):
                    self._answer(incarnation, fetch, now)
        for copies in self._copies.values():
            copies[:] = [each for each in copies if now < each.asked_at + IDLE_S]
        self.pump(now)


def _indices(fetch: msg.Fetch) -> Iterator[int]:
    """Chunks that a checked Fetch asks for."""
    for first, count in fetch.chunks:
        yield from range(first, first + count)
