"""Whatever is put, acknowledged and allowed: rates hold, order is kept, nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from flow_cases import header_of, parcel, sender_to
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.flow.sender import Datagram
from narrows.proto.messages import DataKind
from narrows.proto.timing import RATE_WINDOW_S

RATES = (0.0, 1e5, 1e6, 5e6)


class Put(NamedTuple):
    size_bytes: int
    kind: DataKind


class Control(NamedTuple):
    size_bytes: int


class Rate(NamedTuple):
    bits_per_s: float


class Wait(NamedTuple):
    seconds: float


class Tell(NamedTuple):
    """The peer tells what has come."""


Action = Put | Control | Rate | Wait | Tell

KINDS = st.sampled_from([DataKind.PUBLICATION, DataKind.STATE])
ACTIONS = st.one_of(
    st.builds(Put, st.integers(1, 20_000), KINDS),
    st.builds(Put, st.integers(1, 20_000), KINDS),
    st.builds(Control, st.integers(40, 2_000)),
    st.builds(Rate, st.sampled_from(RATES)),
    st.builds(Wait, st.floats(0.001, 2.0)),
    st.builds(Tell),
)


class Script:
    """A sender and its peer, to which everything comes at once."""

    def __init__(self, streams: int, window_bytes: int) -> None:
        self.sender = sender_to(streams=streams, window_bytes=window_bytes)
        self.now, self.rate = 0.0, 0.0
        self.left: list[tuple[float, Datagram]] = []
        self.crossed: list[tuple[float, int]] = []
        """Time and size of all that has left since there is a rate."""
        self.puts = 0
        self.came = [0] * streams

    def play(self, action: Action) -> None:
        match action:
            case Put(size_bytes, kind):
                self.sender.put(parcel(self.puts, kind=kind, size_bytes=size_bytes))
                self.puts += 1
            case Control(size_bytes):
                self.sender.charge(size_bytes, self.now)
                self.crossed.append((self.now, size_bytes))
            case Rate(bits_per_s):
                self.set_rate(bits_per_s)
            case Wait(seconds):
                self.wait(seconds)
            case Tell():
                self.sender.acknowledge(tuple(self.came), self.now)
        self.serve()

    def set_rate(self, bits_per_s: float) -> None:
        if not self.rate:
            self.crossed.clear()
        self.rate = bits_per_s
        self.sender.set_rate(bits_per_s, self.now)

    def wait(self, seconds: float) -> None:
        """Serves whenever the sender asks for it."""
        until = self.now + seconds
        while (deadline := self.sender.next_deadline(self.now)) is not None and deadline < until:
            assert deadline > self.now, "it asks for what it could have done"
            self.now = deadline
            self.serve()
        self.now = until

    def serve(self) -> None:
        for datagram in self.sender.due(self.now):
            self.left.append((self.now, datagram))
            self.crossed.append((self.now, datagram.wire_bytes))
            self.came[datagram.stream] = header_of(datagram).position
            self.check_second(datagram)

    def check_second(self, datagram: Datagram) -> None:
        if self.rate:
            second_bytes = sum(size for at, size in self.crossed if at > self.now - RATE_WINDOW_S)
            assert second_bytes <= self.rate / 8 * RATE_WINDOW_S + datagram.wire_bytes

    def check_order(self) -> None:
        """Positions count the bytes of each stream; fragments leave in the order of their puts."""
        positions = defaultdict[int, int](int)
        for _, datagram in self.left:
            positions[datagram.stream] += len(datagram.frames[2])
            assert header_of(datagram).position == positions[datagram.stream]

    def offsets(self, kind: DataKind) -> list[int]:
        return [d.parcel.chunk.offset for _, d in self.left if d.parcel.kind is kind]


@given(
    st.lists(ACTIONS, max_size=60), st.integers(1, 4), st.sampled_from([5_000, 100_000, 32 << 20])
)
def test_a_script_of_puts_acknowledgements_and_rates(
    actions: list[Action], streams: int, window_bytes: int
) -> None:
    script = Script(streams, window_bytes)
    for action in actions:
        script.play(action)
    script.check_order()
    for _ in range(4 * script.puts):
        script.play(Tell())
        script.wait(2.0)
    script.play(Tell())
    assert script.sender.is_idle
    script.check_order()
    left = {datagram.parcel.chunk.offset for _, datagram in script.left}
    assert left == set(range(script.puts))


@given(st.lists(st.builds(Put, st.integers(1, 5_000), KINDS), min_size=1, max_size=40))
def test_each_lane_keeps_its_order_and_each_parcel_leaves_once(puts: list[Put]) -> None:
    script = Script(3, 20_000)
    script.play(Rate(1e6))
    for put in puts:
        script.play(put)
        script.play(Tell())
    while not script.sender.is_idle:
        script.wait(0.1)
        script.play(Tell())
    for kind in (DataKind.PUBLICATION, DataKind.STATE):
        expected = [index for index, put in enumerate(puts) if put.kind is kind]
        assert script.offsets(kind) == expected
