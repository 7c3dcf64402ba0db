"""Messages to bytes and back: the golden bytes, every bound, and whatever a stranger may send; and
layouts with their cut into fragments: complete, balanced, readable where they differ."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import get_args

import msgpack
import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_cases import fragment_of

from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.errors import ConfigError, ErrorCode, RemoteProtocolError
from narrows.proto.layout import (
    Fragment,
    build_table,
    check_layout,
    differences,
    element_count,
    fingerprint,
)
from narrows.proto.messages import ELEMENTS_MAX, Layout, LayoutEntry

EPOCH = "1-0000004d"
INCARNATION, RUN_ID = "site-a/0.0123abcd", "5f2a9c01b3d4e6f7"
BEAT = msg.Beat(EPOCH, msg.Phase.RUNNING, (0,), (0,), 12.5, 0, 0.0, 2e9, (2540268930244521165,))

CONTROL: tuple[msg.ControlMessage, ...] = (
    msg.Hello(
        msg.PROTOCOL, "site-a/0", INCARNATION, RUN_ID, EPOCH,
        fingerprint="9ebf5dfae183ed17a71a3a11d820e2d7", copies=(msg.CopyDigest(-1, 0),),
    ),
    msg.Welcome(
        RUN_ID, msg.Role.ADOPT, settings=msg.RunSettings(fragments=1, streams=1),
        uplink_port=7071, downlink_port=7072, go_back=(), beat=BEAT,
    ),
    msg.Fetch(msg.DataKind.STATE, 0, 0, 0, ((0, 1),)),
    msg.Report(steps=4, tokens=64, loss=1.5, bases=(0,), paused="evaluating", finished=(0,)),
    BEAT,
    msg.Push(fragment=0, push_id=1, base=0, tokens=48, steps=3, loss=2.5),
    msg.Refuse("bad_payload", "zstd frame", "one whole frame", "damage", "", 0, 1),
    msg.AskStatus(),
    msg.Status(phase="running", learners={"site-a/0": msg.LearnerStatus(steps=64)}),
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


def packed(value: object) -> bytes:
    """MessagePack of the independent writer."""
    return bytes(msgpack.packb(value))


FORBIDDEN: dict[str, dict[str, list[object]]] = {
    "Hello": {
        "name": ["../etc", "a\nb"], "incarnation": ["site-a/0"], "epoch": ["1"], "extra": [1],
        "fingerprint": ["9EBF5DFAE183ED17A71A3A11D820E2D7"], "held": [[[-2, 0]]],
    },
    "Push": {
        "fragment": [msg.FRAGMENTS_MAX], "push_id": [0], "steps": [0],
        "tokens": [True, msg.PUSH_TOKENS_MAX + 1],
    },
    "Report": {"paused": ["x" * (msg.TEXT_CHARACTERS_MAX + 1)], "steps": [-1]},
    "Fetch": {"kind": [5], "chunks": [[], [[0, 0]], [[0, 1]] * (msg.RANGES_MAX + 1)]},
    "Beat": {"period_s": [float("nan")]}, "Welcome": {"uplink_port": [0]},
}  # fmt: skip
"""Values that the page forbids, by message and field."""


def test_what_the_page_forbids_is_refused() -> None:
    bodies = [
        packed({"type": "unknown"}), packed({"type": "hello"}), BODIES[0] + b"\x00", b"",
        # An array within an array, and so on, in the map of a status.
        packed({"type": "status", "status": {"a": None}})[:-1] + b"\x91" * 100_000 + b"\xc0",
    ]  # fmt: skip
    for name, fields in FORBIDDEN.items():
        honest = msgpack.unpackb(bytes.fromhex(GOLDEN["control"][name]))
        for field, values in fields.items():
            bodies += [packed(honest | {field: value}) for value in values]
    for body in bodies:
        assert refusal("control", body).code is ErrorCode.BAD_MESSAGE, body


@pytest.mark.parametrize("learner", ["site-a", "site-a.0123abcX", f"{INCARNATION}\n", "a" * 90])
def test_a_header_names_an_incarnation_or_nobody(learner: str) -> None:
    fields = msgpack.unpackb(HEADER_BYTES)
    fields[2] = learner
    assert refusal("header", packed(fields)).code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], "bad_message: control message"),
        ([b"NRW\x01"], "bad_message: control message"),
        ([b"NRX\x01", b""], "bad_message: control message"),
        ([b"NRW", b""], "bad_message: control message"),
        ([b"NRW\x01", b"", b""], "bad_message: control message"),
        ([b"NRW\x02", BODIES[0]], r"protocol_version.*expected 1, got 2.*install"),
        ([wire.ENVELOPE, bytes(101)], r"too_large.*at most 100 bytes, got 101"),
    ],
    ids=["none", "one", "other magic", "no version", "three", "other version", "too large"],
)
def test_the_envelope_names_version_and_size(frames: list[bytes], told: str) -> None:
    with pytest.raises(RemoteProtocolError, match=told):
        wire.decode_control(frames, 100)


def test_the_largest_messages_fit_their_bounds() -> None:
    copies = (msg.CopyDigest(msg.VERSION_MAX, 2**64 - 1),) * msg.FRAGMENTS_MAX
    hello = msgspec.structs.replace(CONTROL[0], copies=copies)
    assert len(wire.encode_control(hello)[1]) <= msg.CONTROL_UP_BYTES_MAX
    longest = "a" * 48 + "/" + "b" * 15 + ".01234567"
    everybody = (msg.Contributor(longest, msg.VERSION_MAX),) * msg.LEARNERS_MAX
    header = msgspec.structs.replace(HEADER, contributors=everybody)
    assert wire.decode_header(wire.encode_header(header)) == header
    assert refusal("header", bytes(msg.HEADER_BYTES_MAX + 1)).code is ErrorCode.TOO_LARGE


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
    """Holds `unpack_layout`."""
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


EMBEDDING = LayoutEntry("embedding.weight", (16, 8), "bfloat16", "mean")
WEIGHT = LayoutEntry("block.0.weight", (8, 8), "bfloat16", "rda")
BIAS = LayoutEntry("block.0.bias", (8,), "float32", "mean")
SCALAR = LayoutEntry("temperature", (), "float32", "mean")
ENTRIES = (EMBEDDING, WEIGHT, BIAS, SCALAR)


def entry(name: str = "w", shape: tuple[int, ...] = (2, 3)) -> LayoutEntry:
    return LayoutEntry(name, shape, "float32", "rda")


def entries_of(*shapes: tuple[int, ...]) -> tuple[LayoutEntry, ...]:
    return tuple(entry(f"t{index}", shape) for index, shape in enumerate(shapes))


# Layouts.


def test_layouts_that_no_model_has_are_refused() -> None:
    """Holds `check_layout`."""
    check_layout(Layout(0, (*ENTRIES, entry("módulo.weight"))))
    check_layout(Layout(0, (entry(shape=(ELEMENTS_MAX,)),)))
    for entries, text in (
        ((entry("a\nb"),), "tensor name"),
        ((entry("a\x1b[31m"),), "tensor name"),
        ((entry("a"), entry("b"), entry("a")), "'a' twice"),
        ((entry("a", (ELEMENTS_MAX,)), entry("b", (1,))), "elements"),
        # The product would wrap to 0 in 64 bits.
        ((entry(shape=(1 << 33, 1 << 33)),), "elements"),
    ):
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            check_layout(Layout(0, entries))
        assert caught.value.code is ErrorCode.BAD_MESSAGE


def test_a_fingerprint_depends_on_every_field() -> None:
    layout = Layout(7, ENTRIES)
    changes = {"name": "e", "shape": (8, 16), "dtype": "float32", "rule": "rda"}
    others = [Layout(8, ENTRIES), Layout(7, ENTRIES[:-1]), Layout(7, (WEIGHT, EMBEDDING))]
    for field, value in changes.items():
        changed = msgspec.structs.replace(EMBEDDING, **{field: value})
        others.append(Layout(7, (changed, *ENTRIES[1:])))
    # Both sides of a run compare it, so it must never change by itself.
    assert fingerprint(layout) == "9b7c3597dffbf08a711435185bcfc48a"
    assert len({fingerprint(each) for each in (layout, *others)}) == 1 + len(others)


def test_differences_name_tensor_field_and_both_values() -> None:
    assert differences(ENTRIES, list(ENTRIES)) == []
    theirs = (
        msgspec.structs.replace(EMBEDDING, shape=(17, 8), rule="rda"),
        msgspec.structs.replace(WEIGHT, dtype="float16"),
        SCALAR,
        entry("extra"),
    )
    expected = [
        "'embedding.weight': shape (17, 8), expected (16, 8)",
        "'embedding.weight': rule rda, expected mean",
        "'block.0.weight': dtype float16, expected bfloat16",
        "'block.0.bias' is missing",
        "'extra' is not in the run",
    ]
    assert differences(ENTRIES, theirs) == expected
    assert differences((*ENTRIES, entry("more")), theirs) == [*expected[:4], "'more' is missing"]
    assert differences(ENTRIES, (WEIGHT, EMBEDDING, BIAS, SCALAR)) == [
        "tensor 0 is 'block.0.weight', expected 'embedding.weight'",
        "tensor 1 is 'embedding.weight', expected 'block.0.weight'",
    ]


# The cut.


def cut(table: tuple[Fragment, ...]) -> list[list[tuple[int, int, int]]]:
    """(tensor, start, count) of every piece, per fragment."""
    return [[(p.tensor, p.start, p.count) for p in each.pieces] for each in table]


@pytest.mark.parametrize(
    ("shapes", "count", "expected"),
    [
        # One fragment: everything in layout order.
        ([(3, 2), (5,), ()], 1, [[(0, 0, 6), (1, 0, 5), (2, 0, 1)]]),
        # Largest first to the smallest fragment.
        ([(2,), (9,), (5,), (4,)], 2, [[(0, 0, 2), (1, 0, 9)], [(2, 0, 5), (3, 0, 4)]]),
        # Equal tensors go out in layout order, to the first fragment.
        ([(4,), (4,), (4,), (4,)], 2, [[(0, 0, 4), (2, 0, 4)], [(1, 0, 4), (3, 0, 4)]]),
        # A tensor of exactly a fragment is not cut, a larger one is cut on rows.
        ([(8,), (8,)], 2, [[(0, 0, 8)], [(1, 0, 8)]]),
        ([(5, 4), (4,)], 2, [[(0, 8, 12)], [(0, 0, 8), (1, 0, 4)]]),
    ],
)
def test_the_cut_by_example(
    shapes: list[tuple[int, ...]], count: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    """Holds `build_table`."""
    assert cut(build_table(entries_of(*shapes), count)) == expected


@pytest.mark.parametrize(
    ("shapes", "count", "possible"),
    [([(1, 100)], 2, 1), ([(3, 7)], 4, 3), ([(2, 100), (1,)], 4, 3), ([(), (), ()], 1000, 3)],
)
def test_the_largest_possible_count_is_named(
    shapes: list[tuple[int, ...]], count: int, possible: int
) -> None:
    with pytest.raises(ConfigError, match=f"fragments.count = {possible}:"):
        build_table(entries_of(*shapes), count)
    assert len(build_table(entries_of(*shapes), possible)) == possible


shapes_of_few = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(st.lists(shapes_of_few, min_size=1, max_size=12), st.data())
def test_fragments_cover_every_element_once_in_whole_rows(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    entries = entries_of(*shapes)
    rows = [shape[0] if shape else 1 for shape in shapes]
    count = data.draw(st.integers(1, sum(rows)))
    try:
        table = build_table(entries, count)
    except ConfigError as error:
        table = build_table(entries, int(error.expected.removeprefix("at most ")))
    for index, fragment in enumerate(table):
        *offsets, end = accumulate((piece.count for piece in fragment.pieces), initial=0)
        assert (fragment.index, fragment.elements) == (index, end)
        assert [piece.offset for piece in fragment.pieces] == offsets
        order = [(piece.tensor, piece.start) for piece in fragment.pieces]
        assert order == sorted(order)
    pieces = [piece for fragment in table for piece in fragment.pieces]
    for piece in pieces:
        row_elements = element_count(entries[piece.tensor]) // rows[piece.tensor]
        assert piece.start % row_elements == piece.count % row_elements == 0
    seen = sorted((each.tensor, each.start + i) for each in pieces for i in range(each.count))
    assert seen == [(t, i) for t, each in enumerate(entries) for i in range(element_count(each))]
    sizes = [fragment.elements for fragment in table]
    assert max(sizes) - min(sizes) <= max(piece.count for piece in pieces)


# Chunks.


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([1, 7, 256, 1024]))
def test_chunks_are_regular_and_their_spans_are_the_pieces_within(
    lengths: list[int], chunk_elements: int
) -> None:
    fragment = fragment_of(*lengths)
    piece_at = [index for index, length in enumerate(lengths) for _ in range(length)]
    covered: list[int] = []
    for index in range(fragment.chunk_count(chunk_elements)):
        offset, count = fragment.chunk(index, chunk_elements)
        assert offset == index * chunk_elements == len(covered)
        assert count == min(chunk_elements, fragment.elements - offset)
        spans, pieces = fragment.spans(offset, count).tolist(), fragment.pieces_of(offset, count)
        assert (spans[0], spans[-1], len(spans)) == (0, count, len(pieces) + 1)
        for piece, start, end in zip(pieces, spans, spans[1:], strict=False):
            covered += [piece] * (end - start)
    assert covered == piece_at
