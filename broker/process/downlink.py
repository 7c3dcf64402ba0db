"""Which publications and states each learner is sent, and their way to the socket."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

from narrows.broker.config import WanSection
from narrows.broker.merging import EncodedVersion
from narrows.broker.process.sockets import Traffic
from narrows.broker.process.subscriptions import Subscriptions
from narrows.broker.syncer import Deaf, Publish, RunState
from narrows.proto.flow import Hub, Parcel, Sender
from narrows.proto.frames import downlink_topic
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import DataKind
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.timing import STREAM_LOOK_S

PARCELS_PER_PUMP = 256
"""Data messages sent before the loop looks at its sockets again."""

EncodeState: TypeAlias = Callable[[int, Callable[[EncodedVersion, float], None]], None]
"""Encodes the newest state of a fragment behind the loop's back, then calls with it and `now`."""


class Wires(Protocol):
    """The sockets of the downlink."""

    subscribed: Subscriptions

    def send_data(self, topic: bytes, header: bytes, payload: bytes) -> None: ...


class Versions(Protocol):
    """The model, as far as it is published."""

    def publication(self, fragment: int, version: int) -> EncodedVersion | None: ...
    def newest_version(self, fragment: int) -> int: ...


@dataclass
class _Addressee:
    """A learner with a session."""

    sender: Sender
    states: dict[int, EncodedVersion] = field(default_factory=dict[int, EncodedVersion])
    """State last sent per fragment, while some of it is on its way: repair must come from the
    same version. Held longer, each would keep a copy of the fragment in memory."""


def _nobody_asks(learner: str, elements: int, now: float) -> None:
    """Takes elements of states that were queued; a broker without keys has no quotas."""


