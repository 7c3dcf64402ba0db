"""The way down: publications to everybody, and on its own topic what a learner asked for.

A publication is encoded once and sent once. A state is encoded once for all who ask, on a worker,
and stays as it is while somebody fetches it, although the head moves on: else a slow fetch would
never end. What is due and when is the sender's business (proto/flow).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from narrows.broker.config import BrokerConfig
from narrows.broker.process.pipeline import Pipeline, result_of
from narrows.broker.records import FragmentState, Version
from narrows.proto import messages as msg
from narrows.proto.codec import EncodedChunk, encode_values
from narrows.proto.flow import Sender
from narrows.proto.messages import DataKind
from narrows.proto.ports import BrokerWires, Pool
from narrows.proto.timing import REPAIR_S
from narrows.proto.wire import asked_topic, live_topic, name_of


class Connection(NamedTuple):
    """A connection that listens; no later one is equal to it."""

    descriptor: int
    inode: int
    site: str = ""
    """The one that its key speaks for; "" without keys."""


SPARE_CONNECTIONS: Final = 8
"""Connections of a site that are charged beyond its learners: after a restart they listen before
they say Hello. More are not charged: a key holder could stop all publications by opening many."""

TOPICS_MAX: Final = 1 << 14
"""Topics of one connection; a relay listens for all learners of its site."""

EARLY_MAX: Final = 64
"""Questions of a learner that does not listen yet. It asks again for what is above."""

COPIES_MAX: Final = 2
"""Copies of a fragment's state that are served at once: one that is being fetched, and a newer."""

