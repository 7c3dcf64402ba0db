"""Everything on its way to one peer: parcels go in, datagrams come out as credit and rate allow.
[pure]

The learner's uplink, each learner's share of the broker's downlink and both hosts of the simulator
use this class, so that the simulator's seeds meet pacing, credit, stalls and repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from narrows.proto.codec import EncodedChunk
from narrows.proto.flow.assembly import touches
from narrows.proto.flow.budget import Budget, wire_bytes
from narrows.proto.flow.lanes import Lane, StateDebt
from narrows.proto.flow.outbox import Departure, Outbox
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Epoch, Header
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.terms import Ranges
from narrows.proto.timing import STREAM_LOOK_S


@dataclass(frozen=True)
class Parcel:
    """A chunk of a transfer, with what its header says of the transfer."""

    kind: DataKind
    fragment: int
    version: int
    """Base version of a PUSH, 0 of FOUND, else the version that results."""
    push_id: int
    """Id of a PUSH, 0 of FOUND, else the id of the addressee's last merged push."""
    codec: str
    chunk: EncodedChunk
    result_digest: int = 0
    """Digest of the version that results; 0 for PUSH and FOUND."""

    @property
    def lane(self) -> Lane:
        """Transfers of whole states yield to the fragments of open rounds."""
        is_state = self.kind in (DataKind.FOUND, DataKind.STATE)
        return Lane.STATE if is_state else Lane.FRAGMENT

    @property
    def place(self) -> tuple[DataKind, int, int, int, int]:
        """Equal for two parcels that carry the same elements of the same transfer."""
        push_id = self.push_id if self.kind is DataKind.PUSH else 0
        return self.kind, self.fragment, self.version, push_id, self.chunk.offset


class Datagram(NamedTuple):
    """A data message that leaves now."""

    stream: int
    frames: tuple[bytes, bytes, bytes]
    """Topic, header, payload."""
    parcel: Parcel

    @property
    def frame_bytes(self) -> int:
        """Size of the ZeroMQ frames, without what the line adds."""
        return sum(map(len, self.frames))

    @property
    def wire_bytes(self) -> int:
        """Size on the line; see budget.wire_bytes."""
        return wire_bytes(*map(len, self.frames))


