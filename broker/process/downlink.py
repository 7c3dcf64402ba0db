"""The way down: publications to everybody, and answers to a learner on its own topic.

The downlink encodes and sends a publication once. A worker encodes a state once for all learners
that ask for it. That copy stays as it is while somebody fetches it, although the head moves on:
else a slow fetch would never end. The sender (proto/flow) decides what leaves and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
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
from narrows.proto.wire import asked_topic, live_topic, name_of


class Connection(NamedTuple):
    """A connection that listens. A later one may have the same descriptor or inode, not both."""

    descriptor: int
    inode: int


SPARE_CONNECTIONS: Final = 8
"""Connections that are charged beyond the learners that are here: after a restart they listen
before they say Hello. No more are charged, or a key holder could stop all publications by opening
many."""

TOPICS_MAX: Final = 1 << 14
"""Topics of one connection; a relay listens for all learners of its site."""

EARLY_MAX: Final = 64
"""Questions that are kept of a learner that does not listen yet. It repeats the others later."""

COPIES_MAX: Final = 2
"""Copies of a fragment's state that are served at once: one that is being fetched, and a newer."""

IDLE_S: Final = 60.0
"""Seconds after which a copy that nobody asks for is forgotten: it takes as much memory as the
fragment."""

MESSAGES_PER_PUMP: Final = 64
"""Messages that are sent before the loop looks at its sockets again."""


@dataclass(eq=False)
class _StateCopy:
    """One version of a fragment, whole, and the pushes that it holds."""

    state: FragmentState
    merged: dict[str, int]
    """Incarnation -> newest push id of this version; that of the head may be newer."""
    asked_at: float = 0.0
    chunks: tuple[EncodedChunk, ...] = ()
    """Empty while a worker encodes."""
    waiting: list[tuple[str, msg.Fetch]] = field(default_factory=list)


