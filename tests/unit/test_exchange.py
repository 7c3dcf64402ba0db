"""The learner's data path: the effects of the chunks that arrive."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from machines import EPOCH, LAYOUT, RUN, SETTINGS, incarnation_of
from peer import encoded
from running import HANG_S, ToyHost, vector

from narrows.learner.session import events as ev
from narrows.learner.transport.datapath import DataPath
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto.codec.transfer import STATE_CODEC, digest_of
from narrows.proto.fragments import build_table
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Header

TABLE = build_table(LAYOUT, SETTINGS.fragment_count)


class NoWires:
    """In the place of the sockets: nothing is sent here."""

    def open_streams(self, *_: int) -> None:
        pass


class Receiver:
    """A data path to which the test brings the messages."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[Callable[[], ev.Event | None]] = queue.SimpleQueue()
        self.data_path = DataPath(
            cast(LearnerSockets, NoWires()),
            ClientOptions(
                broker="tcp://127.0.0.1:9",
                name="a",
                layout=LAYOUT,
                frozen_digest=0,
                host=ToyHost(vector(1)),
                incarnation=incarnation_of("a"),
            ),
            post=self.posted.put,
        )
        self.data_path.open_streams(ev.OpenStreams(SETTINGS, TABLE, 1, 2))

    def apply(self, kind: DataKind, version: int, fill: float, told: int) -> ev.Event | None:
        """A whole fragment 0 of equal values comes with the digest `told`, and is applied."""
        values = np.full(TABLE[0].elements, fill, np.float32)
        codec = STATE_CODEC if kind is DataKind.STATE else SETTINGS.publish_codec
        handles: list[int] = []
        for chunk in encoded(TABLE[0], values, codec, 300):
            header = Header(
                protocol=PROTOCOL,
                run_id=RUN,
                epoch=EPOCH,
                kind=kind,
                learner="a",
                incarnation=incarnation_of("a"),
                fragment=0,
                version=version,
                push_id=0,
                offset=chunk.offset,
                count=chunk.count,
                codec=codec,
                payload_digest=chunk.payload_digest,
                result_digest=told,
                stream=0,
                position=1,
            )
            frames = [b"a", encode_header(header), chunk.payload]
            handles.append(self.data_path.receive(frames).handle)
        self.data_path.apply(ev.Apply(0, version, kind, tuple(handles), told))
        return self.posted.get(timeout=HANG_S)()


@pytest.mark.parametrize("kind", [DataKind.STATE, DataKind.PUBLICATION])
def test_a_copy_that_is_not_the_brokers_is_told_and_not_installed(kind: DataKind) -> None:
    """Every copy of a version has the same bits: a digest that differs never becomes a base."""
    receiver = Receiver()
    data_path = receiver.data_path
    try:
        base = np.full(TABLE[0].elements, 1.0, np.float32)
        right = digest_of(base)
        assert receiver.apply(DataKind.STATE, 1, 1.0, right) == ev.Applied(0, 1, right)
        data_path.install(0, 1)
        fill = 0.0 if kind is DataKind.PUBLICATION else 1.0  # Either way the copy is `base` again.
        assert receiver.apply(kind, 2, fill, right + 1) == ev.ApplyFailed(0, 2, right + 1)
        assert receiver.apply(kind, 2, fill, right) == ev.Applied(0, 2, right)
        data_path.install(0, 2)
        assert np.array_equal(data_path.published[0], base)
    finally:
        data_path.close()


def test_an_apply_whose_chunks_were_dropped_does_nothing() -> None:
    """A Drop of the background's own may overtake an Apply of the training thread's event."""
    receiver = Receiver()
    try:
        receiver.data_path.apply(ev.Apply(0, 1, DataKind.STATE, (12345,), 1))
        assert receiver.posted.empty()
    finally:
        receiver.data_path.close()
