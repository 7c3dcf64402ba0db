"""A broker's host over ports of this test, and learners that are played by hand."""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from narrows.broker.config import BrokerConfig, load_broker
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.broker.store import Store
from narrows.broker.syncer import events as ev
from narrows.proto import codec, wire
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.layout import build_table, fingerprint
from narrows.proto.ports import Done

LAYOUT = msg.Layout(
    0,
    (
        msg.LayoutEntry("w", (520, 512), "float32", "rda"),
        msg.LayoutEntry("b", (700,), "float32", "mean"),
    ),
)
(FRAGMENT,) = build_table(LAYOUT.entries, 1)
"""All of it, in two chunks."""

T = TypeVar("T")


class Pool:
    """Workers with two moments: the work is done, the loop is told."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], Any], Done]] = deque()
        self.told: deque[tuple[Any, Done]] = deque()

    def run(self, work: Callable[[], Any], done: Done) -> None:
        self.waiting.append((work, done))

    def work(self) -> None:
        """Does everything that waits; the loop hears nothing yet."""
        while self.waiting:
            work, done = self.waiting.popleft()
            try:
                result = work()
            except Exception as error:
                result = error
            self.told.append((result, done))

    def tell(self, now: float) -> None:
        while self.told:
            result, done = self.told.popleft()
            done(result, now)


class Wires:
    """Messages that a host sends, decoded."""

    def __init__(self) -> None:
        self.controls: list[tuple[str, msg.ControlMessage]] = []
        self.datas: list[tuple[str, msg.Header, bytes, bool]] = []
        self.is_full = False

    def control(self, peer: str, frames: list[bytes]) -> bool:
        if self.is_full:
            return False
        self.controls.append((peer, wire.decode_control(frames, msg.CONTROL_BYTES_MAX)))
        return True

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        if self.is_full and not lossy:
            return False
        self.datas.append((topic, wire.decode_header(header), payload, lossy))
        return True


@dataclass
class House:
    """One state directory and the lives of a broker on it, in virtual time."""

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    now: float = 100.0
    lives: int = 0
    notes: list[ev.Note] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Connections whose messages were refused; "" for that of a data message."""

    def __post_init__(self) -> None:
        flags = {"fragments.count": 1, "broker.state_dir": str(self.folder), **self.settings}
        self.config: BrokerConfig = load_broker(None, flags)
        self.start()

    def start(self) -> None:
        """The next life; the last one may have been killed."""
        self.lives += 1
        self.wires = Wires()
        self.pool = Pool()
        self.store = Store(self.folder, durable=False)
        self.host = Host(
            self.config, self.wires, self.pool, self.store, lambda: self.now, f"{self.lives:08x}",
            now_unix=lambda: self.now, on_note=self.notes.append,
            on_fault=lambda peer, now: self.faults.append(peer),
        )  # fmt: skip

    def subscribe(self, incarnation: str) -> None:
        """A connection listens to publications and to what an incarnation has asked for."""
        connection = Connection(zlib.crc32(incarnation.encode()), self.lives)
        for stream in range(self.config.shared.streams):
            for topic in (wire.live_topic(stream), wire.asked_topic(incarnation, stream)):
                self.host.downlink.listens(connection, topic, True, self.now)

    @property
    def heads(self) -> tuple[int, ...]:
        """Durable versions; empty before version 0."""
        model = self.host.pipeline.model
        return model.heads if model is not None else ()

    def kill(self) -> None:
        """Ends a life as SIGKILL does: what the pool has not done is never done."""
        self.store.close()

    def settle(self) -> None:
        """Lets the workers and the loop do all that can be done now."""
        for _ in range(20):
            self.pool.work()
            self.pool.tell(self.now)
            self.host.turn(self.now)
        self.host.syncer.check()

    def wait(self, seconds: float, *learners: "HandLearner") -> None:
        """Time passes in steps of 0.1 s; each second the learners report a step."""
        for tenth in range(round(10 * seconds)):
            self.now += 0.1
            if tenth % 10 == 0:
                for each in learners:
                    each.report()
            self.settle()

    def until(self, condition: Callable[[], object], what: str, *learners: "HandLearner") -> None:
        for _ in range(60):
            if condition():
                return
            self.wait(1.0, *learners)
        raise AssertionError(f"in vain: {what}; {[note.text for note in self.notes[-5:]]}")

    def noted(self, event: str) -> list[ev.Note]:
        return [note for note in self.notes if note.event == event]


