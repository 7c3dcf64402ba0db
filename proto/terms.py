"""The parts of messages: bounded numbers, modes, phases, and structures that several share.

PROTOCOL.md is the specification; this file is its Python form and changes with it. Bounds stand in
the types, so that the decoder checks every field before any other code sees it.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from narrows.proto.limits import (
    CHUNK_ELEMENTS_MAX,
    CODEC_CHARACTERS_MAX,
    CODECS_MAX,
    DIMENSIONS_MAX,
    ELEMENTS_MAX,
    FRAGMENTS_MAX,
    LAYOUT_PART_ENTRIES_MAX,
    LAYOUT_PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    PUSH_TOKENS_MAX,
    RANGES_MAX,
    STATUS_LEARNERS_MAX,
    STREAMS_MAX,
    TEXT_CHARACTERS_MAX,
    TOKENS_MAX,
    VERSION_MAX,
)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Elements: TypeAlias = Annotated[int, Meta(ge=0, le=ELEMENTS_MAX)]
Fragments: TypeAlias = Annotated[int, Meta(ge=1, le=FRAGMENTS_MAX)]
Period: TypeAlias = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
ChunkSize: TypeAlias = Annotated[int, Meta(ge=1, le=CHUNK_ELEMENTS_MAX)]
MessageSize: TypeAlias = Annotated[int, Meta(ge=1, le=PAYLOAD_BYTES_MAX)]
Version: TypeAlias = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Streams: TypeAlias = Annotated[int, Meta(ge=1, le=STREAMS_MAX)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Stream: TypeAlias = Annotated[int, Meta(ge=0, le=STREAMS_MAX - 1)]
PushId: TypeAlias = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
PushTokens: TypeAlias = Annotated[int, Meta(ge=0, le=PUSH_TOKENS_MAX)]
PartIndex: TypeAlias = Annotated[int, Meta(ge=0, le=LAYOUT_PARTS_MAX - 1)]
PartCount: TypeAlias = Annotated[int, Meta(ge=1, le=LAYOUT_PARTS_MAX)]
Rho: TypeAlias = Annotated[float, Meta(ge=0.001, le=100.0)]
Bits: TypeAlias = Annotated[float, Meta(ge=0.0, le=64.0)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e18)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Codec: TypeAlias = Annotated[str, Meta(max_length=CODEC_CHARACTERS_MAX)]
Fingerprint: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Proof: TypeAlias = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
"""Proof of the broker that knows the run's secret for an epoch; "": none."""
PublicKey: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""A CURVE key in Z85."""
Positions: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=STREAMS_MAX)]
Ranges: TypeAlias = Annotated[tuple[tuple[Elements, Elements], ...], Meta(max_length=RANGES_MAX)]
"""(offset, count) in elements."""
Versions: TypeAlias = Annotated[tuple[Version, ...], Meta(max_length=FRAGMENTS_MAX)]
Codecs: TypeAlias = Annotated[tuple[Codec, ...], Meta(max_length=CODECS_MAX)]
Shape: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=DIMENSIONS_MAX)]

Epoch: TypeAlias = tuple[Count, Count, Count]
"""(term, life, nonce). A promotion raises the term; each start on a state directory raises its life
and draws a nonce. Only terms are ordered, because a restored copy of the directory counts its lives
on from an older number."""

MergeRule: TypeAlias = Literal["mean", "rda"]
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


class Mode(StrEnum):
    """How learners and broker keep step; the same code with different settings."""

    DECOUPLED = "decoupled"
    """Quorum plus grace; no learner ever waits."""
    STREAMING = "streaming"
    """All live learners contribute at a named step; a learner waits only beyond the overlap."""
    DILOCO = "diloco"
    """One fragment, all live learners, plain mean, learners wait: the classic method."""


class Phase(StrEnum):
    """Where the run stands."""

    FOUNDING = "founding"
    """Version 0 is not on disk yet."""
    RUNNING = "running"
    ENDING = "ending"
    """The goal is reached: learners stop stepping, every fragment gets one last round."""
    ENDED = "ended"
    """The versions are final: learners adopt them and say Bye."""


class Role(StrEnum):
    """The first thing that a Welcome asks of the learner."""

    FOUND = "found"
    """Send your parameters: they become version 0."""
    WAIT = "wait"
    """Another learner sends version 0; wait for the next Welcome."""
    ADOPT = "adopt"
    """Fetch and adopt the current versions."""


class LayoutEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One parameter tensor that travels. `rule` says how its outer gradients are merged."""

    name: Text
    shape: Shape
    dtype: DtypeName
    rule: MergeRule


class RunSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that the whole group shares. The broker holds them and sends them in Welcome."""

    mode: Mode
    fragment_count: Fragments
    """P: fragments that the model is cut into."""
    sync_period_steps: Period
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: Count
    """tau: inner steps that an exchange may take without holding anybody up."""
    push_codec: Codec
    publish_codec: Codec
    push_rho: Rho
    """Quantisation step of pushes in units of the tensor piece's rms."""
    publish_rho: Rho
    push_bits: Bits
    """Bits per parameter that pushes aim at, if their codec is "auto"."""
    publish_bits: Bits
    chunk_elements: ChunkSize
    """Elements of a chunk, fewer where it would exceed `message_bytes`."""
    message_bytes: MessageSize
    """Largest payload of a data message, from the rates (proto/flow/budget.py)."""
    streams: Streams
    """Data connections of a learner in each direction."""
    error_feedback: bool
    """Add the rounding error of a push to the next push of the fragment."""
    tokens_per_run_step: Count
    """Tokens that make one step of the run's clock; learning-rate schedules follow that clock."""
    goal_tokens: Count
    """Tokens after which the run ends; 0: never."""
    max_offline_s: Seconds
    """A learner that is cut off for longer pauses training until it is back; 0: it never pauses."""


class FragmentHead(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Newest version of a fragment and the xxh3_64 of its published copy (float32, LE)."""

    version: Version
    digest: int


class OpenRound(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A round in which learners may contribute."""

    fragment: Count
    base_version: Version
    attempt: Count
    """Counts re-openings of the same (fragment, base_version)."""
    at_step: int
    """Inner step of the snapshot in the modes streaming and diloco; -1: at the next boundary."""


class TokenLedger(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Token x fragment counts of one incarnation; each token of each fragment has one fate.

    logged * fragment_count == pending + merged + overwritten + refused + rolled_back + skipped.
    """

    logged: Count = 0
    pending: Count = 0
    merged: Count = 0
    overwritten: Count = 0
    refused: Count = 0
    rolled_back: Count = 0
    skipped: Count = 0


class LearnerStatus(Struct, frozen=True, forbid_unknown_fields=True):
    """One learner as the broker sees it."""

    name: Text
    incarnation: Text
    address: str
    state: str
    last_heard_s: float
    step: Count
    tokens: Count
    step_s: Seconds
    loss: float | None
    contributions: int
    refused: Count
    missed_running: int
    ledger: TokenLedger
    up_bytes: int
    down_bytes: int


class DataKind(IntEnum):
    """The content of a data message."""

    PUSH = 1
    """Up: an outer gradient against `version`."""
    FOUND = 2
    """Up: parameters that become version 0."""
    PUBLICATION = 3
    """Down: the step from version - 1 to `version`."""
    STATE = 4
    """Down: the whole published copy at `version`, lossless."""


LayoutEntries: TypeAlias = Annotated[
    tuple[LayoutEntry, ...], Meta(max_length=LAYOUT_PART_ENTRIES_MAX)
]
Heads: TypeAlias = Annotated[tuple[FragmentHead, ...], Meta(max_length=FRAGMENTS_MAX)]
OpenRounds: TypeAlias = Annotated[tuple[OpenRound, ...], Meta(max_length=FRAGMENTS_MAX)]
LearnerStatuses: TypeAlias = Annotated[
    tuple[LearnerStatus, ...], Meta(max_length=STATUS_LEARNERS_MAX)
]
