"""Bodies of the journal's records: decoded, audited, and replayed on a small model.

The first byte of an input chooses the record of the stored journal whose head the rest replaces,
with that record's blobs behind it; from 128 on the rest is the whole body.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import cast

import msgspec
from any_messages import any_of
from fuzz.memory_files import MemoryFiles
from fuzz.target import Target
from fuzz.tree import altered_msgpack

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import FragmentState
from narrows.broker.storage.audit import Audit
from narrows.broker.storage.checkpoint import CheckpointContent
from narrows.broker.storage.durable_files import Damaged, directory
from narrows.broker.storage.fragment_file import read_fragment
from narrows.broker.storage.history import Changes, config_of, merge_again
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import Manifest, read_sealed, snapshot_of
from narrows.broker.storage.records import RoundRecord, decode, encode, payloads
from narrows.broker.storage.replay import recover
from narrows.broker.storage.segments import Record
from narrows.proto.errors import NarrowsError

STATE = Path(__file__).parents[2] / "golden/state-format-1"
WHOLE = 128


@cache
def stored() -> tuple[CheckpointContent, tuple[bytes, ...]]:
    """The oldest checkpoint of the stored run, and the bodies of the records after it."""
    states: list[FragmentState] = []
    with directory(None, str(STATE / "checkpoint-00000001")) as fd:
        manifest = read_sealed(fd, "manifest.json", Manifest)
        states = [read_fragment(fd, i, entry) for i, entry in enumerate(manifest.fragments)]
    files = {path.name: path.read_bytes() for path in (STATE / "journal").iterdir()}
    journal = Journal.open(MemoryFiles(files), run_id=manifest.run_id, segment_bytes=1500)
    bodies = [bytes(record.body) for record in journal.records(manifest.journal + 1)]
    return snapshot_of(manifest, states), tuple(bodies)


@cache
def config() -> BrokerConfig:
    return config_of(stored()[0])


class OneRecord:
    """The part of a journal that a replay uses."""

    first = 1

    def __init__(self, body: bytes, number: int) -> None:
        self._record = Record(number, memoryview(body))

    def records(self, first: int) -> Iterator[Record]:
        yield self._record


def run(data: bytes) -> None:
    snapshot, bodies = stored()
    if not data:
        return
    body = data[1:]
    if data[0] < WHOLE:
        blobs = decode(memoryview(bodies[data[0] % len(bodies)]))[1]
        body = len(body).to_bytes(4, "little") + body + blobs
    try:
        head, blobs = decode(memoryview(body))
    except Damaged:
        return
    # Compared as bytes: NaN does not equal itself.
    again = b"".join(encode(head, [blobs]))
    same, rest = decode(memoryview(again))
    assert b"".join(encode(same, [rest])) == again
    audit = Audit()
    audit.take(1, head)
    audit.take(2, head)
    if isinstance(head, RoundRecord):
        replayed(snapshot, head, blobs, body)


def replayed(
    snapshot: CheckpointContent, head: RoundRecord, blobs: memoryview, body: bytes
) -> None:
    """The record as the first one behind a checkpoint."""
    with suppress(Damaged):
        list(payloads([head.publication, *head.contributions], blobs))
    journal = cast(Journal, OneRecord(body, snapshot.journal + 1))
    with suppress(NarrowsError):
        assert recover(config(), snapshot, journal).gaps <= 1
    for changes in (Changes(), Changes(outer_lr=1e30, without=("a",))):
        with suppress(NarrowsError):
            merge_again(config(), snapshot, journal, changes)


def seeds() -> list[bytes]:
    _, bodies = stored()
    heads = [body[4 : 4 + int.from_bytes(body[:4], "little")] for body in bodies]
    return [bytes([i]) + head for i, head in enumerate(heads)] + [b"\x80" + b for b in bodies]


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_msgpack(data[1:], random) if data and data[0] < WHOLE else None
    return None if changed is None else data[:1] + changed


EXAMPLES = any_of(RoundRecord).map(lambda head: b"\0" + msgspec.msgpack.encode(head))
TARGET = Target("records", run, seeds, EXAMPLES, mutate)
