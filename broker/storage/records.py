"""The content of the journal's records: a start of the broker, a committed round, a learner's fate.

A body is the length of its head (uint32, little-endian), the head (MessagePack), and the blobs that
the head counts, in its order. The field `type` tells heads apart. Unknown fields are refused, so
that an old broker never misreads a newer journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from narrows.broker.merging import Policy
from narrows.broker.storage.durable_files import Damaged
from narrows.broker.storage.manifest import Start
from narrows.proto.messages import Phase

FORMAT: Final = 2
"""Format of the records of a life. 2 added what the defaults of format 1 stand for below."""

READABLE: Final = (1, FORMAT)
HEAD_LENGTH_BYTES: Final = 4

NOT_COUNTED: Final = -1
"""Counted tokens in a record of format 1: the clock was that of the learners' reports then."""

Mode: TypeAlias = Literal["full", "merged", "off"]


class _RecordHead(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class LifeRecord(_RecordHead, frozen=True, tag="began"):
    """A life of the broker: the time from one start to the end of the process."""

    format: int
    epoch: Start
    config_digest: str
    versions: tuple[int, ...]
    """Versions with which it begins, by fragment; empty before version 0."""
    at: float
    """Seconds since 1970, in this and every record. Only people read it: clocks may jump."""


class ContributorRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One learner's part in a round, in learner-name order."""

    learner: str
    incarnation: str
    push_id: int
    tokens: int
    steps: int
    weight: float
    merged_tokens: int
    """Tokens of this process in this fragment so far, with this push; TOKENS_MAX at most."""
    counted: int = NOT_COUNTED
    """Tokens of this push that the run's clock counts, and the weight."""
    is_clipped: bool = False
    """See merging.PushEvidence, as for the next two; the watch of a replay judges by them."""
    cosine: float | None = None
    is_noise: bool = False
    norms: tuple[float, ...] = ()
    """Applied norms by piece, for the history. Only where the record has no contributions, from
    which they come out again."""


class VectorRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Values of a fragment as they travelled, a blob per chunk."""

    codec: str
    rho: float
    """Quantisation step in units of the rms, 0 where the record's writer did not choose it."""
    chunks: tuple[tuple[int, int, int], ...]
    """(offset, elements, payload bytes)."""


class RoundRecord(_RecordHead, frozen=True, tag="committed"):
    """A round. With this record the version exists.

    Blobs: the publication's chunks, then those of each contribution, or the merged outer gradient
    (bfloat16) if only that is kept.
    """

    epoch: Start
    fragment: int
    version: int
    reason: str
    contributors: tuple[ContributorRecord, ...]
    policy: Policy
    phase: Phase
    run_tokens: int
    """The run's clock before this round, and after rounds that were published and never written."""
    publication: VectorRecord
    contributions: tuple[VectorRecord, ...]
    """Empty in a journal of merged outer gradients."""
    error_ratio: float
    """Error ratio of the publication, for its rate control; see transfer.error_ratio."""
    digests: tuple[int, int, int]
    """xxh3_64 of global parameters, momentum and published copy."""
    at: float


class FateRecord(_RecordHead, frozen=True, tag="fate"):
    """A learner joined, left or was forgotten, or a push was refused or expired."""

    epoch: Start
    what: Literal["joined", "left", "forgotten", "refused", "expired"]
    learner: str
    incarnation: str
    fragment: int
    """-1: none."""
    push_id: int
    """0: none."""
    reason: str
    at: float


class SealRecord(_RecordHead, frozen=True, tag="sealed"):
    """From here on the journal is sealed; before, somebody said that it was whole."""

    epoch: Start
    key: str
    """Name of the seal key (SealKey.name), by which keys are told apart."""
    at: float


Head: TypeAlias = LifeRecord | RoundRecord | FateRecord | SealRecord
_decoder = msgspec.msgpack.Decoder(Head)


def encode(head: Head, blobs: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The parts of a record's body; `decode` is the inverse."""
    packed = msgspec.msgpack.encode(head)
    return [len(packed).to_bytes(HEAD_LENGTH_BYTES, "little"), packed, *blobs]


def decode(body: memoryview) -> tuple[Head, memoryview]:
    """Head and blobs of a body. Raises Damaged."""
    end = HEAD_LENGTH_BYTES + int.from_bytes(body[:HEAD_LENGTH_BYTES], "little")
    try:
        head = _decoder.decode(body[HEAD_LENGTH_BYTES:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"a record of the journal: {error}") from error
    if isinstance(head, LifeRecord) and head.format not in READABLE:
        told = " and ".join(map(str, READABLE))
        raise Damaged(f"a journal of format {head.format}, this version reads {told}")
    if isinstance(head, RoundRecord):
        _check_round(head)
    return head, body[end:]


def _check_round(head: RoundRecord) -> None:
    """Raises Damaged if the parts of a record do not fit together."""
    if len(head.contributions) not in (0, len(head.contributors)):
        counts = f"{len(head.contributions)} contributions of {len(head.contributors)}"
        raise Damaged(f"a record of the journal: {counts} contributors")
    if not head.publication.chunks or not 0 < head.publication.rho < math.inf:
        raise Damaged("a record of the journal: its publication has no chunks or no step")
    if not all(0 <= each.weight < math.inf for each in head.contributors):
        raise Damaged("a record of the journal: a contribution's weight is no number from 0 on")
    if not head.error_ratio >= 0:
        raise Damaged(f"a record of the journal: an error ratio of {head.error_ratio}")


def vector_of(codec: str, rho: float, chunks: Sequence[tuple[int, int, bytes]]) -> VectorRecord:
    """The description of (offset, elements, payload) chunks whose payloads are the blobs."""
    return VectorRecord(
        codec, rho, tuple((offset, count, len(data)) for offset, count, data in chunks)
    )


def payloads(
    vectors: Sequence[VectorRecord], blobs: memoryview
) -> Iterator[list[tuple[int, int, bytes]]]:
    """(offset, elements, payload) of each vector's chunks. Raises Damaged if they do not fit."""
    place = 0
    for vector in vectors:
        chunks: list[tuple[int, int, bytes]] = []
        for offset, count, size_bytes in vector.chunks:
            if size_bytes < 0 or place + size_bytes > len(blobs):
                raise Damaged("a record of the journal: a chunk is missing")
            chunks.append((offset, count, bytes(blobs[place : place + size_bytes])))
            place += size_bytes
        yield chunks
