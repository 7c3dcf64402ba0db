"""Bytes to messages and back: envelope, topics, sizes. A decoder raises RemoteProtocolError only.

A control message is two frames, `NRW` with the protocol's version and a MessagePack map; a data
message is three: topic, header, payload.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
import xxhash
import zstandard

from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, fault

ENVELOPE: Final = b"NRW" + bytes([msg.PROTOCOL])

LAYOUT_BYTES_MAX: Final = 32 << 20
"""Bytes of a layout's MessagePack: 30,000 tensors with the longest names are 17 MB."""

_encoder = msgspec.msgpack.Encoder()
_control: msgspec.msgpack.Decoder[msg.ControlMessage] = msgspec.msgpack.Decoder(msg.ControlMessage)
_header = msgspec.msgpack.Decoder(msg.Header)
_layout = msgspec.msgpack.Decoder(msg.Layout)

T = TypeVar("T")


def encode_control(message: msg.ControlMessage) -> list[bytes]:
    """The two frames of a control message."""
    return [ENVELOPE, _encoder.encode(message)]


def decode_control(frames: list[bytes], bytes_max: int) -> msg.ControlMessage:
    """The message in two frames. Raises RemoteProtocolError: PROTOCOL_VERSION, TOO_LARGE or
    BAD_MESSAGE, with what was expected and what came."""
    if len(frames) != 2 or frames[0][:3] != ENVELOPE[:3] or len(frames[0]) != 4:
        raise fault(
            "control message",
            expected="NRW, version, body",
            got=f"{len(frames)} frames, the first {bytes(b''.join(frames[:1])[:8])!r}",
        )
    if frames[0] != ENVELOPE:
        raise fault(
            "another version of the wire format",
            expected=str(msg.PROTOCOL),
            got=frames[0][3],
            code=ErrorCode.PROTOCOL_VERSION,
        )
    return _decode(_control, frames[1], bytes_max, "control message")


def encode_header(header: msg.Header) -> bytes:
    """The second frame of a data message."""
    return _encoder.encode(header)


def decode_header(frame: bytes) -> msg.Header:
    """The header of a data message. Raises RemoteProtocolError BAD_MESSAGE or TOO_LARGE."""
    return _decode(_header, frame, msg.HEADER_BYTES_MAX, "data header")


def pack_layout(layout: msg.Layout) -> bytes:
    """The payload of a LAYOUT message: zstd of the layout's MessagePack."""
    return zstandard.ZstdCompressor().compress(_encoder.encode(layout))


def unpack_layout(payload: bytes) -> msg.Layout:
    """The layout in a LAYOUT payload. Raises RemoteProtocolError BAD_MESSAGE or TOO_LARGE."""
    try:
        # -1: the frame does not tell its size.
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= LAYOUT_BYTES_MAX:
            raise fault(
                "layout",
                expected=f"a zstd frame that tells its size, at most {LAYOUT_BYTES_MAX} bytes",
                got=size,
                code=ErrorCode.TOO_LARGE,
            )
        body = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise fault("layout", expected="a zstd frame", got=error) from None
    return _decode(_layout, body, LAYOUT_BYTES_MAX, "layout")


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, bytes_max: int, what: str) -> T:
    if len(body) > bytes_max:
        raise fault(
            what, expected=f"at most {bytes_max} bytes", got=len(body), code=ErrorCode.TOO_LARGE
        )
    try:
        return decoder.decode(body)
    # UnicodeDecodeError: a text that is not UTF-8. RecursionError: arrays within an untyped map.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise fault(what, expected="as in PROTOCOL.md", got=error) from None


def plain(value: object) -> Any:
    """A message as maps with the names of all fields, for JSON."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def digest(data: bytes | memoryview) -> int:
    """xxh3_64 of bytes, unsigned: the digest of payloads."""
    return xxhash.xxh3_64_intdigest(data)


def check_payload(header: msg.Header, payload: bytes) -> None:
    """Raises RemoteProtocolError BAD_DIGEST for a payload that was damaged on its way: it counts as
    lost, and is asked for again."""
    got = digest(payload)
    if got != header.payload_digest:
        raise fault(
            f"payload of chunk {header.chunk} of fragment {header.fragment}",
            expected=f"{header.payload_digest:016x}",
            got=f"{got:016x}",
            code=ErrorCode.BAD_DIGEST,
        )


def name_of(incarnation: str) -> str:
    """The learner's name within an incarnation."""
    return incarnation[:-9]


def speaks_for(site: str, name: str) -> bool:
    """Whether the key of `site` may speak for a learner: site-a for site-a and site-a/0."""
    return name == site or name.startswith(site + "/")


def live_topic(stream: int) -> str:
    """Topic of publications, to all; two digits, because subscriptions match by prefix."""
    return f"p/{stream:02d}"


def asked_topic(incarnation: str, stream: int) -> str:
    """Topic of what one learner has asked for."""
    return f"r/{incarnation}/{stream:02d}"


def uplink_topic(stream: int) -> str:
    """Topic of everything that goes up."""
    return f"u/{stream:02d}"
