"""Messages to ZeroMQ frames and back: magic, protocol version, checksum, size limits.

Every msgpack body travels in an envelope of twelve bytes: `NRW`, one byte protocol version, and
the xxh3_64 of the body (little-endian). A peer of another version is recognised before its body
is read. TCP's checksum of 16 bits misses some errors of memory and network cards, and a model must
not change by one. Frames know nothing of membership, rounds or fragments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import xxhash

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import (
    CHUNK_ELEMENTS_MAX,
    CONTROL_BYTES_MAX,
    CONTROL_UP_BYTES_MAX,
    HEADER_BYTES_MAX,
    NAME_PATTERN,
    PAYLOAD_BYTES_MAX,
    PROTOCOL,
    STREAMS_MAX,
    TOPIC_BYTES_MAX,
)
from narrows.proto.messages import Beat, ControlMessage, Header, Status, Welcome
from narrows.proto.units import counted

MAGIC = b"NRW"
ENVELOPE_BYTES = 12

_LARGE = Welcome, Beat, Status
"""Messages that only learners take, and that grow with the run."""

_encoder = msgspec.msgpack.Encoder()
_control_decoder = msgspec.msgpack.Decoder(ControlMessage)
_header_decoder = msgspec.msgpack.Decoder(Header)


def digest(data: bytes | memoryview) -> int:
    """xxh3_64 of `data`: the checksum of everything on the wire.

    It guards against mistakes, not against an attacker, who could compute it as well.
    """
    return xxhash.xxh3_64_intdigest(data)


def encode_control(message: ControlMessage) -> bytes:
    """One control frame. Raises RemoteProtocolError if it is too large for its way."""
    frame = _seal(_encoder.encode(message))
    is_down = isinstance(message, _LARGE)
    bytes_max = CONTROL_BYTES_MAX if is_down else CONTROL_UP_BYTES_MAX
    _check_size(len(frame), bytes_max, "control message")
    return frame


def decode_control(frame: bytes | memoryview, bytes_max: int = CONTROL_BYTES_MAX) -> ControlMessage:
    """The message in a control frame. Raises RemoteProtocolError on anything else."""
    body = _unseal(frame, bytes_max, "control message")
    try:
        message: ControlMessage = _control_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE, "control message does not decode", got=str(error)[:200]
        ) from error
    return message


UPLINK_TOPIC = b"u"
"""The topic of all that a learner publishes: the broker subscribes to everything."""


def downlink_topic(name: str, incarnation: str, stream: int) -> bytes:
    """The topic of one stream of one learner's process.

    The name comes first, so that the broker sees whose topic a subscription names.
    The stream has two digits because ZeroMQ matches prefixes: a subscription to stream 1 must not
    take the messages of stream 10.
    """
    assert 0 <= stream < STREAMS_MAX <= 100, f"stream {stream} has no topic of two digits"
    topic = f"{name}/{incarnation}/{stream:02d}".encode()
    assert len(topic) <= TOPIC_BYTES_MAX, topic
    return topic


_NAME = NAME_PATTERN.removeprefix(r"\A").removesuffix(r"\Z")
_TOPIC = re.compile(f"({_NAME})/[0-9a-f]{{32}}/([0-9]{{2}})")


def topic_name(topic: bytes) -> str | None:
    """The learner's name in a topic of the downlink, None if this is no such topic."""
    if len(topic) > TOPIC_BYTES_MAX or not topic.isascii():
        return None
    match = _TOPIC.fullmatch(topic.decode())
    return match[1] if match and int(match[2]) < STREAMS_MAX else None


def encode_header(header: Header) -> bytes:
    """Header frame of a data message."""
    frame = _seal(_encoder.encode(header))
    _check_size(len(frame), HEADER_BYTES_MAX, "header")
    return frame


def decode_data(frames: Sequence[bytes | memoryview]) -> tuple[Header, memoryview]:
    """Header and payload of a data message `[topic, header, payload]`, checksums verified.

    Raises RemoteProtocolError. Sizes are checked before digests, so that a message that is too
    large costs nothing.
    """
    if len(frames) != 3:
        raise RemoteProtocolError(
            ErrorCode.BAD_FRAME,
            "data message",
            expected="3 frames",
            got=counted(len(frames), "frame"),
        )
    body = _unseal(frames[1], HEADER_BYTES_MAX, "header")
    try:
        header = _header_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE, "header does not decode", got=str(error)[:200]
        ) from error
    _check_protocol(header.protocol, "header")
    payload = memoryview(frames[2])
    _check_size(payload.nbytes, PAYLOAD_BYTES_MAX, "payload")
    if header.count == 0 or header.count > CHUNK_ELEMENTS_MAX:
        raise RemoteProtocolError(
            ErrorCode.BAD_RANGE,
            f"chunk of {header.learner!r}",
            expected=f"1 to {CHUNK_ELEMENTS_MAX} elements",
            got=str(header.count),
        )
    if digest(payload) != header.payload_digest:
        raise RemoteProtocolError(
            ErrorCode.BAD_CHECKSUM,
            f"payload of {header.learner!r}, fragment {header.fragment}, offset {header.offset}",
            expected=f"{header.payload_digest:016x}",
            got=f"{digest(payload):016x}",
            remedy="the chunk is asked for again; if this repeats, check memory and network",
        )
    return header, payload


def _seal(body: bytes) -> bytes:
    """The envelope and the body; `_unseal` is the inverse."""
    assert len(MAGIC) + 1 + 8 == ENVELOPE_BYTES
    return MAGIC + bytes([PROTOCOL]) + digest(body).to_bytes(8, "little") + body


def _unseal(frame: bytes | memoryview, bytes_max: int, what: str) -> memoryview:
    """The body of an envelope whose size, magic, version and digest are as they should be."""
    view = memoryview(frame)
    _check_size(view.nbytes, bytes_max, what)
    if view.nbytes < ENVELOPE_BYTES or bytes(view[:3]) != MAGIC:
        raise RemoteProtocolError(
            ErrorCode.BAD_FRAME,
            f"{what} is not of this protocol",
            expected=f"{MAGIC!r} and at least {ENVELOPE_BYTES} bytes",
            got=f"{bytes(view[:8])!r}, {view.nbytes} bytes",
        )
    _check_protocol(view[3], what)
    body = view[ENVELOPE_BYTES:]
    expected = int.from_bytes(view[4:ENVELOPE_BYTES], "little")
    if digest(body) != expected:
        raise RemoteProtocolError(
            ErrorCode.BAD_CHECKSUM, what, expected=f"{expected:016x}", got=f"{digest(body):016x}"
        )
    return body


def _check_protocol(protocol: int, what: str) -> None:
    if protocol != PROTOCOL:
        raise RemoteProtocolError(
            ErrorCode.PROTOCOL_VERSION,
            f"{what} of another protocol version",
            expected=str(PROTOCOL),
            got=str(protocol),
            remedy="install the same narrows version on the broker and on every learner",
        )


def _check_size(size_bytes: int, bytes_max: int, what: str) -> None:
    assert 0 <= size_bytes and 0 < bytes_max, (size_bytes, bytes_max)
    if size_bytes > bytes_max:
        raise RemoteProtocolError(
            ErrorCode.TOO_LARGE, what, expected=f"at most {bytes_max} bytes", got=str(size_bytes)
        )
