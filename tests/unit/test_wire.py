"""Messages to bytes and back: the golden bytes, every bound, and whatever a stranger may send."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgpack
import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.errors import ErrorCode, RemoteProtocolError

EPOCH = "1-0000004d"
INCARNATION, RUN_ID = "site-a/0.0123abcd", "5f2a9c01b3d4e6f7"
BEAT = msg.Beat(EPOCH, msg.Phase.RUNNING, (0,), (0,), 12.5, 0, 0.0, 2e9)

CONTROL: tuple[msg.ControlMessage, ...] = (
    msg.Hello(
        msg.PROTOCOL, "site-a/0", INCARNATION, RUN_ID, EPOCH,
        fingerprint="9ebf5dfae183ed17a71a3a11d820e2d7", held=(msg.Held(-1, 0),),
    ),
    msg.Welcome(
        RUN_ID, msg.Role.ADOPT, settings=msg.RunSettings(fragments=1, streams=1),
        uplink_port=7071, downlink_port=7072, go_back=(), beat=BEAT,
    ),
    msg.Fetch(msg.DataKind.STATE, 0, 0, 0, ((0, 1),)),
    msg.Report(steps=4, tokens=64, loss=1.5, held=(0,), paused="evaluating", finished=(0,)),
    BEAT,
    msg.Push(fragment=0, push_id=1, base=0, tokens=48, steps=3),
    msg.Refuse("bad_payload", "zstd frame", "one whole frame", "damage", "", 0, 1),
    msg.AskStatus(),
    msg.Status({"phase": "running", "learners": [{"name": "site-a/0", "tokens": 64}]}),
    msg.Bye("the run has ended"),
)  # fmt: skip

HEADER = msg.Header(
    EPOCH, msg.DataKind.PUBLICATION, incarnation="", fragment=0, version=1, push_id=0, chunk=0,
    codec="int4-zstd", payload_digest=2540268930244521165, result_digest=3139933653587292279,
    contributors=(msg.Contributor(INCARNATION, 1), msg.Contributor("site-b.89abcdef", 7)),
)  # fmt: skip
"""One exchange between a learner that joins again and a broker: every control message, and one data
header. The golden file has their bytes in hex, without the envelope."""

GOLDEN = json.loads(Path(__file__).with_name("golden_exchange.json").read_text())
BODIES = [bytes.fromhex(each) for each in GOLDEN["control"].values()]
HEADER_BYTES = bytes.fromhex(GOLDEN["header"])

decoders: dict[str, Callable[[bytes], object]] = {
    "control": lambda body: wire.decode_control([wire.ENVELOPE, body], msg.CONTROL_BYTES_MAX),
    "header": wire.decode_header,
    "layout": wire.unpack_layout,
}


def refusal(what: str, body: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decoders[what](body)
    assert caught.value.expected and caught.value.got and caught.value.remedy
    return caught.value


def test_the_exchange_has_every_control_message_and_the_golden_bytes() -> None:
    assert {type(each) for each in CONTROL} == set(get_args(msg.ControlMessage))
    assert GOLDEN["control"] == {
        type(each).__name__: wire.encode_control(each)[1].hex() for each in CONTROL
    }
    assert GOLDEN["header"] == wire.encode_header(HEADER).hex()


def test_another_reader_finds_the_fields() -> None:
    for body, message in zip(BODIES, CONTROL, strict=True):
        assert decoders["control"](body) == message
        assert msgspec.convert(msgpack.unpackb(body), type(message)) == message
    assert decoders["header"](HEADER_BYTES) == HEADER
    assert msgspec.convert(msgpack.unpackb(HEADER_BYTES), msg.Header) == HEADER
    # Fields with a default may be left out at the end.
    short = msgpack.packb(msgpack.unpackb(HEADER_BYTES)[:10])
    assert wire.decode_header(short).contributors == ()


def changed(message: str, /, **fields: object) -> bytes:
    """A golden control message with other fields."""
    return packed(msgpack.unpackb(bytes.fromhex(GOLDEN["control"][message])) | fields)


def packed(value: object) -> bytes:
    """MessagePack of the independent writer."""
    return bytes(msgpack.packb(value))


@pytest.mark.parametrize(
    "body",
    [
        changed("Hello", name="../etc"),
        changed("Hello", name="a\nb"),
        changed("Hello", incarnation="site-a/0"),
        changed("Hello", fingerprint="9EBF5DFAE183ED17A71A3A11D820E2D7"),
        changed("Hello", epoch="1"),
        changed("Hello", extra=1),
        changed("Hello", held=[[-2, 0]]),
        changed("Push", fragment=msg.FRAGMENTS_MAX),
        changed("Push", push_id=0),
        changed("Push", steps=0),
        changed("Push", tokens=True),
        changed("Push", tokens=msg.PUSH_TOKENS_MAX + 1),
        changed("Report", paused="x" * (msg.TEXT_CHARACTERS_MAX + 1)),
        changed("Report", steps=-1),
        changed("Fetch", kind=5),
        changed("Fetch", chunks=[]),
        changed("Fetch", chunks=[[0, 0]]),
        changed("Fetch", chunks=[[0, 1]] * (msg.RANGES_MAX + 1)),
        changed("Beat", period_s=float("nan")),
        changed("Welcome", uplink_port=0),
        msgpack.packb({"type": "unknown"}),
        msgpack.packb({"type": "hello"}),
        BODIES[0] + b"\x00",
        b"",
    ],
)
def test_what_the_page_forbids_is_refused(body: bytes) -> None:
    assert refusal("control", body).code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("learner", ["site-a", "site-a.0123abcX", f"{INCARNATION}\n", "a" * 90])
def test_a_header_names_an_incarnation_or_nobody(learner: str) -> None:
    fields = msgpack.unpackb(HEADER_BYTES)
    fields[2] = learner
    assert refusal("header", packed(fields)).code is ErrorCode.BAD_MESSAGE


def test_the_envelope_names_version_and_size() -> None:
    for frames in ([], [b"NRW\x01"], [b"NRX\x01", b""], [b"NRW", b""], [b"NRW\x01", b"", b""]):
        with pytest.raises(RemoteProtocolError, match="bad_message: control message"):
            wire.decode_control(frames, 100)
    with pytest.raises(RemoteProtocolError, match=r"protocol_version.*expected 1, got 2.*install"):
        wire.decode_control([b"NRW\x02", BODIES[0]], 100)
    with pytest.raises(RemoteProtocolError, match=r"too_large.*at most 100 bytes, got 101"):
        wire.decode_control([wire.ENVELOPE, bytes(101)], 100)
    assert refusal("header", bytes(msg.HEADER_BYTES_MAX + 1)).code is ErrorCode.TOO_LARGE


def test_the_largest_messages_fit_their_bounds() -> None:
    held = (msg.Held(msg.VERSION_MAX, 2**64 - 1),) * msg.FRAGMENTS_MAX
    hello = msgspec.structs.replace(CONTROL[0], held=held)
    assert len(wire.encode_control(hello)[1]) <= msg.CONTROL_UP_BYTES_MAX
    longest = "a" * 48 + "/" + "b" * 15 + ".01234567"
    everybody = (msg.Contributor(longest, msg.VERSION_MAX),) * msg.LEARNERS_MAX
    header = msgspec.structs.replace(HEADER, contributors=everybody)
    assert wire.decode_header(wire.encode_header(header)) == header


def test_a_layout_comes_back_and_another_reader_finds_it() -> None:
    entry = msg.LayoutEntry("w", (2, 3), "bfloat16", "rda")
    layout = msg.Layout(7, (entry, msg.LayoutEntry("s", (), "float32", "mean")))
    payload = wire.pack_layout(layout)
    assert wire.unpack_layout(payload) == layout
    assert msgspec.convert(msgpack.unpackb(zstandard.decompress(payload)), msg.Layout) == layout


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        zstandard.compress(b"\x92\x00\x90"),  # No tensor.
        zstandard.compress(b"\x92\x00\x91\x94\xa1w\x91\x00\xa7float32\xa3rda"),  # A size of 0.
        zstandard.compress(b"no layout"),
        zstandard.compress(bytes(wire.LAYOUT_BYTES_MAX + 1)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\x92\x00\x90"),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",  # A skippable frame.
    ],
)
def test_what_is_no_layout_is_refused(payload: bytes) -> None:
    assert refusal("layout", payload).code in (ErrorCode.BAD_MESSAGE, ErrorCode.TOO_LARGE)


def test_topics_names_and_the_site_that_speaks_for_them() -> None:
    assert wire.asked_topic(INCARNATION, 7) == f"r/{INCARNATION}/07"
    assert (wire.live_topic(63), wire.uplink_topic(0)) == ("p/63", "u/00")
    assert wire.name_of(INCARNATION) == "site-a/0"
    assert wire.speaks_for("site-a", "site-a") and wire.speaks_for("site-a", "site-a/0")
    for name in ("site-b", "site-ab", "site", "site-ab/0", ""):
        assert not wire.speaks_for("site-a", name)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A golden message with one field replaced, some bytes changed, or its end cut off."""
    body = draw(st.sampled_from([*BODIES, HEADER_BYTES]))
    how = draw(st.sampled_from(("field", "bytes", "cut")))
    if how == "field":
        value = msgpack.unpackb(body)
        places = sorted(value) if isinstance(value, dict) else range(len(value))
        value[draw(st.sampled_from(places))] = draw(junk)
        return packed(value)
    if how == "cut":
        return body[: draw(st.integers(0, len(body) - 1))]
    changed_bytes = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        changed_bytes[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(changed_bytes)


@given(st.binary(max_size=64) | junk.map(msgpack.packb) | damaged())
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_message_or_a_refusal(body: bytes) -> None:
    for decode in decoders.values():
        try:
            message = decode(body)
        except RemoteProtocolError as error:
            assert error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.TOO_LARGE)
        else:
            assert isinstance(message, msgspec.Struct)


def test_nesting_without_end_is_a_refusal() -> None:
    # A map of type and status, the latter a map with an array within an array, and so on.
    status = b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0"
    body = b"\x82" + packed("type") + packed("status") + packed("status") + status
    assert refusal("control", body).code is ErrorCode.BAD_MESSAGE
