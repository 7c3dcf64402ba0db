"""Segments of a journal as the dissector sees them: whole, in use, and damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_disk import FakeDisk

from narrows.broker.merging.policy import Policy
from narrows.broker.storage.chain import Chain
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.records import (
    ContributorRecord,
    FateRecord,
    RoundRecord,
    SealRecord,
    VectorRecord,
    encode,
)
from narrows.broker.storage.seal import SealKey
from narrows.broker.storage.segments import Segment, record_header, segment_header
from narrows.proto.dissector.findings import Dissected
from narrows.proto.dissector.journal import segment
from narrows.proto.messages import Phase

STATE = Path(__file__).parents[1] / "golden/state-format-1/journal"
STORED = json.loads((Path(__file__).parents[1] / "golden/journal.json").read_text())


def read(data: bytes) -> list[Dissected]:
    return list(segment(lambda offset, count: data[offset : offset + count], len(data)))


@pytest.mark.parametrize("path", sorted(STATE.glob("*.log")), ids=lambda path: path.stem)
def test_a_stored_state(path: Path) -> None:
    found = read(path.read_bytes())
    assert not any(each.faults for each in found)
    assert found[0].kind == "segment" and found[0].get("run_id") == "0000000000000000"
    chunks = sum(each.kind in ("publication", "contribution", "merged") for each in found)
    assert chunks > 0 and chunks == sum(map(chunks_told, found))


def chunks_told(found: Dissected) -> int:
    if found.kind != "committed":
        return 0
    vectors = found.get("contributions"), [found.get("publication")]
    count = 0
    for vector in [each for group in vectors if isinstance(group, list) for each in group]:
        assert isinstance(vector, dict) and isinstance(vector["chunks"], list)
        count += len(vector["chunks"])
    return count + (not vectors[0])


def files() -> Iterator[tuple[str, bytes]]:
    for name, file in STORED["files"].items():
        yield name, bytes.fromhex("".join(file["hex"])).ljust(file["size_bytes"], b"\0")


@pytest.mark.parametrize(("name", "data"), list(files()), ids=lambda value: str(value)[:20])
def test_bodies_that_are_no_records(name: str, data: bytes) -> None:
    found = read(data)
    assert found[0].get("number") == int(name[8:16])
    for record in found[1:]:
        assert record.kind in ("record", "unused")
        # The digests are right, and the bodies are texts.
        assert {fault.code for fault in record.faults} <= {"bad_record"}


POLICY = Policy("tokens", "layout", 3.0, 0.5, "sgd", 0.5, 0.9, False)


def committed(*, chunks: tuple[tuple[int, int, int], ...], is_merged: bool = False) -> RoundRecord:
    vector = VectorRecord("raw32", 0.0, chunks)
    who = ContributorRecord("a", "0" * 32, 1, 10, 1, 1.0, 10)
    return RoundRecord(
        (1, 1), 0, 1, "all", (who,), POLICY, Phase.RUNNING, 10, vector,
        () if is_merged else (vector,), 0.0, (1, 2, 3), 0.0,
    )  # fmt: skip


FATE = FateRecord((1, 1), "joined", "a", "0" * 32, -1, 0, "", 0.0)


def journal_of(*bodies: list[bytes | memoryview], chain: Chain | None = None) -> bytes:
    disk = FakeDisk({})
    journal = Journal.open(disk, run_id="run", segment_bytes=4096, chain=chain)
    for body in bodies:
        journal.append(body)
    journal.sync()
    (name,) = disk.names()
    data = bytearray(disk.size_bytes(name))
    disk.read(name, 0, memoryview(data))
    return bytes(data)


ROUND = encode(committed(chunks=((0, 2, 8), (2, 1, 4))), [bytes(8), bytes(4), bytes(8), bytes(4)])


def test_a_round() -> None:
    found = read(journal_of(encode(FATE), ROUND))
    assert [each.kind for each in found] == [
        "segment", "fate", "committed", "publication", "publication", "contribution",
        "contribution", "unused",
    ]  # fmt: skip
    assert not any(each.faults for each in found)
    assert [(each.get("learner"), each.get("offset"), each.get("elements")) for each in found[3:7]]
    assert [each.get("learner") for each in found[3:7]] == [None, None, "a", "a"]
    assert [each.get("offset") for each in found[3:7]] == [0, 2, 0, 2]
    assert found[5].get("values") == "2 finite values"
    assert found[1].get("what") == "joined" and found[2].get("reason") == "all"


def test_a_sealed_segment() -> None:
    chain = Chain(SealKey(b"k" * 32))
    sealed = encode(SealRecord((1, 1), chain.key.name, 0.0))
    data = journal_of(sealed, ROUND, chain=chain)
    found = read(data)
    assert [each.kind for each in found[:3]] == ["segment", "sealed", "committed"]
    assert found[-1].kind == "unused" and not any(each.faults for each in found)
    assert found[0].get("before") == "00" * 32
    body = b"".join(sealed)
    assert found[1].get("seal") == chain.key.record(bytes(32), 1, [body]).hex()
    assert found[1].get("key") == chain.key.name
    for place, code in ((90, "bad_checksum"), (160 + 50, "bad_checksum")):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert [fault.code for each in read(bytes(flipped)) for fault in each.faults] == [code]
    assert [fault.at for fault in read(data[:100])[0].faults] == [100]


def test_a_merged_outer_gradient() -> None:
    body = encode(committed(chunks=((0, 2, 8),), is_merged=True), [bytes(8), b"\0\0\x80\x3f"])
    *_, merged, _ = read(journal_of(body))
    assert (merged.kind, merged.faults, merged.get("values")) == ("merged", [], "2 finite values")
    *_, merged, _ = read(journal_of([*body[:-1], b"\0\0\x80\x7f"]))
    assert [fault.code for fault in merged.faults] == ["not_finite"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ([], "1 to 1 bytes of head"),
        ([b"\xff\0\0\0abc"], "1 to 3 bytes of head"),
        ([b"\1\0\0\0\x05"], "a map"),
        ([*encode(FATE), b"more"], "the end of the record"),
        ([*ROUND, b"more"], "the end of the record"),
        ([*ROUND[:-1], b"\0\0\0"], "the 4 bytes of a payload"),
        (encode(committed(chunks=((0, 2, -8),)), []), "the -8 bytes of a payload"),
        (encode(committed(chunks=((0, 2, 7),)), [bytes(7), bytes(7)]), "8 bytes"),
    ],
)
def test_records_that_do_not_add_up(body: list[bytes | memoryview], expected: str) -> None:
    faults = [fault for each in read(journal_of(body)) for fault in each.faults]
    assert faults and faults[0].expected == expected


def test_an_unknown_field_of_a_head() -> None:
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(FATE)) | {"wherefore": 1}
    packed = msgspec.msgpack.encode(head)
    found = read(journal_of([len(packed).to_bytes(4, "little"), packed]))[1]
    assert found.faults[0].expected == "Fate of 9 values"


def test_a_segment_that_ends_too_early() -> None:
    data = journal_of(encode(FATE), ROUND)
    assert read(data[:96])[1:] == []
    assert [fault.at for fault in read(data[:50])[0].faults] == [50]
    (record,) = read(data[: 96 + 20])[1:]
    assert [(fault.at, fault.got) for fault in record.faults] == [(116, "the end of the file")]
    (record,) = read(data[: 96 + 60])[1:]
    assert record.faults[0].got == "16 up to the end of the file"


def test_a_segment_of_another_format() -> None:
    data = bytearray(journal_of(encode(FATE)))
    data[8] = 3
    (found,) = read(bytes(data))
    assert [(fault.at, fault.expected, fault.got) for fault in found.faults] == [
        (8, "format 1 or 2", "3"),
    ]  # fmt: skip


def test_a_record_that_comes_out_of_turn() -> None:
    body = [memoryview(each) for each in encode(FATE)]
    segment = Segment("journal-00000001.log", 1, 0, 7, 0)
    data = segment_header(segment, "run")
    data += record_header(segment, 2, 0, body) + b"".join(body)
    _, found = read(data)
    assert [(fault.at, fault.expected, fault.got) for fault in found.faults] == [
        (96 + 12, "record 1", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize("step_bytes", [20, 44, 60, 300])
def test_a_segment_that_is_being_written_is_whole(step_bytes: int) -> None:
    """Every look at the file finds a little more of it."""
    data = journal_of(encode(FATE), ROUND)
    written = 96

    def look(offset: int, count: int) -> bytes:
        nonlocal written
        seen = data[:written].ljust(len(data), b"\0")
        written += step_bytes
        return seen[offset : offset + count]

    found = list(segment(look, len(data)))
    assert not any(each.faults for each in found)
    kinds = [each.kind for each in found]
    assert kinds[:-1] == [each.kind for each in read(data)][: len(kinds) - 1]
    assert kinds[-1] == "unused"


def test_no_changed_byte_goes_unnoticed() -> None:
    """It is named in the header of the segment or record that it belongs to, or before."""
    data = journal_of(encode(FATE), ROUND)
    places = [
        int(each.at("body_bytes")) - 4 for each in read(data) if each.get("durable") is not None
    ]
    ends = [96, places[0] + 44, places[1], places[1] + 44, len(data)]
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        faults = [fault for each in read(bytes(damaged)) for fault in each.faults]
        assert faults, f"byte {place}"
        assert faults[0].at < next(end for end in ends if place < end), f"byte {place}"