class Downlink:
    """Fills the sender, and empties it into the socket."""

    def __init__(
        self, config: BrokerConfig, epoch: str, wires: BrokerWires, pool: Pool, pipeline: Pipeline
    ) -> None:
        self._settings = config.shared
        self._epoch = epoch
        self._wires = wires
        self._pool = pool
        self._pipeline = pipeline
        self.sender = Sender(
            total=float(config.wan.total_down),
            each=float(config.wan.down),
            curve=bool(config.broker.keys),
        )
        self.sender.fan_out = 0
        self._topics: dict[Connection, dict[str, None]] = {}
        """Everything that each connection listens to."""
        self._listeners: Counter[str] = Counter()
        """Number of connections by topic."""
        self._hearing = [Counter[Connection]() for _ in range(self._settings.streams)]
        """By stream: the connections that hear its publications, each with how many of its topics
        cover them. Each stream of a learner is a connection of its own."""
        self._here = frozenset[str]()
        """Incarnations of the learners that are here."""
        self._early: dict[str, list[msg.Fetch]] = {}
        """By incarnation: what it asked for before it listened."""
        self._copies: dict[int, list[_StateCopy]] = {}
        """By fragment, the newest last."""
        self.asked_bytes: Counter[str] = Counter()
        """Bytes of answers, by learner."""
        self.live_bytes = 0
        """Bytes of publications, each counted once."""

    # -- who listens

    def listens(self, connection: Connection, topic: str, is_on: bool, now: float) -> bool:
        """A connection subscribes to a topic, or ends that. To repeat either changes nothing: else
        a peer could have publications charged to the budget that go nowhere. False: it has too many
        topics, which cost libzmq a KiB each."""
        topics = self._topics.setdefault(connection, {})
        if is_on == (topic in topics):
            return True
        if is_on and len(topics) == TOPICS_MAX:
            return False
        if is_on:
            topics[topic] = None
        else:
            del topics[topic]
        change = 1 if is_on else -1
        self._listeners[topic] += change
        for stream, hearing in enumerate(self._hearing):
            if live_topic(stream).startswith(topic):  # ZeroMQ compares beginnings.
                hearing[connection] += change
                if not hearing[connection]:
                    del hearing[connection]
        self._count_listeners()
        incarnation = topic[2:-3]  # Of a topic "r/INCARNATION/ss".
        if incarnation in self._early and self._has_listener(incarnation):
            for fetch in self._early.pop(incarnation):
                self._answer(incarnation, fetch, now)
            self.pump(now)
        return True

    def keep_listeners(self, is_open: Callable[[Connection], bool]) -> None:
        """Forgets the connections that have ended."""
        for connection in [each for each in self._topics if not is_open(each)]:
            self._listeners.subtract(list(self._topics.pop(connection)))
            for hearing in self._hearing:
                hearing.pop(connection, None)
        self._listeners = +self._listeners  # Without the topics that nobody listens to.
        self._count_listeners()

    def _count_listeners(self) -> None:
        """Tells the sender for how many connections it has to charge a publication: those of the
        stream that most of them hear."""
        heard = max(len(hearing) for hearing in self._hearing)
        self.sender.fan_out = min(heard, len(self._here) + SPARE_CONNECTIONS)

    def _has_listener(self, incarnation: str) -> bool:
        """A learner listens to its own topic on every stream."""
        streams = range(self._settings.streams)
        return all(self._listeners[asked_topic(incarnation, stream)] for stream in streams)

    # -- what is asked for

    def publish(self, fragment: int, number: int, now: float) -> None:
        """Queues a publication for everybody."""
        version = self._pipeline.publication(fragment, number)
        assert version is not None, f"version {number} of fragment {fragment} was just installed"
        # A line that cannot keep up must not fill the memory. A learner that misses a publication
        # that is dropped here fetches the state.
        oldest = number - msg.PUBLICATIONS_KEPT
        self.sender.discard(
            lambda old: (
                old.kind is DataKind.PUBLICATION
                and old.fragment == fragment
                and old.version <= oldest
            )
        )
        self._put_publication("", version, version.publication)
        self.pump(now)

    def serve(self, incarnation: str, fetch: msg.Fetch, now: float) -> None:
        """Queues what a learner asked for, once it listens: its first Fetch overtakes its
        subscriptions, and ZeroMQ drops what is sent before them."""
        if self._has_listener(incarnation):
            self._answer(incarnation, fetch, now)
            return
        early = self._early.setdefault(incarnation, [])
        if len(early) < EARLY_MAX:
            early.append(fetch)

    def _answer(self, incarnation: str, fetch: msg.Fetch, now: float) -> None:
        """Queues an answer. A publication that is no longer kept is answered with the first chunk
        of the state: the learner then fetches the rest of that."""
        if fetch.kind is DataKind.PUBLICATION:
            version = self._pipeline.publication(fetch.fragment, fetch.version)
            if version is not None:
                self._put_publication(incarnation, version, _asked(fetch, version.publication))
                return
            fetch = msg.Fetch(DataKind.STATE, fetch.fragment, fetch.version, 0, ((0, 1),))
        copy = self._copy(fetch)
        copy.asked_at = now
        copy.waiting.append((incarnation, fetch))
        self._put_waiting(copy)

    # -- states

    def _copy(self, fetch: msg.Fetch) -> _StateCopy:
        """The copy of the version that the learner is fetching if there is one, else one that leads
        to the head. A new copy replaces the oldest and is encoded on a worker."""
        copies = self._copies.setdefault(fetch.fragment, [])
        head, merged = self._pipeline.head(fetch.fragment)
        for copy in copies:
            if copy.state.version == fetch.version:
                return copy
        if copies:
            newest = copies[-1]
            behind = head.version - newest.state.version
            # With the publications after it a learner gets from the newest copy to the head.
            is_near = len(copies) == COPIES_MAX and behind < msg.PUBLICATIONS_KEPT
            if behind == 0 or is_near:
                return newest
        copy = _StateCopy(head, merged)
        copies.append(copy)
        del copies[:-COPIES_MAX]
        self._encode(copy)
        return copy

    def _encode(self, copy: _StateCopy) -> None:
        fragment = self._pipeline.loaded.table[copy.state.fragment]
        elements = self._settings.state_chunk_elements

        def encoded(result: Any, _now: float) -> None:
            copy.chunks = result_of(result)
            self._put_waiting(copy)

        self._pool.run(
            lambda: tuple(encode_values(fragment, copy.state.published, chunk_elements=elements)),
            encoded,
        )

    # -- to the queues

    def _put_waiting(self, copy: _StateCopy) -> None:
        """Queues what is asked of a copy; the header says which push of that learner it holds."""
        if copy.chunks:
            for incarnation, fetch in copy.waiting:
                newest = copy.merged.get(incarnation, 0)
                for chunk in _asked(fetch, copy.chunks):
                    self._put(DataKind.STATE, incarnation, copy.state, chunk, push_id=newest)
            copy.waiting.clear()

    def _put_publication(
        self, requester: str, version: Version, chunks: Collection[EncodedChunk]
    ) -> None:
        """Queues chunks of a publication; the header of chunk 0 says whose pushes it holds."""
        round_ = version.round_
        contributors = tuple(
            msg.Contributor(push.incarnation, push.push_id) for push in round_.contributions
        )
        for chunk in chunks:
            self._put(
                DataKind.PUBLICATION,
                requester,
                version.state,
                chunk,
                codec=round_.policy.codec,
                contributors=contributors if chunk.index == 0 else (),
            )

    def _put(
        self,
        kind: DataKind,
        requester: str,
        state: FragmentState,
        chunk: EncodedChunk,
        *,
        push_id: int = 0,
        codec: msg.CodecName = msg.LOSSLESS,
        contributors: tuple[msg.Contributor, ...] = (),
    ) -> None:
        """Queues one message, for the incarnation that asked or, "", for everybody."""
        header = msg.Header(
            epoch=self._epoch,
            kind=kind,
            incarnation=requester,
            fragment=state.fragment,
            version=state.version,
            push_id=push_id,
            chunk=chunk.index,
            codec=codec,
            payload_digest=chunk.payload_digest,
            result_digest=state.digests.published,
            contributors=contributors,
        )
        stream = chunk.index % self._settings.streams
        topic = asked_topic(requester, stream) if requester else live_topic(stream)
        self.sender.put(topic, header, chunk.payload, requester=requester)

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

    def turn(self, now: float, learners: Collection[str]) -> None:
        """Sends, and forgets copies that nobody asks for. Forgets questions of learners that are
        gone, and answers to them. `learners` are the incarnations that are here now."""
        here = frozenset(learners)
        if here != self._here:
            gone = self._here - here
            self._here = here
            self._count_listeners()
            # Answers to them would cost the line and reach nobody.
            self.sender.discard(lambda header: header.incarnation in gone)
        self._early = {each: asked for each, asked in self._early.items() if each in here}
        for copies in self._copies.values():
            copies[:] = [each for each in copies if now < each.asked_at + IDLE_S]
        self.pump(now)


def _asked(fetch: msg.Fetch, chunks: tuple[EncodedChunk, ...]) -> list[EncodedChunk]:
    """The chunks that a checked Fetch asks for."""
    return [chunk for first, count in fetch.chunks for chunk in chunks[first : first + count]]
