"""Frames: every message survives the wire, and no bytes make a decoder fail in another way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from any_messages import CONTROL, WORDS, any_of, controls, mutated, seal
from hypothesis import example, given
from hypothesis import strategies as st

from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.frames import (
    ENVELOPE_BYTES,
    MAGIC,
    decode_control,
    decode_data,
    digest,
    encode_control,
    encode_header,
)
from narrows.proto.limits import CHUNK_ELEMENTS_MAX, PROTOCOL

PAYLOAD = b"payload"


headers: st.SearchStrategy[msg.Header] = any_of(msg.Header).map(
    lambda header: msgspec.structs.replace(
        header,
        protocol=PROTOCOL,
        count=header.count % CHUNK_ELEMENTS_MAX + 1,
        payload_digest=digest(PAYLOAD),
    )
)


@pytest.mark.parametrize("struct", CONTROL, ids=lambda each: each.__name__)
def test_control_messages_survive(struct: type[Any]) -> None:
    @given(any_of(struct))
    def survives(message: msg.ControlMessage) -> None:
        assert decode_control(encode_control(message)) == message

    survives()


@given(headers)
def test_headers_survive(header: msg.Header) -> None:
    frames = [b"topic", encode_header(header), PAYLOAD]
    assert decode_data(frames) == (header, memoryview(PAYLOAD))
    assert decode_data([memoryview(frame) for frame in frames])[0] == header


# Hostile bytes. A frame that decodes must be one that we could have sent.


def check_control(frame: bytes) -> None:
    try:
        message = decode_control(frame)
    except RemoteProtocolError as error:
        assert error.code in ErrorCode
        return
    # Compared as bytes: NaN is a legal loss and does not equal itself.
    again = encode_control(message)
    assert encode_control(decode_control(again)) == again


def check_data(frames: list[bytes]) -> None:
    try:
        header, payload = decode_data(frames)
    except RemoteProtocolError as error:
        assert error.code in ErrorCode
        return
    assert payload == frames[2]
    assert decode_data([b"", encode_header(header), frames[2]])[0] == header


control_bodies = controls.map(lambda message: encode_control(message)[ENVELOPE_BYTES:])
header_bodies = headers.map(lambda header: encode_header(header)[ENVELOPE_BYTES:])
msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=WORDS)
    | st.binary(max_size=WORDS)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=WORDS)),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.binary(max_size=200) | mutated(controls.map(encode_control)))
@example(b"")
@example(MAGIC)
def test_any_bytes_as_a_control_frame(frame: bytes) -> None:
    check_control(frame)


@given(st.binary(max_size=200) | mutated(control_bodies))
def test_any_body_of_a_control_message(body: bytes) -> None:
    check_control(seal(body))


@given(st.data())
def test_any_value_in_the_place_of_any_field(data: st.DataObject) -> None:
    message = data.draw(controls)
    fields: dict[str, Any] = msgspec.to_builtins(message)
    key = data.draw(st.sampled_from(sorted(fields)))
    fields[key] = data.draw(msgpack_values)
    check_control(seal(msgspec.msgpack.encode(fields)))


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_any_frames_as_a_data_message(frames: list[bytes]) -> None:
    check_data(frames)


@given(st.binary(max_size=200) | mutated(header_bodies), st.sampled_from([PAYLOAD, b"", b"other"]))
def test_any_body_of_a_header(body: bytes, payload: bytes) -> None:
    check_data([b"u", seal(body), payload])


@given(headers, st.integers(0, 15), msgpack_values)
def test_any_value_in_the_place_of_any_header_field(
    header: msg.Header, index: int, value: object
) -> None:
    fields: list[object] = list(msgspec.to_builtins(header))
    fields[index] = value
    check_data([b"u", seal(msgspec.msgpack.encode(fields)), PAYLOAD])


@given(controls, st.data())
def test_a_flipped_bit_never_goes_unnoticed(
    message: msg.ControlMessage, data: st.DataObject
) -> None:
    frame = bytearray(encode_control(message))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        decode_control(bytes(frame))


@given(controls, st.data())
def test_a_truncated_frame_never_goes_unnoticed(
    message: msg.ControlMessage, data: st.DataObject
) -> None:
    frame = encode_control(message)
    with pytest.raises(RemoteProtocolError):
        decode_control(frame[: data.draw(st.integers(0, len(frame) - 1))])
