"""Publications and states on their way to learners: one outbox each, credit, rates, topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from weakref import WeakValueDictionary

from narrows.broker.config import WanSection
from narrows.broker.merging import EncodedVersion, GlobalModel
from narrows.broker.process.sockets import BrokerSockets, Traffic
from narrows.broker.syncer import Deaf, Publish, RunState
from narrows.proto.codec import EncodedChunk
from narrows.proto.flow import STATE_FLOOR, Budget, Departure, Lane, Outbox, touches, wire_bytes
from narrows.proto.frames import downlink_topic, encode_header
from narrows.proto.limits import PAYLOAD_BYTES_MAX, PROTOCOL, PUBLICATIONS_KEPT
from narrows.proto.messages import DataKind, Header
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.timing import STREAM_LOOK_S

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
    budget: Budget
    served_bytes: int = 0
    """Beside those of the others: who has had least is served next."""
    listens: bool = False
    """It has subscribed to all of its streams; unsubscriptions are not believed."""
    is_active: bool = False
    """It had something that might leave when it was looked at last."""
    states: dict[int, EncodedVersion] = field(default_factory=dict[int, EncodedVersion])
    """State last sent per fragment, while some of it is on its way: repair must come from the
    same version. Held longer, each would keep a copy of the fragment in memory."""


class Downlink:
    """What the broker has to send to each learner."""

    def __init__(
        self,
        wires: BrokerSockets,
        run: RunState,
        traffic: dict[str, Traffic],
        encode_state: EncodeState,
        warn: Callable[[str], None],
    ) -> None:
        self._wires = wires
        self._run = run
        self._traffic = traffic
        self._encode_state, self._warn, self._deaf = encode_state, warn, Deaf()
        self._encoded: WeakValueDictionary[int, EncodedVersion] = WeakValueDictionary()
        """Newest encoded state by fragment, as long as it is on its way to somebody."""
        self._orders: dict[int, list[Publish]] = {}
        """States that are being encoded, by fragment."""
        self._addressees: dict[str, _Addressee] = {}
        self._before: dict[str, _Addressee] = {}
        """The last of each learner, lost ones too: what it was sent still counts."""
        self._served_bytes = 0
        """Of the one that was served last: who joins in begins there."""
        self._owed_to_states = 0.0
        self._total = Budget(run.config.wan.total_down)
        self._looked_at = 0.0
        self.pump_at: float | None = None
        """When something may leave that may not leave yet; None: not before something happens."""

    def admit(self, learner: str, incarnation: str) -> None:
        outbox = Outbox[_Parcel](self._run.settings.streams, STREAM_WINDOW_BYTES)
        before = self._before.get(learner)
        if before is not None and before.incarnation == incarnation:
            outbox.start_at(before.outbox.positions)
        elif before is not None:
            self._wires.subscribed.let_go(self._topics(before.incarnation))
        self._wires.subscribed.keep(self._topics(incarnation))
        budget = before.budget if before is not None else Budget(self._run.config.wan.down)
        addressee = _Addressee(incarnation, outbox, budget)
        self._addressees[learner] = self._before[learner] = addressee

    def set_rates(self, wan: WanSection, now: float) -> None:
        self._total.set_rate(wan.total_down, now)
        for addressee in self._before.values():
            addressee.budget.set_rate(wan.down, now)

    def charge(self, learner: str, size_bytes: float, now: float) -> None:
        """Bytes to a learner that do not wait for the budget: control, acknowledgements of TCP."""
        self._total.charge(size_bytes, now)
        if (addressee := self._addressees.get(learner)) is not None:
            addressee.budget.charge(size_bytes, now)

    def received(self, learner: str, size_bytes: int, now: float) -> None:
        """Bytes from a learner: TCP acknowledges them on the line that we send on."""
        self._total.receive(size_bytes, now)
        if (addressee := self._addressees.get(learner)) is not None:
            addressee.budget.receive(size_bytes, now)

    def forget(self, learner: str) -> None:
        addressee = self._addressees.pop(learner, None)
        if addressee is not None:
            addressee.outbox.discard(lambda parcel: True)
            addressee.states.clear()

    def erase(self, learner: str) -> None:
        """A learner that is gone is not expected back: what it was sent counts no more."""
        self.forget(learner)
        before = self._before.pop(learner, None)
        if before is not None:
            self._wires.subscribed.let_go(self._topics(before.incarnation))

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
            lambda parcel: (
                parcel.kind is DataKind.STATE
                and parcel.fragment == order.fragment
                and parcel.version != state.version
            )
        )
        # Ranges are of the version that was asked for; another one is sent whole.
        ranges = order.ranges if state.version == order.version else ()
        self._put(addressee, replace(order, ranges=ranges), state)

    def _put(self, addressee: _Addressee, order: Publish, version: EncodedVersion) -> None:
        """Queues the chunks that touch the order's ranges, all of them if it has none; but none
        that is on its way: repair may ask for what has not had the time to arrive."""
        lane = Lane.STATE if order.kind is DataKind.STATE else Lane.FRAGMENT
        what = (order.kind, order.fragment, version.version)
        coming = {
            parcel.chunk.offset
            for parcel in addressee.outbox.coming(time.monotonic())
            if (parcel.kind, parcel.fragment, parcel.version) == what
        }
        for chunk in version.chunks:
            wanted = not order.ranges or touches(order.ranges, chunk.offset, chunk.count)
            if wanted and chunk.offset not in coming:
                parcel = _Parcel(
                    order.kind, order.fragment, version.version, order.push_id, version.codec,
                    chunk, version.digest,
                )  # fmt: skip
                addressee.outbox.put(parcel, len(chunk.payload), lane)

    def pump(self, now: float) -> None:
        """Sends what credit and rates allow: fragments before states, and of the learners the one
        that has had least."""
        if now >= self._looked_at + STREAM_LOOK_S:
            self._looked_at = now
            self._renew_stalled(now)
            self._name_deaf(now)
        waiting = self._waiting()
        late: list[float] = []
        for _ in range(PARCELS_PER_PUMP):
            if not waiting:
                break
            if not self._total.is_open(now):
                late.append(self._total.opens_at(now))
                break
            name = min(waiting, key=lambda n: self._turn_of(waiting[n]))
            addressee = waiting[name]
            if not addressee.budget.is_open(now):
                late.append(addressee.budget.opens_at(now))
            elif self._send_next(name, addressee, now):
                continue
            else:
                addressee.is_active = False
            del waiting[name]
        else:
            late.append(now)
        self.pump_at = min(late, default=None)
        idle = [addressee for addressee in self._addressees.values() if not addressee.outbox]
        for addressee in idle:
            addressee.budget.pause()
        if len(idle) == len(self._addressees):
            self._total.pause()

    def reconnect(self, topics: Set[bytes], now: float) -> None:
        """Somebody has subscribed to these topics (again): who was cut off is tried at once. That
        a stranger may do so for others costs a message each, and only while they are cut off."""
        for addressee in self._addressees.values():
            for stream in addressee.outbox.dead:
                if downlink_topic(addressee.incarnation, stream) in topics:
                    self._charge_lost(addressee, addressee.outbox.reconnect(stream, now), now)

    def _renew_stalled(self, now: float) -> None:
        for addressee in self._addressees.values():
            self._charge_lost(addressee, addressee.outbox.renew_stalled(now), now)

    def _charge_lost(self, addressee: _Addressee, lost_bytes: int, now: float) -> None:
        """They may still leave from a queue behind us, and leave again from here."""
        self._total.charge(lost_bytes, now)
        addressee.budget.charge(lost_bytes, now)

    def _name_deaf(self, now: float) -> None:
        each = self._addressees.items()
        deaf = {a.incarnation: name for name, a in each if not self._listens(a)}
        for text in self._deaf.look(deaf, self._run.downlink_port, now):
            self._warn(text)

    def _waiting(self) -> dict[str, _Addressee]:
        """Who has something to be sent. One that had nothing, or no credit, does not get what it
        missed."""
        waiting: dict[str, _Addressee] = {}
        for name, addressee in self._addressees.items():
            # Nobody may listen yet: pub/sub would drop silently what the credit lets go.
            if addressee.outbox and self._listens(addressee):
                waiting[name] = addressee
            if not addressee.is_active:
                addressee.served_bytes = max(addressee.served_bytes, self._served_bytes)
            addressee.is_active = name in waiting
        return waiting

    def _turn_of(self, addressee: _Addressee) -> tuple[bool, int]:
        is_state = addressee.outbox.next_lane is Lane.STATE
        return is_state is (self._owed_to_states <= 0), addressee.served_bytes

    def _send_next(self, name: str, addressee: _Addressee, now: float) -> bool:
        """False if credit lets nothing go."""
        lane, departure = addressee.outbox.next_lane, addressee.outbox.take(now)
        if departure is None:
            return False
        topic = downlink_topic(addressee.incarnation, departure.stream)
        header = encode_header(self._header(name, addressee, departure))
        payload = departure.item.chunk.payload
        self._wires.send_data(topic, header, payload)
        cost_bytes = wire_bytes(len(topic), len(header), len(payload))
        self._total.send(cost_bytes, now)
        addressee.budget.send(cost_bytes, now)
        self._served_bytes = addressee.served_bytes
        addressee.served_bytes += cost_bytes
        if lane is Lane.STATE:
            self._owed_to_states = max(0.0, self._owed_to_states - cost_bytes)
        else:
            self._owed_to_states += cost_bytes * STATE_FLOOR / (1 - STATE_FLOOR)
            self._owed_to_states = min(self._owed_to_states, 1.0 * PAYLOAD_BYTES_MAX)
        traffic = self._traffic.setdefault(name, Traffic())
        traffic.down_bytes += len(topic) + len(header) + len(payload)
        return True

    def _listens(self, to: _Addressee) -> bool:
        """The learner has subscribed to all of its streams."""
        to.listens = to.listens or self._wires.subscribed.has(self._topics(to.incarnation))
        return to.listens

    def _topics(self, incarnation: str) -> set[bytes]:
        return {downlink_topic(incarnation, s) for s in range(self._run.settings.streams)}

    def _header(self, name: str, to: _Addressee, departure: Departure[_Parcel]) -> Header:
        parcel = departure.item
        return Header(
            protocol=PROTOCOL,
            run_id=self._run.run_id,
            epoch=self._run.epoch,
            kind=parcel.kind,
            learner=name,
            incarnation=to.incarnation,
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