class Sender:
    """Queue, credit and rate in front of the data streams of one peer.

    Every header carries `learner` and `incarnation`: they name the sender on the uplink, the
    addressee on the downlink. `topic` gives the first frame of a stream. Times are seconds on the
    caller's monotonic clock.
    """

    def __init__(
        self,
        learner: str,
        incarnation: str,
        *,
        topic: Callable[[int], bytes],
        streams: int = 1,
        window_bytes: int = STREAM_WINDOW_BYTES,
    ) -> None:
        self.learner, self.incarnation = learner, incarnation
        #: The peer has subscribed to every stream: before that pub/sub drops silently.
        self.is_heard = False
        self.budget = Budget()
        self.topic, self._window_bytes = topic, window_bytes
        self._run_id, self._epoch = "", (0, 0, 0)
        self._outbox = Outbox[Parcel](streams, window_bytes)
        self._looked_at = float("-inf")

    # The session.

    def identify(self, run_id: str, epoch: Epoch) -> None:
        """Headers carry these from now on; what was queued under another epoch is dropped."""
        if (run_id, epoch) != (self._run_id, self._epoch):
            self.discard(lambda parcel: True)
        self._run_id, self._epoch = run_id, epoch

    def open_streams(self, streams: int) -> None:
        """Another number of streams drops the queue, and positions begin at 0 again."""
        if streams != self._outbox.stream_count:
            debt = self._outbox.shared_debt
            self._outbox = Outbox[Parcel](streams, self._window_bytes, shared_debt=debt)

    def share_debt(self, debt: StateDebt) -> None:
        """All senders behind one line owe their states together; before anything is queued."""
        assert not self._outbox
        self._outbox.shared_debt = debt

    def start_at(self, positions: tuple[int, ...]) -> None:
        """Counts on from the positions of an earlier sender to the same process."""
        self._outbox.start_at(positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """Payload bytes that have left, by stream."""
        return self._outbox.positions

    # What is to be sent.

    def put(self, parcel: Parcel) -> None:
        """Queues a parcel behind the others of its lane."""
        self._outbox.put(parcel, len(parcel.chunk.payload), parcel.lane)

    def put_again(self, parcels: Iterable[Parcel], ranges: Ranges, now: float) -> int:
        """Queues the parcels that share an element with `ranges`, all of them if it is empty; but
        none that is on its way: repair may ask for what has not had the time to arrive. Returns
        the elements of what was queued."""
        queued = 0
        coming = {parcel.place for parcel in self._outbox.coming(now)}
        for parcel in parcels:
            chunk = parcel.chunk
            wanted = not ranges or touches(ranges, chunk.offset, chunk.count)
            if wanted and parcel.place not in coming:
                self.put(parcel)
                queued += chunk.count
        return queued

    def discard(self, unwanted: Callable[[Parcel], bool]) -> None:
        """Drops parcels, for example those of a settled push; none of them leaves again."""
        self._outbox.discard(unwanted)

    def __iter__(self) -> Iterator[Parcel]:
        """The parcels that wait to leave."""
        return iter(self._outbox)

    @property
    def holds_states(self) -> bool:
        """A state message waits to leave."""
        return self._outbox.holds_states

    @property
    def next_lane(self) -> Lane | None:
        """Lane of the parcel that leaves next; None if nothing waits."""
        return self._outbox.next_lane

    @property
    def next_bytes(self) -> int:
        """Payload bytes of the parcel that leaves next; 0 if nothing waits."""
        return self._outbox.next_bytes

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and all that left has arrived or is lost."""
        return self._outbox.idle

    # Credit and rate.

    def acknowledge(self, positions: tuple[int, ...], now: float) -> None:
        """The peer has told the position of the last message that came, by stream."""
        self._outbox.acknowledge(positions, now)

    @property
    def told_bytes(self) -> int:
        """Payload bytes that the peer has told to have received."""
        return self._outbox.told_bytes

    def received(self, size_bytes: int, now: float) -> None:
        """A message of the peer has come: TCP acknowledges it on the line that we send on."""
        self.budget.receive(size_bytes, now)

    def charge(self, size_bytes: float, now: float) -> None:
        """Bytes on the line that leave without waiting, such as control messages."""
        self.budget.charge(size_bytes, now)

    def set_rate(self, bits_per_s: float, now: float) -> None:
        """The most that may leave from now on; 0: no limit."""
        self.budget.set_rate(bits_per_s, now)

    @property
    def dead(self) -> tuple[int, ...]:
        """Streams that have stood still and have not moved since."""
        return self._outbox.dead

    def renew_stalled(self, now: float) -> int:
        """Every STREAM_LOOK_S: queues again what dead streams carried; returns how many bytes.

        They are charged again, because they may still leave from a queue of the system.
        """
        if now < self._looked_at + STREAM_LOOK_S:
            return 0
        self._looked_at = now
        return self._charge_lost(self._outbox.renew_stalled(now), now)

    def reconnect(self, stream: int, now: float) -> int:
        """A stream has a new connection: if it was dead, it is tried at once. Returns the bytes
        that are queued again."""
        return self._charge_lost(self._outbox.reconnect(stream, now), now)

    def _charge_lost(self, lost_bytes: int, now: float) -> int:
        self.budget.charge(lost_bytes, now)
        return lost_bytes

    # What leaves.

    def due(self, now: float) -> Iterator[Datagram]:
        """The datagrams that may leave now; each is charged when the iterator yields it."""
        self.renew_stalled(now)
        while self.is_waiting and self.budget.is_open(now):
            datagram = self.take(now)
            if datagram is None:
                break
            yield datagram
        self.rest()

    @property
    def is_waiting(self) -> bool:
        """Something waits, and the peer listens."""
        return self.is_heard and bool(self._outbox)

    def take(self, now: float) -> Datagram | None:
        """The next datagram, whatever the rate says; None if credit lets nothing go."""
        departure = self._outbox.take(now)
        if departure is None:
            return None
        parcel, stream = departure.item, departure.stream
        header = encode_header(self._header(departure))
        datagram = Datagram(stream, (self.topic(stream), header, parcel.chunk.payload), parcel)
        self.budget.send(datagram.wire_bytes, now)
        return datagram

    def rest(self) -> None:
        """Tells the budget if nothing waits: a burst after a pause is shorter."""
        if not self._outbox:
            self.budget.pause()

    def opens_at(self, now: float) -> float | None:
        """When the rate lets the next parcel go; None if none waits, or only for credit."""
        if not (self.is_waiting and self._outbox.has_credit(now)):
            return None
        return max(now, self.budget.opens_at(now))

    def looks_at(self, now: float) -> float | None:
        """When `renew_stalled` looks next; None if nothing is under way."""
        return max(now, self._looked_at + STREAM_LOOK_S) if self._outbox.in_flight else None

    def next_deadline(self, now: float) -> float | None:
        """When `due` is to be called even if nothing else happens; None: never."""
        times = (self.opens_at(now), self.looks_at(now))
        return min((time for time in times if time is not None), default=None)

    def _header(self, departure: Departure[Parcel]) -> Header:
        parcel = departure.item
        return Header(
            protocol=PROTOCOL,
            run_id=self._run_id,
            epoch=self._epoch,
            kind=parcel.kind,
            learner=self.learner,
            incarnation=self.incarnation,
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