PINNED_S: Final = 10.0
"""A copy that was asked for within this time is being fetched: learners ask again after 8 s."""

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
        total, each = float(config.wan.total_down), float(config.wan.down)
        self.sender = Sender(total=total, each=each, curve=bool(config.broker.keys))
        self.sender.fan_out = 0
        self._topics: dict[Connection, dict[str, None]] = {}
        """Everything that each connection listens to."""
        self._hearing = [Counter[str]() for _ in range(self._settings.streams)]
        """Connections that hear publications, by stream and site: each stream has its own."""
        self._learners = Counter[str]()
        """Learners that are here, by site."""
        self._listeners: Counter[str] = Counter()
        """Number of connections by topic."""
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
        topics = self._topics.setdefault(connection, {})
        if is_on == (topic in topics) or (is_on and len(topics) == TOPICS_MAX):
            return
        heard = self._heard(topics)
        if is_on:
            topics[topic] = None
        else:
            del topics[topic]
        self._listeners[topic] += 1 if is_on else -1
        for hearing, before, after in zip(self._hearing, heard, self._heard(topics), strict=True):
            hearing[connection.site] += after - before
        self._count_listeners()
        incarnation = topic[2:-3]
        if incarnation in self._early and self._has_listener(incarnation):
            self._answer_early(incarnation, now)
            self.pump(now)

    def keep_listeners(self, is_open: Callable[[Connection], bool]) -> None:
        """Forgets the connections that have ended."""
        for connection in [each for each in self._topics if not is_open(each)]:
            topics = self._topics.pop(connection)
            self._listeners.subtract(list(topics))
            for hearing, heard in zip(self._hearing, self._heard(topics), strict=True):
                hearing[connection.site] -= heard
        self._listeners = +self._listeners  # Without the topics that nobody listens to.
        self._count_listeners()

    def members(self, names: Iterable[str]) -> None:
        """The learners that are here now."""
        learners = Counter(name.partition("/")[0] for name in names)
        if learners != self._learners:
            self._learners = learners
            self._count_listeners()

    def _count_listeners(self) -> None:
        """The connections that a publication is charged for: those of the stream with the most."""
        self.sender.fan_out = max(
            sum(
                min(count, self._learners[site] + SPARE_CONNECTIONS) if site else count
                for site, count in hearing.items()
            )
            for hearing in self._hearing
        )

    def _heard(self, topics: Iterable[str]) -> list[bool]:
        """Per stream whether who subscribes to these hears it; ZeroMQ compares beginnings."""
        lives = [each for each in topics if each.startswith("p/") or "p/".startswith(each)]
        streams = map(live_topic, range(self._settings.streams))
        return [any(map(stream.startswith, lives)) for stream in streams]

    def _has_listener(self, incarnation: str) -> bool:
        """A learner listens to its own topic on every stream."""
        streams = range(self._settings.streams)
        return all(self._listeners[asked_topic(incarnation, stream)] for stream in streams)

    # -- what is asked for

    def publish(self, fragment: int, number: int, now: float) -> None:
        """Queues a publication for everybody."""
        version = self._pipeline.publication(fragment, number)
        assert version is not None, f"version {number} of fragment {fragment} was just installed"
        # A line that cannot keep up must not fill the memory: who misses these fetches the state.
        kind, oldest = DataKind.PUBLICATION, number - msg.PUBLICATIONS_KEPT
        self.sender.discard(
            lambda old: old.fragment == fragment and old.kind is kind and old.version <= oldest
        )
        for chunk in version.publication:
            topic = live_topic(chunk.index % self._settings.streams)
            self.sender.put_live(topic, self._publication(version, chunk, ""), chunk.payload)
        self.pump(now)

    def serve(self, incarnation: str, fetch: msg.Fetch, now: float) -> None:
        """Queues what a learner asked for, once it listens: its first Fetch overtakes its
        subscriptions, and what is sent before them is lost. Who does not listen after REPAIR_S is
        answered nevertheless, for it would ask again."""
        early = self._early.setdefault(incarnation, [])
        if len(early) < EARLY_MAX:
            early.append((now, fetch))
        if self._has_listener(incarnation):
            self._answer_early(incarnation, now)

    def _answer_early(self, incarnation: str, now: float) -> None:
        """In place of a publication that is no longer kept goes the first chunk of the state: the
        learner then fetches that."""
        for _, fetch in self._early.pop(incarnation):
            if fetch.kind is DataKind.PUBLICATION:
                version = self._pipeline.publication(fetch.fragment, fetch.version)
                if version is not None:
                    for chunk in _asked(fetch, version.publication):
                        self._put(self._publication(version, chunk, incarnation), chunk)
                    continue
                fetch = msg.Fetch(DataKind.STATE, fetch.fragment, fetch.version, 0, ((0, 1),))
            copy = self._copy(fetch, now)
            copy.waiting.append((incarnation, fetch))
            self._put_waiting(copy)

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

        def encoded(result: Any, _now: float) -> None:
            copy.chunks = result_of(result)
            self._put_waiting(copy)

        self._pool.run(
            lambda: tuple(encode_values(fragment, published, chunk_elements=elements)), encoded
        )

    def _put_waiting(self, copy: _StateCopy) -> None:
        """Queues what is asked of a copy; the header says which push of that learner it holds."""
        if copy.chunks:
            for incarnation, fetch in copy.waiting:
                newest = copy.merged.get(incarnation, 0)
                for chunk in _asked(fetch, copy.chunks):
                    place = copy.state, chunk, newest
                    self._put(self._header(DataKind.STATE, incarnation, *place), chunk)
            copy.waiting.clear()

    def _publication(self, version: Version, chunk: EncodedChunk, learner: str) -> msg.Header:
        """The header of a publication; that of chunk 0 says whose pushes it holds."""
        pushes = version.round_.contributions if chunk.index == 0 else ()
        held = tuple(msg.Contributor(each.incarnation, each.push_id) for each in pushes)
        place, codec = (version.state, chunk, 0), version.round_.policy.codec
        return self._header(DataKind.PUBLICATION, learner, *place, codec, held)

    def _header(
        self,
        kind: DataKind,
        learner: str,
        state: FragmentState,
        chunk: EncodedChunk,
        push_id: int,
        codec: msg.CodecName = msg.LOSSLESS,
        contributors: tuple[msg.Contributor, ...] = (),
    ) -> msg.Header:
        place = state.fragment, state.version, push_id, chunk.index
        digests = chunk.payload_digest, state.digests.published
        return msg.Header(self._epoch, kind, learner, *place, codec, *digests, contributors)

    def _put(self, header: msg.Header, chunk: EncodedChunk) -> None:
        topic = asked_topic(header.incarnation, chunk.index % self._settings.streams)
        self.sender.put_asked(header.incarnation, topic, header, chunk.payload)

    # -- to the socket

    def pump(self, now: float) -> None:
        """Sends what is due, a bounded number of messages."""
        for _ in range(MESSAGES_PER_PUMP):
            entry = self.sender.due(now)
            if entry is None:
                return
            if not self._wires.data(entry.topic, entry.header, entry.payload, lossy=entry.lossy):
                self.sender.blocked(entry, now)
                continue
            self.sender.sent(entry, now)
            size = len(entry.topic) + len(entry.header) + len(entry.payload)
            if entry.requester:
                self.asked_bytes[name_of(entry.requester)] += size
            else:
                self.live_bytes += size
                self.fanned_bytes += size * self.sender.fan_out

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        """Drops answers for learners that are gone: they would cost the line and reach nobody."""
        known = frozenset(("", *incarnations))
        self.sender.discard(lambda header: header.incarnation not in known)
        self._early = {name: each for name, each in self._early.items() if name in known}

    def deadline(self, now: float) -> float:
        """When `turn` has something to do."""
        early = [asked[0][0] + REPAIR_S for asked in self._early.values()]
        return min(self.sender.deadline(now), *early, math.inf)

    def turn(self, now: float) -> None:
        """Answers who does not listen, forgets copies that nobody asks for, and sends."""
        for incarnation, asked in list(self._early.items()):
            if now >= asked[0][0] + REPAIR_S:
                self._answer_early(incarnation, now)
        for copies in self._copies.values():
            copies[:] = [each for each in copies if now < each.asked_at + IDLE_S]
        self.pump(now)


def _asked(fetch: msg.Fetch, chunks: tuple[EncodedChunk, ...]) -> list[EncodedChunk]:
    """The chunks that a checked Fetch asks for."""
    return [chunk for first, count in fetch.chunks for chunk in chunks[first : first + count]]