class Downlink:
    """The broker's data for each learner: publications, and states for those that are behind."""

    def __init__(
        self,
        wires: Wires,
        run: RunState,
        traffic: dict[str, Traffic],
        encode_state: EncodeState,
        warn: Callable[[str], None],
        queued_state: Callable[[str, int, float], None] = _nobody_asks,
        *,
        window_bytes: int = STREAM_WINDOW_BYTES,
    ) -> None:
        self._wires, self._run, self._traffic = wires, run, traffic
        self._encode_state, self._warn, self._deaf = encode_state, warn, Deaf()
        self._queued_state = queued_state
        self._window_bytes = window_bytes
        wan = run.config.wan
        self.hub = Hub(total=wan.total_down, each=wan.down)
        self._encoded: WeakValueDictionary[int, EncodedVersion] = WeakValueDictionary()
        """Newest encoded state by fragment, as long as it is on its way to somebody."""
        self._orders: dict[int, list[Publish]] = {}
        """States that are being encoded, by fragment."""
        self._addressees: dict[str, _Addressee] = {}
        self._looked_at = 0.0

    # Sessions.

    def admit(self, learner: str, incarnation: str) -> None:
        """A session begins."""
        topic, subscribed = partial(downlink_topic, learner, incarnation), self._wires.subscribed
        streams = self._run.settings.streams
        sender = Sender(
            learner, incarnation, topic=topic, streams=streams, window_bytes=self._window_bytes
        )
        sender.identify(self._run.run_id, self._run.epoch)
        before = self.hub.add(sender)
        if before is not None and before.incarnation != incarnation:
            subscribed.let_go(self._topics(before))
        subscribed.keep(self._topics(sender))
        self._addressees[learner] = _Addressee(sender)

    def forget(self, learner: str) -> None:
        """A session is over."""
        self.hub.remove(learner)
        self._addressees.pop(learner, None)

    def erase(self, learner: str) -> None:
        """A learner that is gone is not expected back."""
        self._addressees.pop(learner, None)
        if (before := self.hub.erase(learner)) is not None:
            self._wires.subscribed.let_go(self._topics(before))

    def set_rates(self, wan: WanSection, now: float) -> None:
        self.hub.set_rates(total=wan.total_down, each=wan.down, now=now)

    def sent(self, learner: str) -> tuple[int, ...]:
        """Where the streams to a learner stand; nothing if it has no session."""
        addressee = self._addressees.get(learner)
        return addressee.sender.positions if addressee is not None else ()

    def acknowledge(self, learner: str, positions: tuple[int, ...], now: float) -> None:
        if (addressee := self._addressees.get(learner)) is not None:
            addressee.sender.acknowledge(positions, now)
            if addressee.sender.is_idle:
                addressee.states.clear()

    def reconnect(self, topics: Set[bytes], now: float) -> None:
        """Somebody has subscribed to these topics (again): who was cut off is tried at once. That
        a stranger may do so for others costs a message each, and only while they are cut off."""
        for learner, addressee in self._addressees.items():
            for stream in addressee.sender.dead:
                if addressee.sender.topic(stream) in topics:
                    self.hub.reconnect(learner, stream, now)

    def _topics(self, sender: Sender) -> set[bytes]:
        streams = range(self._run.settings.streams)
        return {sender.topic(stream) for stream in streams}

    # What is to be sent.

    def publish(self, order: Publish, model: Versions, now: float) -> None:
        """Queues what a Publish effect names; a state that is gone is replaced by the newest."""
        addressee = self._addressees.get(order.learner)
        if addressee is None:
            return
        if order.kind is DataKind.STATE:
            self._queue_state(addressee, order, model, now)
            return
        publication = model.publication(order.fragment, order.version)
        if publication is None:
            return
        if self._falls_behind(addressee, order):
            # It would never catch up, and memory would grow: the newest state replaces them all.
            addressee.sender.discard(lambda p: p.fragment == order.fragment)
            state = replace(order, kind=DataKind.STATE, ranges=())
            self._queue_state(addressee, state, model, now)
            return
        self._put(addressee, order, publication, now)

    def _falls_behind(self, addressee: _Addressee, order: Publish) -> bool:
        """More publications of this fragment wait to leave than are kept."""
        waiting = {
            parcel.version
            for parcel in addressee.sender
            if parcel.fragment == order.fragment and parcel.kind is DataKind.PUBLICATION
        }
        return len(waiting | {order.version}) > PUBLICATIONS_KEPT

    def _queue_state(
        self, addressee: _Addressee, order: Publish, model: Versions, now: float
    ) -> None:
        state = addressee.states.get(order.fragment)
        if state is None or state.version != order.version:
            state = self._encoded.get(order.fragment)
        newest = model.newest_version(order.fragment)
        if state is not None and state.version in (order.version, newest):
            self._put_state(addressee, order, state, now)
            return
        orders = self._orders.setdefault(order.fragment, [])
        orders.append(order)
        if len(orders) == 1:
            self._encode_state(order.fragment, partial(self._state_encoded, order.fragment))

    def _state_encoded(self, fragment: int, state: EncodedVersion, now: float) -> None:
        self._encoded[fragment] = state
        for order in self._orders.pop(fragment):
            if (addressee := self._addressees.get(order.learner)) is not None:
                self._put_state(addressee, order, state, now)

    def _put_state(
        self, addressee: _Addressee, order: Publish, state: EncodedVersion, now: float
    ) -> None:
        addressee.states[order.fragment] = state
        addressee.sender.discard(
            lambda parcel: (
                parcel.kind is DataKind.STATE
                and parcel.fragment == order.fragment
                and parcel.version != state.version
            )
        )
        # Ranges are of the version that was asked for; another one is sent whole.
        ranges = order.ranges if state.version == order.version else ()
        self._put(addressee, replace(order, ranges=ranges), state, now)

    def _put(
        self, addressee: _Addressee, order: Publish, encoded: EncodedVersion, now: float
    ) -> None:
        what = (order.kind, order.fragment, encoded.version, order.push_id, encoded.codec)
        parcels = [Parcel(*what, chunk, encoded.digest) for chunk in encoded.chunks]
        queued = addressee.sender.put_again(parcels, order.ranges, now)
        if queued and order.kind is DataKind.STATE:
            self._queued_state(order.learner, queued, now)

    # What leaves.

    def pump(self, now: float) -> None:
        """Sends what credit and rates allow."""
        self._listen(now)
        for learner, datagram in self.hub.due(now, most=PARCELS_PER_PUMP):
            self._wires.send_data(*datagram.frames)
            self._traffic.setdefault(learner, Traffic()).down_bytes += datagram.frame_bytes

    def _listen(self, now: float) -> None:
        """Notes who has subscribed to all of its streams, and warns of who has not for long."""
        unheard = [each.sender for each in self._addressees.values() if not each.sender.is_heard]
        for sender in unheard:
            # Unsubscriptions are not believed: anybody can send them.
            sender.is_heard = self._wires.subscribed.has(self._topics(sender))
        if now >= self._looked_at + STREAM_LOOK_S:
            self._looked_at = now
            deaf = {each.incarnation: each.learner for each in unheard if not each.is_heard}
            for text in self._deaf.look(deaf, self._run.downlink_port, now):
                self._warn(text)
