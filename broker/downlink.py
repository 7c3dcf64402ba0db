"""Publications and states on their way to learners: one outbox each, credit, topics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from weakref import WeakValueDictionary

from narrows.broker.events import Publish
from narrows.broker.model import EncodedVersion, GlobalModel
from narrows.broker.state import RunState
from narrows.broker.wires import Traffic, Wires
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL, PUBLICATIONS_KEPT
from narrows.proto.messages import DataKind, Header
from narrows.proto.outbox import Lane, Outbox
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.transfer import EncodedChunk

PARCELS_PER_PUMP = 256
"""Data messages sent before the loop looks at its sockets again."""


EncodeState: TypeAlias = Callable[[int, Callable[[EncodedVersion], None]], None]
"""Encodes the newest state of a fragment behind the loop's back, then calls."""


@dataclass(frozen=True)
class _Parcel:
    """A chunk for one learner."""

    kind: DataKind
    fragment: int
    version: int
    push_id: int
    codec: str
    chunk: EncodedChunk
    result_digest: int


@dataclass
class _Addressee:
    incarnation: str
    outbox: Outbox[_Parcel]
    states: dict[int, EncodedVersion] = field(default_factory=dict[int, EncodedVersion])
    """State last sent per fragment, while some of it is on its way: repair must come from the
    same version. Held longer, each would keep a copy of the fragment in memory."""


class Downlink:
    """What the broker has to send to each learner."""

    def __init__(
        self,
        wires: Wires,
        run: RunState,
        traffic: dict[str, Traffic],
        encode_state: EncodeState,
    ) -> None:
        self._wires = wires
        self._run = run
        self._traffic = traffic
        self._encode_state = encode_state
        self._encoded: WeakValueDictionary[int, EncodedVersion] = WeakValueDictionary()
        """Newest encoded state by fragment, as long as it is on its way to somebody."""
        self._orders: dict[int, list[Publish]] = {}
        """States that are being encoded, by fragment."""
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
            self._queue_state(addressee, replace(order, kind=DataKind.STATE, ranges=()), model)
            return
        # Repair asks for what may still wait to leave: send it once.
        wanted = (order.kind, order.fragment, order.version)
        addressee.outbox.discard(lambda p: (p.kind, p.fragment, p.version) == wanted)
        self._put(addressee, order, publication)

    def _falls_behind(self, addressee: _Addressee, order: Publish) -> bool:
        """More publications of this fragment wait to leave than are kept."""
        waiting = {
            parcel.version
            for parcel in addressee.outbox
            if parcel.fragment == order.fragment and parcel.kind is DataKind.PUBLICATION
        }
        return len(waiting | {order.version}) > PUBLICATIONS_KEPT

    def _queue_state(self, addressee: _Addressee, order: Publish, model: GlobalModel) -> None:
        state = addressee.states.get(order.fragment)
        if state is None or state.version != order.version:
            state = self._encoded.get(order.fragment)
        newest = model.fragments[order.fragment].version
        if state is not None and state.version in (order.version, newest):
            self._put_state(addressee, order, state)
            return
        orders = self._orders.setdefault(order.fragment, [])
        orders.append(order)
        if len(orders) == 1:
            self._encode_state(order.fragment, lambda s: self._state_encoded(order.fragment, s))

    def _state_encoded(self, fragment: int, state: EncodedVersion) -> None:
        self._encoded[fragment] = state
        for order in self._orders.pop(fragment):
            addressee = self._addressees.get(order.learner)
            if addressee is not None:
                self._put_state(addressee, order, state)

    def _put_state(self, addressee: _Addressee, order: Publish, state: EncodedVersion) -> None:
        addressee.states[order.fragment] = state
        addressee.outbox.discard(
            lambda parcel: parcel.kind is DataKind.STATE and parcel.fragment == order.fragment
        )
        # Ranges are of the version that was asked for; another one is sent whole.
        ranges = order.ranges if state.version == order.version else ()
        self._put(addressee, replace(order, ranges=ranges), state)

    def _put(self, addressee: _Addressee, order: Publish, version: EncodedVersion) -> None:
        """Queues the chunks that touch the order's ranges, all of them if it has none."""
        lane = Lane.STATE if order.kind is DataKind.STATE else Lane.FRAGMENT
        for chunk in version.chunks:
            if not order.ranges or _touches(order.ranges, chunk.offset, chunk.count):
                parcel = _Parcel(
                    order.kind, order.fragment, version.version, order.push_id, version.codec,
                    chunk, version.digest,
                )  # fmt: skip
                addressee.outbox.put(parcel, len(chunk.payload), lane)

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
                offset=parcel.chunk.offset,
                count=parcel.chunk.count,
                codec=parcel.codec,
                payload_digest=parcel.chunk.payload_digest,
                result_digest=parcel.result_digest,
                stream=departure.stream,
                position=departure.position,
            )
            topic = topic_of(addressee.incarnation, departure.stream)
            yield topic, encode_header(header), parcel.chunk.payload
        self.has_more = True


def topic_of(incarnation: str, stream: int) -> bytes:
    """The downlink topic of one stream of one learner's incarnation."""
    return f"{incarnation}/{stream}".encode()


def _touches(ranges: tuple[tuple[int, int], ...], offset: int, count: int) -> bool:
    return any(start < offset + count and offset < start + length for start, length in ranges)
