"""Senders by hand: parcels of chosen sizes, and what becomes of them."""

from __future__ import annotations

from narrows.proto.codec.transfer import EncodedChunk
from narrows.proto.flow.sender import Datagram, Parcel, Sender
from narrows.proto.frames import decode_data, downlink_topic, encode_header
from narrows.proto.frames import digest as frame_digest
from narrows.proto.messages import DataKind, Header

EPOCH = (0, 1, 7)
PAYLOAD_BYTES = 1000


def incarnation_of(number: int) -> str:
    return f"{number:032x}"


def parcel(
    offset: int = 0,
    *,
    kind: DataKind = DataKind.PUBLICATION,
    version: int = 1,
    push_id: int = 0,
    size_bytes: int = PAYLOAD_BYTES,
    count: int = 10,
) -> Parcel:
    payload = bytes(size_bytes)
    chunk = EncodedChunk(offset, count, payload, frame_digest(payload))
    return Parcel(kind, 0, version, push_id, "int4-zstd", chunk)


def sender_to(
    learner: str = "a", process: int = 0, *, streams: int = 1, window_bytes: int = 32 << 20
) -> Sender:
    """A sender to a learner that listens."""
    incarnation = incarnation_of(process)
    sender = Sender(
        learner,
        incarnation,
        topic=lambda stream: downlink_topic(learner, incarnation, stream),
        streams=streams,
        window_bytes=window_bytes,
    )
    sender.identify("run", EPOCH)
    sender.is_heard = True
    return sender


def header_of(datagram: Datagram) -> Header:
    """The header of a datagram, as a receiver decodes it."""
    return decode_data(datagram.frames)[0]


def header_bytes(header: Header) -> int:
    return len(encode_header(header))
