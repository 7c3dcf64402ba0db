"""A journal of format 1, stored: it can be read for ever, by this code and by the table alone."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import TypedDict

import pytest
from fake_disk import FakeDisk
from journal_cases import contents
from xxhash import xxh3_64_intdigest

from narrows.broker.storage.journal import Journal

SEGMENT_BYTES = 256


class StoredFile(TypedDict):
    """A file; bytes that are not listed are zeros."""

    size_bytes: int
    hex: list[str]


class Stored(TypedDict):
    """A journal, and what is to be read from it; bodies in hex."""

    run_id: str
    first: int
    durable: int
    bodies: list[str]
    files: dict[str, StoredFile]


STORED: Stored = json.loads(Path(__file__).with_name("journal.json").read_text())
BODIES = [bytes.fromhex(each) for each in STORED["bodies"]]


def files() -> dict[str, bytes]:
    return {
        name: bytes.fromhex("".join(file["hex"])).ljust(file["size_bytes"], b"\0")
        for name, file in STORED["files"].items()
    }


def opened(disk: FakeDisk) -> Journal:
    return Journal.open(disk, run_id=STORED["run_id"], segment_bytes=SEGMENT_BYTES)


def test_the_stored_journal_is_read() -> None:
    journal = opened(FakeDisk(files()))
    assert (journal.first, journal.durable) == (STORED["first"], STORED["durable"])
    assert contents(journal) == BODIES and journal.warnings == []


def test_the_stored_journal_is_written_on() -> None:
    disk = FakeDisk(files())
    journal = opened(disk)
    assert journal.append([b"more"]) == STORED["first"] + len(BODIES)
    journal.sync()
    assert contents(opened(disk)) == [*BODIES, b"more"]


def integer(content: bytes, start: int, stop: int) -> int:
    return int.from_bytes(content[start:stop], "little")


def by_the_table(content: bytes) -> dict[int, bytes]:
    """The records of a segment, from nothing but the table in the documentation."""
    assert content[:8] == b"NARROWSJ" and integer(content, 8, 12) == 1
    assert content[44:88].rstrip(b"\0").decode() == STORED["run_id"]
    assert integer(content, 88, 96) == xxh3_64_intdigest(content[:88])
    number, salt, records = integer(content, 20, 28), integer(content, 36, 44), dict[int, bytes]()
    rest = content[96:]
    while rest[:4] == bytes.fromhex("9d524543"):
        size = integer(rest, 4, 12)
        assert integer(rest, 12, 20) == number and integer(rest, 20, 28) < number
        assert integer(rest, 36, 44) == xxh3_64_intdigest(rest[:36], salt)
        records[number] = rest[44 : 44 + size]
        assert integer(rest, 28, 36) == xxh3_64_intdigest(records[number])
        number, rest = number + 1, rest[44 + size :]
    assert not any(rest)
    return records


def test_the_table_is_enough_to_read_it() -> None:
    records: dict[int, bytes] = {}
    for name, content in sorted(files().items()):
        assert integer(content, 12, 20) == int(name[8:16])
        first, found = integer(content, 20, 28), by_the_table(content)
        assert integer(content, 28, 36) in found or integer(content, 28, 36) < first
        records = {number: body for number, body in records.items() if number < first} | found
    assert records == dict(enumerate(BODIES, STORED["first"]))


def test_the_same_bytes_are_written_today(monkeypatch: pytest.MonkeyPatch) -> None:
    salts = count(1)

    def salt(size_bytes: int) -> bytes:
        return (0x0123456789ABCDEF * next(salts) % 2**64).to_bytes(size_bytes, "little")

    monkeypatch.setattr(os, "urandom", salt)
    disk = FakeDisk()
    three, large, five, six, last = BODIES[1:]
    for batches in ([[b"one", b""], BODIES[:1]], [[three], [large], [five, six]], [[last]]):
        journal = opened(disk)
        journal.sync()
        for batch in batches:
            for body in batch:
                journal.append([body])
            journal.sync()
        if batches[0] == [last]:
            journal.cut_before(STORED["first"])
    assert disk.contents() == files()