class HandLearner:
    """Says what a test has it say, and applies what it hears to its published copy."""

    def __init__(self, house: House, name: str) -> None:
        self.house = house
        self.name = name
        self.incarnation = f"{name}.00000001"
        self.peer = name.encode().hex()
        self.copy: F32 | None = None
        self.version = -1
        self.steps = self.push_id = 0
        self.epoch = ""
        self.outcomes: list[tuple[msg.Contributor, ...]] = []
        """Contributors of each publication that it adopted."""
        self._seen = 0
        self._parts: dict[tuple[msg.DataKind, int], dict[int, tuple[msg.Header, bytes]]] = {}

    # What it says.

    def say(self, message: msg.ControlMessage) -> None:
        frames = wire.encode_control(message)
        self.house.host.control(self.peer, None, frames, self.house.now)

    def hello(self, *, listens: bool = True) -> None:
        who = msg.PROTOCOL, self.name, self.incarnation
        self.say(msg.Hello(*who, "", self.epoch, fingerprint(LAYOUT), ()))
        if listens:
            self.house.subscribe(self.incarnation)
        self.epoch = self.heard(msg.Welcome)[-1].beat.epoch

    def report(self) -> None:
        self.steps += 1
        self.say(msg.Report(self.steps, 100 * self.steps, 1.0, (self.version,)))

    def seed(self, *, damaged: bytes | None = None) -> None:
        """Sends layout and parameters, which are all 1; `damaged` is the last chunk's payload."""
        self.send(msg.DataKind.LAYOUT, 0, msg.LOSSLESS, wire.pack_layout(LAYOUT))
        elements = self.house.config.shared.state_chunk_elements
        chunks = codec.encode_values(FRAGMENT, filled(1.0), chunk_elements=elements)
        payloads = [chunk.payload for chunk in chunks]
        if damaged is not None:
            payloads[-1] = damaged
        for index, payload in enumerate(payloads):
            self.send(msg.DataKind.SEED, index, msg.LOSSLESS, payload)

    def push(self, value: float = 0.01, tokens: int = 100, loss: float | None = None) -> int:
        """Announces and sends an outer gradient that is `value` everywhere; the push id."""
        copy = self.copy
        settings = self.house.config.shared
        assert copy is not None
        chunks = codec.encode_push(
            FRAGMENT, copy, copy - filled(value), codec=settings.push_codec,
            rho=settings.push_rho, chunk_elements=settings.chunk_elements,
        )  # fmt: skip
        self.payloads = [chunk.payload for chunk in chunks]
        self.announce(self.push_id + 1, tokens, loss)
        for index in range(len(self.payloads)):
            self.send_chunk(index)
        return self.push_id

    def announce(self, push_id: int, tokens: int = 100, loss: float | None = None) -> None:
        self.push_id = push_id
        self.say(msg.Push(0, push_id, self.version, tokens, 1, loss))

    def send_chunk(self, index: int, **fields: object) -> None:
        name = self.house.config.codec.push
        self.send(msg.DataKind.PUSH, index, name, self.payloads[index], **fields)

    def send(
        self, kind: msg.DataKind, chunk: int, name: msg.CodecName, payload: bytes, **fields: object
    ) -> None:
        """Sends a chunk with an honest header but for these fields of it."""
        push_id, version = (0, 0) if kind is not msg.DataKind.PUSH else (self.push_id, self.version)
        place = self.incarnation, 0, version, push_id, chunk, name, wire.digest(payload), 0
        header = replace(msg.Header(self.epoch, kind, *place), **fields)
        frames = [wire.uplink_topic(0).encode(), wire.encode_header(header), payload]
        self.house.host.data(None, frames, self.house.now)

    # What it hears.

    def heard(self, kind: type[T]) -> list[T]:
        """Control messages of a type that went to its connection in this life of the broker."""
        return [m for peer, m in self.house.wires.controls if peer == self.peer and type(m) is kind]

    def fetch(self, kind: msg.DataKind, version: int, *chunks: int) -> None:
        self.say(msg.Fetch(kind, 0, version, 0, tuple((chunk, 1) for chunk in chunks)))

    def listen(self) -> None:
        """Takes in the data that has come since, and adopts what is complete."""
        datas = self.house.wires.datas[self._seen :]
        self._seen = len(self.house.wires.datas)
        for topic, header, payload, _ in datas:
            if topic.startswith(("p/", f"r/{self.incarnation}/")):
                assert wire.digest(payload) == header.payload_digest
                parts = self._parts.setdefault((header.kind, header.version), {})
                parts[header.chunk] = header, payload
                self._adopt(header.kind, header.version, parts)

    def _adopt(
        self, kind: msg.DataKind, version: int, parts: dict[int, tuple[msg.Header, bytes]]
    ) -> None:
        shared = self.house.config.shared
        is_state = kind is msg.DataKind.STATE
        elements = shared.state_chunk_elements if is_state else shared.chunk_elements
        is_next = is_state or self.version == version - 1
        if len(parts) < FRAGMENT.chunk_count(elements) or not is_next:
            return
        chunks = [
            codec.decode_chunk(FRAGMENT, header.codec, elements, index, payload)
            for index, (header, payload) in sorted(parts.items())
        ]
        if is_state:
            copy = codec.values_of(FRAGMENT, chunks)
        else:
            assert self.copy is not None
            copy = codec.advance_copy(FRAGMENT, self.copy, chunks)
            self.outcomes.append(parts[0][0].contributors)
        assert codec.digest_of(copy) == parts[0][0].result_digest, "another published copy"
        self.copy = copy
        self.version = version


def filled(value: float) -> F32:
    """Parameters that are all `value`."""
    return np.full(FRAGMENT.elements, value, np.float32)


def begun(house: House, *names: str) -> list[HandLearner]:
    """Learners that have joined and hold version 0."""
    learners = [HandLearner(house, name) for name in names]
    for each in learners:
        each.hello()
    learners[0].seed()
    house.settle()
    for each in learners:
        each.fetch(msg.DataKind.STATE, 0, 0, 1)
    house.settle()
    for each in learners:
        each.listen()
        assert each.version == 0
    return learners
