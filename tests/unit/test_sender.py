"""Everything on its way to one peer: what leaves, when, and what never leaves again."""

from __future__ import annotations

import pytest
from flow_cases import EPOCH, PAYLOAD_BYTES, header_of, incarnation_of, parcel, sender_to

from narrows.proto.flow.budget import wire_bytes
from narrows.proto.flow.sender import Datagram, Sender
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Header
from narrows.proto.timing import STREAM_LOOK_S


def offsets(datagrams: list[Datagram]) -> list[int]:
    return [datagram.parcel.chunk.offset for datagram in datagrams]


def leave(sender: Sender, now: float = 0.0) -> list[int]:
    return offsets(list(sender.due(now)))


def test_a_header_says_whose_chunk_it_is_and_where_its_stream_stands() -> None:
    sender = sender_to("a", 3, streams=2)
    for offset in (0, 10, 20):
        sender.put(parcel(offset, kind=DataKind.PUSH, version=4, push_id=9))
    *_, last = sender.due(0.0)
    assert last.stream == 0 and last.frames[0] == f"a/{incarnation_of(3)}/00".encode()
    assert header_of(last) == Header(
        protocol=PROTOCOL,
        run_id="run",
        epoch=EPOCH,
        kind=DataKind.PUSH,
        learner="a",
        incarnation=incarnation_of(3),
        fragment=0,
        version=4,
        push_id=9,
        offset=20,
        count=10,
        codec="int4-zstd",
        payload_digest=last.parcel.chunk.payload_digest,
        result_digest=0,
        stream=0,
        position=2 * PAYLOAD_BYTES,
    )
    assert last.frame_bytes == sum(map(len, last.frames))
    assert last.wire_bytes == wire_bytes(*map(len, last.frames))


def test_nothing_leaves_before_the_peer_listens() -> None:
    sender = sender_to()
    sender.is_heard = False
    sender.put(parcel())
    assert leave(sender) == [] and sender.next_deadline(0.0) is None
    sender.is_heard = True
    assert sender.next_deadline(0.0) == 0.0 and leave(sender) == [0]


def test_fragments_go_before_states() -> None:
    sender = sender_to()
    for offset, kind in enumerate((DataKind.FOUND, DataKind.STATE, DataKind.PUSH)):
        sender.put(parcel(offset, kind=kind))
    assert leave(sender) == [2, 0, 1]


def test_the_rate_says_when_the_next_one_leaves() -> None:
    sender = sender_to()
    sender.set_rate(1e6, 0.0)
    for offset in range(0, 1000, 10):
        sender.put(parcel(offset))
    left, now = len(leave(sender)), 0.0
    while (opens_at := sender.opens_at(now)) is not None:
        assert opens_at > now
        now = opens_at
        left += len(leave(sender, now))
    assert left == 100
    assert 0.8 < now < 1.0


def test_what_does_not_wait_is_paid_by_what_does() -> None:
    sender = sender_to()
    sender.set_rate(1e6, 0.0)
    sender.charge(125_000, 0.0)
    sender.put(parcel())
    assert leave(sender, 0.5) == []
    sender.received(4096, 0.5)
    assert leave(sender, 1.1) == [0]


def test_without_credit_nothing_is_due_until_something_is_acknowledged() -> None:
    sender = sender_to(window_bytes=PAYLOAD_BYTES)
    sender.put(parcel(0))
    sender.put(parcel(10))
    assert leave(sender) == [0]
    assert sender.opens_at(0.1) is None
    assert sender.next_deadline(0.1) == STREAM_LOOK_S
    sender.acknowledge((PAYLOAD_BYTES,), 0.2)
    assert sender.opens_at(0.2) == 0.2 and leave(sender, 0.2) == [10]
    assert sender.told_bytes == PAYLOAD_BYTES and not sender.is_idle
    sender.acknowledge((2 * PAYLOAD_BYTES,), 0.3)
    assert sender.is_idle and sender.next_deadline(0.3) is None


def test_repair_sends_what_is_asked_for_unless_it_is_on_its_way() -> None:
    sender = sender_to()
    all_of_it = [parcel(offset) for offset in (0, 10, 20, 30)]
    sender.put_again(all_of_it[:1], (), 0.0)
    assert leave(sender) == [0]
    sender.put_again(all_of_it, ((5, 20),), 0.01)
    sender.put_again(all_of_it, ((5, 20),), 0.01)
    assert leave(sender, 0.02) == [10, 20]
    sender.put_again(all_of_it, (), 0.03)
    assert leave(sender, 0.03) == [30]
    sender.put_again(all_of_it, ((0, 1),), 100.0)
    assert 0 in offsets(list(sender.due(100.0)))


@pytest.mark.parametrize("more", [{"version": 2}, {"kind": DataKind.STATE}])
def test_another_transfer_is_not_on_its_way(more: dict[str, int]) -> None:
    sender = sender_to()
    sender.put(parcel())
    leave(sender)
    sender.put_again([parcel(**more)], (), 0.01)  # type: ignore[arg-type]
    assert leave(sender, 0.01) == [0]


def test_a_publication_is_the_same_whatever_was_merged_of_the_addressee() -> None:
    sender = sender_to()
    sender.put(parcel(push_id=1))
    sender.put_again([parcel(push_id=2)], (), 0.0)
    assert leave(sender) == [0]


def test_what_was_queued_in_another_epoch_does_not_leave() -> None:
    sender = sender_to()
    sender.put(parcel(0))
    sender.identify("run", (0, 2, 7))
    sender.put(parcel(10))
    (datagram,) = sender.due(0.0)
    assert header_of(datagram).epoch == (0, 2, 7) and header_of(datagram).offset == 10
    sender.put(parcel(20))
    sender.identify("run", (0, 2, 7))
    assert leave(sender, 0.0) == [20]


def test_another_number_of_streams_begins_anew() -> None:
    sender = sender_to(streams=2)
    sender.put(parcel())
    leave(sender)
    sender.open_streams(2)
    before = sender.positions
    sender.open_streams(3)
    assert (before, sender.positions) == ((PAYLOAD_BYTES, 0), (0, 0, 0))


def test_a_dead_stream_is_renewed_and_charged_again() -> None:
    sender = sender_to()
    sender.set_rate(1e6, 0.0)
    sender.put(parcel(0))
    assert leave(sender) == [0]
    assert sender.renew_stalled(6.0) == PAYLOAD_BYTES
    assert sender.dead == (0,)
    opens_at = sender.opens_at(6.0)
    paid_s = 8 * PAYLOAD_BYTES / 1e6
    assert opens_at is not None and opens_at == pytest.approx(6.0, abs=0.1 + paid_s)
    assert leave(sender, 6.1) == [0]
    assert sender.reconnect(0, 6.2) == PAYLOAD_BYTES
    assert leave(sender, 6.3) == [0]


def test_a_settled_push_never_leaves_again() -> None:
    sender = sender_to()
    for push_id in (1, 2):
        sender.put(parcel(push_id, kind=DataKind.PUSH, push_id=push_id))
    assert len(leave(sender)) == 2
    sender.discard(lambda each: each.push_id == 1)
    again = offsets(list(sender.due(6.0)))
    assert again == [2]
