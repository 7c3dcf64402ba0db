"""A flood of each kind from the holder of a valid key: counted, told once, and without effect."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import zmq
from peer import Peer
from running import broker_config, live_broker, wait_until

from narrows.broker.process.service import Service
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg
from narrows.proto.frames import decode_control, encode_control
from narrows.proto.key_holder import KeyHolder
from narrows.proto.keys import KeyPair, Keyring, new_broker_key, new_pair
from narrows.proto.keys.ring import write_ring
from narrows.proto.quotas import (
    CHUNKS,
    CHUNKS_PER_VERSION,
    CONTROL,
    CONTROL_PER_FRAGMENT,
    JOINS,
    REFUSED,
    STATUS,
    Ask,
)

NAMES = ("good", "status", "control", "refused", "joins", "chunks", "garbage")


class KeyedPeer(Peer):
    """A peer with the key of its name."""

    def __init__(self, service: Service, name: str, pair: KeyPair, server: str) -> None:
        self.service, self.pair, self.server = service, pair, server
        super().__init__(service.wires.address, name)

    def status(self) -> msg.Status:
        """Read from the broker itself: who waits for something must not use up the quota."""
        return status_of(self.service.syncer, self.service.traffic, time.monotonic())

    def make(self, kind: int) -> zmq.Socket[bytes]:
        socket = super().make(kind)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())
        # No message of a flood is lost on its own side.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket


class Floods:
    """A live broker with keys, and an honest learner."""

    def __init__(self, folder: Path) -> None:
        self.pairs = {name: new_pair() for name in NAMES}
        directory = folder / "keys"
        self.server = new_broker_key(directory).current.public
        ring = Keyring()
        for name, pair in self.pairs.items():
            ring = ring.allow(KeyHolder(name), pair.public, now=time.time())
        write_ring(directory, ring)
        self.config = broker_config(
            folder,
            security__keys=str(directory),
            run__founder="good",
            wan__streams=1,
            liveness__late="5min",
            liveness__lost="10min",
        )
        self.service: Service

    def peer(self, name: str) -> Peer:
        return KeyedPeer(self.service, name, self.pairs[name], self.server)

    @property
    def dropped(self) -> int:
        return self.service.turnstile.quotas.dropped

    @property
    def versions(self) -> int:
        return self.service.syncer.state.version_sum

    def taken_bytes(self, name: str) -> int:
        """Bytes that were not dropped."""
        return self.service.traffic[name].up_bytes if name in self.service.traffic else 0


@pytest.fixture(scope="module")
def floods(tmp_path_factory: pytest.TempPathFactory) -> Generator[Floods]:
    made = Floods(tmp_path_factory.mktemp("floods"))
    with live_broker(made.config) as made.service, made.peer("good") as good:
        good.join()
        good.found()
        before = good.heads()
        yield made
        assert good.heads() == before


def replies(peer: Peer) -> list[msg.ControlMessage]:
    """All that has come so far."""
    found: list[msg.ControlMessage] = []
    while peer.control.poll(0):
        found.append(decode_control(peer.control.recv()))
    return found


def told(answers: list[msg.ControlMessage], kind: Ask) -> int:
    """Refusals of this quota."""
    return sum(
        isinstance(each, msg.Refuse) and each.code == "quota" and f"quota of {kind}" in each.message
        for each in answers
    )


def test_a_flood_of_status_questions(floods: Floods) -> None:
    count, before, began = 500, floods.dropped, time.monotonic()
    answers: list[msg.ControlMessage] = []
    with floods.peer("status") as mallory:
        for _ in range(count):
            mallory.send(msg.AskStatus())

        def answered() -> int:
            answers.extend(replies(mallory))
            return sum(isinstance(each, msg.Status) for each in answers)

        wait_until(lambda: answered() + floods.dropped - before == count, "the end of the flood")
        assert answered() <= STATUS.burst + STATUS.per_s * (time.monotonic() - began)
        assert told(answers, Ask.STATUS) == told(answers, Ask.REFUSED) == 1
        # Once there is room, the same key is served again.
        had = answered()

        def served() -> bool:
            mallory.send(msg.AskStatus())
            return answered() > had

        wait_until(served, "an answer after the flood")


def test_a_flood_of_control_messages(floods: Floods) -> None:
    message = msg.Alive(0)
    size_bytes, count = len(encode_control(message)), 4000
    with floods.peer("control") as mallory:
        mallory.join()
        wait_until(lambda: floods.taken_bytes("control") > 0, "the session")
        before, taken = floods.dropped, floods.taken_bytes("control")
        began, versions = time.monotonic(), floods.versions
        for _ in range(count):
            mallory.send(message)

        def accepted() -> int:
            return (floods.taken_bytes("control") - taken) // size_bytes

        wait_until(lambda: accepted() + floods.dropped - before == count, "the end of the flood")
        most = CONTROL.burst + 2 * CONTROL_PER_FRAGMENT
        most += CONTROL.per_s * (time.monotonic() - began)
        most += CONTROL.per_version * (floods.versions - versions)
        assert accepted() <= most
        assert told(replies(mallory), Ask.CONTROL) <= 1


def test_a_flood_of_refused_pushes(floods: Floods) -> None:
    count, fates = 500, floods.service.notes.fates
    with floods.peer("refused") as mallory:
        mallory.join()
        began, versions, before = time.monotonic(), floods.versions, floods.dropped
        for push_id in range(1, count + 1):
            mallory.send(msg.Push(0, floods.versions + 99, 1, push_id, 216, 9, 3))

        def refused() -> int:
            return floods.service.syncer.state.tally.refused.get("future_base", 0)

        wait_until(lambda: refused() + floods.dropped - before == count, "the end of the flood")
        most = REFUSED.burst + REFUSED.per_s * (time.monotonic() - began)
        assert refused() <= most + REFUSED.per_version * (floods.versions - versions)
        assert fates.suppressed > 0, "the journal has few lines of one kind"
        assert told(replies(mallory), Ask.REFUSED) == 1


def test_a_flood_of_frames_that_do_not_decode(floods: Floods) -> None:
    count = 500
    with floods.peer("garbage") as mallory:
        began, versions, before = time.monotonic(), floods.versions, floods.dropped
        refused = floods.service.reception.bad_frames
        for _ in range(count):
            mallory.control.send(b"no message")

        def decoded() -> int:
            return floods.service.reception.bad_frames - refused

        wait_until(lambda: decoded() + floods.dropped - before == count, "the end of the flood")
        most = REFUSED.burst + REFUSED.per_s * (time.monotonic() - began)
        assert decoded() <= most + REFUSED.per_version * (floods.versions - versions)


def test_a_flood_of_joins(floods: Floods) -> None:
    count, before, began = 100, floods.dropped, time.monotonic()
    answers: list[msg.ControlMessage] = []
    with floods.peer("joins") as mallory:
        for _ in range(count):
            mallory.incarnation = secrets.token_hex(16)
            mallory.send(mallory.hello())
            mallory.send(msg.Bye("again"))

        def joined() -> int:
            answers.extend(replies(mallory))
            return sum(isinstance(each, msg.Welcome) for each in answers)

        # The Bye of a Hello that was dropped has no session, until all of it is dropped.
        wait_until(lambda: joined() + floods.dropped - before >= count, "the end of the flood")
        assert joined() <= JOINS.burst + JOINS.per_s * (time.monotonic() - began)
        assert told(answers, Ask.JOINS) == 1


def test_a_flood_of_chunks(floods: Floods) -> None:
    with floods.peer("chunks") as mallory:
        mallory.join()
        wait_until(lambda: floods.taken_bytes("chunks") > 0, "the session")
        frames = mallory.frames(b"0123456789", push_id=7, count=8, version=floods.versions + 9)
        size_bytes, count = sum(map(len, frames)), 4000
        before, taken = floods.dropped, floods.taken_bytes("chunks")
        began, versions = time.monotonic(), floods.versions
        for _ in range(count):
            mallory.send_data(frames)

        def accepted() -> int:
            return (floods.taken_bytes("chunks") - taken) // size_bytes

        wait_until(lambda: accepted() + floods.dropped - before == count, "the end of the flood")
        chunks = 20  # Of each of the two fragments: each is one regular chunk.
        elapsed_s = time.monotonic() - began
        growths = elapsed_s + floods.versions - versions
        most = CHUNKS.burst + CHUNKS.per_s * elapsed_s
        assert accepted() <= most + CHUNKS_PER_VERSION * chunks * (2 + growths)
