"""A broker's host over ports of this test, and learners that are played by hand."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from narrows.broker.config import BrokerConfig, load_broker
from narrows.broker.process.downlink import Connection
from narrows.broker.process.host import Host
from narrows.broker.store import Store
from narrows.broker.syncer import events as ev
from narrows.proto import codec, wire
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.layout import Fragment, build_table, fingerprint
from narrows.proto.ports import Done

LAYOUT = msg.Layout(
    0,
    (
        msg.LayoutEntry("w", (520, 512), "float32", "rda"),
        msg.LayoutEntry("b", (700,), "float32", "mean"),
    ),
)
"""One fragment of two chunks when it is not cut."""

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

    def __post_init__(self) -> None:
        flags = {"fragments.count": 1, "broker.state_dir": str(self.folder), **self.settings}
        self.config: BrokerConfig = load_broker(None, flags)
        self.start()

    def start(self) -> None:
        """The next life; the last one may have been killed."""
        self.lives += 1
        self.wires, self.pool = Wires(), Pool()
        self.store = Store(self.folder, durable=False)
        self.host = Host(
            self.config, self.wires, self.pool, self.store, self.now, f"{self.lives:08x}",
            now_unix=lambda: self.now, on_note=self.notes.append,
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

    def wait(self, seconds: float, *learners: HandLearner) -> None:
        """Time passes in steps of 0.1 s; each second the learners report a step."""
        for tenth in range(round(10 * seconds)):
            self.now += 0.1
            if tenth % 10 == 0:
                for each in learners:
                    each.report()
            self.settle()

    def until(self, condition: Callable[[], object], what: str, *learners: HandLearner) -> None:
        for _ in range(60):
            if condition():
                return
            self.wait(1.0, *learners)
        raise AssertionError(f"in vain: {what}; {[note.text for note in self.notes[-5:]]}")

    def noted(self, event: str) -> list[ev.Note]:
        return [note for note in self.notes if note.event == event]


class HandLearner:
    """Says what a test has it say, and applies what it hears to its published copies."""

    site: str | None = None
    """The site of its key; None: no key."""

    def __init__(self, house: House, name: str) -> None:
        self.house, self.name = house, name
        self.incarnation, self.peer = f"{name}.00000001", name.encode().hex()
        self.table: tuple[Fragment, ...] = build_table(LAYOUT.entries, house.config.fragments.count)
        self.copies: list[F32 | None] = [None for _ in self.table]
        self.versions = [-1 for _ in self.table]
        self.steps = self.push_id = 0
        self.run_id = self.epoch = ""
        self.outcomes: list[tuple[msg.Contributor, ...]] = []
        """Contributors of each publication that it adopted."""
        self._wires, self._seen = house.wires, 0
        self._parts: dict[tuple[msg.DataKind, int, int], dict[int, tuple[msg.Header, bytes]]] = {}

    # What it says.

    def say(self, message: msg.ControlMessage) -> bool:
        frames = wire.encode_control(message)
        return self.house.host.control(self.peer, self.site, frames, self.house.now)

    def hello(self, *, listens: bool = True) -> None:
        held = tuple(
            msg.Held(version, 0 if copy is None else codec.digest_of(copy))
            for version, copy in zip(self.versions, self.copies, strict=True)
        )
        self.say(
            msg.Hello(
                msg.PROTOCOL, self.name, self.incarnation, self.run_id, self.epoch,
                fingerprint(LAYOUT), held if self.run_id else (),
            )
        )  # fmt: skip
        if listens:
            self.house.subscribe(self.incarnation)
        if welcomes := self.heard(msg.Welcome):
            self.run_id, self.epoch = welcomes[-1].run_id, welcomes[-1].beat.epoch

    def report(self) -> None:
        self.steps += 1
        self.say(msg.Report(self.steps, 100 * self.steps, 1.0, tuple(self.versions)))

    def seed(self, values: list[F32], *, damaged: bytes | None = None) -> None:
        """Sends layout and parameters; `damaged` is the last chunk's payload."""
        self.send(msg.DataKind.LAYOUT, 0, 0, 0, 0, msg.LOSSLESS, wire.pack_layout(LAYOUT))
        elements = self.house.config.shared.state_chunk_elements
        chunks = [
            (fragment.index, chunk.index, chunk.payload)
            for fragment, each in zip(self.table, values, strict=True)
            for chunk in codec.encode_values(fragment, each, chunk_elements=elements)
        ]
        if damaged is not None:
            chunks[-1] = *chunks[-1][:2], damaged
        for fragment, index, payload in chunks:
            self.send(msg.DataKind.SEED, fragment, 0, 0, index, msg.LOSSLESS, payload)

    def push(
        self, fragment: int, gradient: F32, *, tokens: int = 100, announce: bool = True
    ) -> int:
        """Announces and sends `published - local`; the push id."""
        self.push_id += 1
        copy, settings = self.copies[fragment], self.house.config.shared
        assert copy is not None
        chunks = codec.encode_push(
            self.table[fragment], copy, copy - gradient, codec=settings.push_codec,
            rho=settings.push_rho, chunk_elements=settings.chunk_elements,
        )  # fmt: skip
        self.payloads = {chunk.index: chunk.payload for chunk in chunks}
        if announce:
            self.say(msg.Push(fragment, self.push_id, self.versions[fragment], tokens, 1))
        for index in self.payloads:
            self.send_chunk(fragment, index)
        return self.push_id

    def send_chunk(self, fragment: int, index: int, payload: bytes | None = None) -> None:
        payload = self.payloads[index] if payload is None else payload
        base, name = self.versions[fragment], self.house.config.codec.push
        self.send(msg.DataKind.PUSH, fragment, base, self.push_id, index, name, payload)

    def send(
        self, kind: msg.DataKind, fragment: int, version: int, push_id: int, chunk: int,
        codec: msg.CodecName, payload: bytes, *, payload_digest: int | None = None,
    ) -> bool:  # fmt: skip
        digest = wire.digest(payload) if payload_digest is None else payload_digest
        header = msg.Header(
            self.epoch, kind, self.incarnation, fragment, version, push_id, chunk, codec, digest, 0
        )
        frames = [wire.uplink_topic(0).encode(), wire.encode_header(header), payload]
        return self.house.host.data(self.site, frames, self.house.now)

    # What it hears.

    def heard(self, kind: type[T]) -> list[T]:
        """Control messages of a type that went to its connection in this life of the broker."""
        return [m for peer, m in self.house.wires.controls if peer == self.peer and type(m) is kind]

    def fetch(self, kind: msg.DataKind, fragment: int, version: int, *chunks: int) -> None:
        ranges = tuple((chunk, 1) for chunk in chunks)
        self.say(msg.Fetch(kind, fragment, version, 0, ranges))

    def listen(self) -> None:
        """Takes in the data that has come since, and adopts what is complete."""
        if self._wires is not self.house.wires:
            self._wires, self._seen = self.house.wires, 0
        datas, self._seen = self._wires.datas[self._seen :], len(self._wires.datas)
        for topic, header, payload, _ in datas:
            if not topic.startswith(("p/", f"r/{self.incarnation}/")):
                continue
            key = header.kind, header.fragment, header.version
            self._parts.setdefault(key, {})[header.chunk] = header, payload
            assert wire.digest(payload) == header.payload_digest
            self._adopt(*key)

    def _adopt(self, kind: msg.DataKind, fragment: int, version: int) -> None:
        shared, parts = self.house.config.shared, self._parts[kind, fragment, version]
        is_state = kind is msg.DataKind.STATE
        elements = shared.state_chunk_elements if is_state else shared.chunk_elements
        each = self.table[fragment]
        if len(parts) < each.chunk_count(elements):
            return
        if not is_state and self.versions[fragment] != version - 1:
            return
        chunks = [
            codec.decode_chunk(each, parts[i][0].codec, elements, i, parts[i][1])
            for i in range(len(parts))
        ]
        before = self.copies[fragment]
        if is_state:
            copy = codec.values_of(each, chunks)
        else:
            assert before is not None
            copy = codec.advance_copy(each, before, chunks)
            self.outcomes.append(parts[0][0].contributors)
        assert codec.digest_of(copy) == parts[0][0].result_digest, "another published copy"
        self.copies[fragment], self.versions[fragment] = copy, version


def values(learner: HandLearner, value: float) -> list[F32]:
    """Parameters that are all `value`, per fragment."""
    return [np.full(each.elements, value, np.float32) for each in learner.table]


def begun(house: House, *names: str) -> list[HandLearner]:
    """Learners that have joined and hold version 0."""
    learners = [HandLearner(house, name) for name in names]
    for each in learners:
        each.hello()
    learners[0].seed(values(learners[0], 1.0))
    house.settle()
    for each in learners:
        for fragment, part in enumerate(each.table):
            count = part.chunk_count(house.config.shared.state_chunk_elements)
            each.fetch(msg.DataKind.STATE, fragment, 0, *range(count))
    house.settle()
    for each in learners:
        each.listen()
        assert each.versions == [0] * len(each.table), each.versions
    return learners
