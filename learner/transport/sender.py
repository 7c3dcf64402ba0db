"""What a learner has to send: one outbox, credit, its rate. No decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrows.learner.transport.push import Parcel
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto.flow import Budget, Departure, Lane, Outbox, touches, wire_bytes
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Epoch, Header
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.terms import Ranges
from narrows.proto.timing import STREAM_LOOK_S


@dataclass
class DataCounters:
    """Bytes are those of ZeroMQ frames: topic, header and payload."""

    data_up_bytes: int = 0
    data_down_bytes: int = 0
    push_bytes: int = 0
    push_elements: int = 0
    publication_bytes: int = 0
    publication_elements: int = 0
    pushes: int = 0


class Sender:
    """Queues parcels and sends them as credit and rate allow. Used by one thread."""

    def __init__(self, wires: LearnerSockets, *, name: str, incarnation: str) -> None:
        self._wires, self._name, self._incarnation = wires, name, incarnation
        self.counters = DataCounters()
        self._run_id: str = ""
        self._epoch: Epoch = (0, 0, 0)
        self._outbox = Outbox[Parcel](1, STREAM_WINDOW_BYTES)
        self._budget = Budget()
        self._control_bytes = 0
        self._looked_at = 0.0
        #: When something may leave that may not leave yet; None: not before something happens.
        self.pump_at: float | None = None

    def identify(self, run_id: str, epoch: Epoch) -> None:
        """Headers carry these from now on; what was queued under another epoch is dropped."""
        if (run_id, epoch) != (self._run_id, self._epoch):
            self._outbox.discard(lambda parcel: True)
        self._run_id, self._epoch = run_id, epoch

    def open_streams(self, streams: int) -> None:
        """With another number of them all begins anew."""
        if streams != self._outbox.stream_count:
            self._outbox = Outbox[Parcel](streams, STREAM_WINDOW_BYTES)

    def set_rate(self, bits_per_s: float, now: float) -> None:
        self._budget.set_rate(bits_per_s, now)

    def put(self, parcel: Parcel) -> None:
        lane = Lane.STATE if parcel.kind is DataKind.FOUND else Lane.FRAGMENT
        self._outbox.put(parcel, len(parcel.chunk.payload), lane)

    def put_again(self, parcels: list[Parcel], ranges: Ranges, now: float) -> None:
        """Queues those of the parcels of one transfer that touch the ranges, all without any; but
        none that is on its way: repair may ask for what has not had the time to arrive."""
        coming = {_place(parcel) for parcel in self._outbox.coming(now)}
        for parcel in parcels:
            chunk = parcel.chunk
            wanted = not ranges or touches(ranges, chunk.offset, chunk.count)
            if wanted and _place(parcel) not in coming:
                self.put(parcel)

    def discard(self, unwanted: Callable[[Parcel], bool]) -> None:
        self._outbox.discard(unwanted)

    def acknowledge(self, positions: tuple[int, ...], now: float) -> None:
        self._outbox.acknowledge(positions, now)

    @property
    def is_due(self) -> bool:
        """Something waits to leave, or to be acknowledged."""
        return not self._outbox.idle

    @property
    def told_bytes(self) -> int:
        """What the broker has told to have received."""
        return self._outbox.told_bytes

    def received(self, size_bytes: int, now: float) -> None:
        """A message has come."""
        self._budget.receive(size_bytes, now)

    def pump(self, now: float) -> None:
        """Sends what credit and rate allow."""
        control_bytes = self._wires.control_up_bytes
        if control_bytes > self._control_bytes:
            self._budget.charge(wire_bytes(control_bytes - self._control_bytes), now)
            self._control_bytes = control_bytes
        for stream in self._wires.take_reconnected():
            self._budget.charge(self._outbox.reconnect(stream, now), now)
        if now >= self._looked_at + STREAM_LOOK_S:
            self._looked_at = now
            # What was under way may still leave from a queue behind us, and leaves again from here.
            self._budget.charge(self._outbox.renew_stalled(now), now)
        self.pump_at = None
        self._send_open(now)
        if not len(self._outbox):
            self._budget.pause()

    def _send_open(self, now: float) -> None:
        while self._wires.uplink_open:
            if not self._budget.is_open(now):
                self.pump_at = self._budget.opens_at(now) if len(self._outbox) else None
                return
            departure = self._outbox.take(now)
            if departure is None:
                return
            self._send(departure, now)

    def _send(self, departure: Departure[Parcel], now: float) -> None:
        parcel = departure.item
        header = encode_header(self._header(departure))
        sent = self._wires.send_data(departure.stream, header, parcel.chunk.payload)
        self._budget.send(wire_bytes(*sent), now)
        sent_bytes = sum(sent)
        self.counters.data_up_bytes += sent_bytes
        if parcel.kind is DataKind.PUSH:
            self.counters.push_bytes += sent_bytes
            self.counters.push_elements += parcel.chunk.count

    def _header(self, departure: Departure[Parcel]) -> Header:
        parcel = departure.item
        return Header(
            protocol=PROTOCOL,
            run_id=self._run_id,
            epoch=self._epoch,
            kind=parcel.kind,
            learner=self._name,
            incarnation=self._incarnation,
            fragment=parcel.fragment,
            version=parcel.version,
            push_id=parcel.push_id,
            offset=parcel.chunk.offset,
            count=parcel.chunk.count,
            codec=parcel.codec,
            payload_digest=parcel.chunk.payload_digest,
            result_digest=0,
            stream=departure.stream,
            position=departure.position,
        )


def _place(parcel: Parcel) -> tuple[DataKind, int, int, int]:
    return parcel.kind, parcel.fragment, parcel.push_id, parcel.chunk.offset
