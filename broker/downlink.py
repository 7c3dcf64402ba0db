"""Publications and states on their way to learners: one outbox each, credit, topics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from narrows.broker.events import Publish
from narrows.broker.model import GlobalModel
from narrows.broker.state import RunState
from narrows.broker.wires import Traffic, Wires
from narrows.proto.frames import digest, encode_header
from narrows.proto.kernels import F32
from narrows.proto.limits import PROTOCOL, PUBLICATIONS_KEPT
from narrows.proto.messages import DataKind, Header
from narrows.proto.outbox import Lane, Outbox
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.transfer import STATE_CODEC

PARCELS_PER_PUMP = 256
"""Data messages sent before the loop looks at its sockets again."""


@dataclass(frozen=True)
class _State:
    """A version that is sent whole: the published copy and nothing else of it."""

    version: int
    digest: int
    published: F32


@dataclass(frozen=True)
class _Parcel:
    """A chunk for one learner; a state's payload is cut from its array when it leaves."""

    kind: DataKind
    fragment: int
    version: int
    push_id: int
    offset: int
    count: int
    codec: str
    payload: bytes | None
    payload_digest: int
    state: _State | None
    result_digest: int


@dataclass
class _Addressee:
    incarnation: str
    outbox: Outbox[_Parcel]
    states: dict[int, _State] = field(default_factory=dict[int, "_State"])
    """State last sent per fragment, while some of it is on its way: repair must come from the
    same version. Held longer, each would keep a copy of the fragment in memory."""


class Downlink:
    """What the broker has to send to each learner."""

    def __init__(self, wires: Wires, run: RunState, traffic: dict[str, Traffic]) -> None:
        self._wires = wires
        self._run = run
        self._traffic = traffic
        self._addressees: dict[str, _Addressee] = {}
        self.has_more = False
        """The last pump stopped before all was gone that may go."""

    def admit(self, learner: str, incarnation: str) -> None:
        outbox = Outbox[_Parcel](self._run.settings.streams, STREAM_WINDOW_BYTES)
        self._addressees[learner] = _Addressee(incarnation, outbox)

    def forget(self, learner: str) -> None:
        self._addressees.pop(learner, None)

    def acknowledge(self, learner: str, positions: tuple[int, ...], now: float) -> None:
        addressee = self._addressees.get(learner)
        if addressee is not None:
            addressee.outbox.acknowledge(positions, now)
            if addressee.outbox.idle:
                addressee.states.clear()

    def publish(self, order: Publish, model: GlobalModel) -> None:
        """Queues what a Publish effect names; a state that is gone is replaced by the newest."""
        addressee = self._addressees.get(order.learner)
        if addressee is None:
            return
        if order.kind is DataKind.STATE:
            self._queue_state(addressee, order, model)
            return
        publication = model.publication(order.fragment, order.version)
        if publication is None:
            return
        if self._falls_behind(addressee, order):
            # It would never catch up, and memory would grow: the newest state replaces them all.
            addressee.outbox.discard(lambda p: p.fragment == order.fragment)
            self._queue_state(addressee, order, model)
            return
        # Repair asks for what may still wait to leave: send it once.
        wanted = (order.kind, order.fragment, order.version)
        addressee.outbox.discard(lambda p: (p.kind, p.fragment, p.version) == wanted)
        for chunk in publication.chunks:
            if order.ranges and not _touches(order.ranges, chunk.offset, chunk.count):
                continue
            parcel = _Parcel(
                order.kind,
                order.fragment,
                order.version,
                order.push_id,
                chunk.offset,
                chunk.count,
                publication.codec,
                chunk.payload,
                chunk.payload_digest,
                None,
                publication.digest,
            )
            addressee.outbox.put(parcel, len(chunk.payload))

    def _falls_behind(self, addressee: _Addressee, order: Publish) -> bool:
        """More publications of this fragment wait to leave than are kept."""
        waiting = {
            parcel.version
            for parcel in addressee.outbox
            if parcel.fragment == order.fragment and parcel.kind is DataKind.PUBLICATION
        }
        return len(waiting | {order.version}) > PUBLICATIONS_KEPT

    def _queue_state(self, addressee: _Addressee, order: Publish, model: GlobalModel) -> None:
        newest, ranges = model.fragments[order.fragment], order.ranges
        state = _State(newest.version, newest.digest, newest.published)
        before = addressee.states.get(order.fragment)
        if before is not None and before.version == order.version:
            state = before
        elif state.version != order.version:
            ranges = ()
        addressee.states[order.fragment] = state
        addressee.outbox.discard(
            lambda parcel: parcel.kind is DataKind.STATE and parcel.fragment == order.fragment
        )
        for offset, count in model.table[order.fragment].chunks(self._run.settings.chunk_elements):
            if ranges and not _touches(ranges, offset, count):
                continue
            parcel = _Parcel(
                DataKind.STATE,
                order.fragment,
                state.version,
                order.push_id,
                offset,
                count,
                STATE_CODEC,
                None,
                0,
                state,
                state.digest,
            )
            addressee.outbox.put(parcel, count * 4, Lane.STATE)

    @property
    def states_held(self) -> int:
        """Fragments' copies that are kept for transfers under way."""
        return sum(len(addressee.states) for addressee in self._addressees.values())

    def pump(self, now: float) -> None:
        """Sends what the credit allows, learners in turn."""
        self.has_more = False
        for name, addressee in self._addressees.items():
            addressee.outbox.renew_stalled(now)
            for topic, header, payload in self._departures(name, addressee, now):
                self._wires.send_data(topic, header, payload)
                size_bytes = len(topic) + len(header) + len(payload)
                self._traffic.setdefault(name, Traffic()).down_bytes += size_bytes

    def _listens(self, incarnation: str) -> bool:
        """The learner has subscribed to all of its streams."""
        streams = range(self._run.settings.streams)
        return all(topic_of(incarnation, s) in self._wires.subscribed for s in streams)

    def _departures(
        self, name: str, addressee: _Addressee, now: float
    ) -> Iterator[tuple[bytes, bytes, bytes]]:
        for _ in range(PARCELS_PER_PUMP):
            # Nobody may listen yet: pub/sub would drop silently what the credit lets go.
            if not self._listens(addressee.incarnation):
                return
            departure = addressee.outbox.take(now)
            if departure is None:
                return
            parcel = departure.item
            payload, payload_digest = parcel.payload, parcel.payload_digest
            if payload is None:
                assert parcel.state is not None
                stop = parcel.offset + parcel.count
                payload = parcel.state.published[parcel.offset : stop].tobytes()
                payload_digest = digest(payload)
            header = Header(
                protocol=PROTOCOL,
                run_id=self._run.run_id,
                epoch=self._run.epoch,
                kind=parcel.kind,
                learner=name,
                incarnation=addressee.incarnation,
                fragment=parcel.fragment,
                version=parcel.version,
                push_id=parcel.push_id,
                offset=parcel.offset,
                count=parcel.count,
                codec=parcel.codec,
                payload_digest=payload_digest,
                result_digest=parcel.result_digest,
                stream=departure.stream,
                position=departure.position,
            )
            topic = topic_of(addressee.incarnation, departure.stream)
            yield topic, encode_header(header), payload
        self.has_more = True


def topic_of(incarnation: str, stream: int) -> bytes:
    """The downlink topic of one stream of one learner's incarnation."""
    return f"{incarnation}/{stream}".encode()


def _touches(ranges: tuple[tuple[int, int], ...], offset: int, count: int) -> bool:
    return any(start < offset + count and offset < start + length for start, length in ranges)
