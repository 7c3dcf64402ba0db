"""Every message on the wire as a frozen struct: control messages and the data header.

PROTOCOL.md is the specification; this file is its Python form and changes with it.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from narrows.proto.limits import (
    ELEMENTS_MAX,
    RANGES_MAX,
    STREAMS_MAX,
    TEXT_CHARACTERS_MAX,
    TOKENS_MAX,
    VERSION_MAX,
)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Elements: TypeAlias = Annotated[int, Meta(ge=0, le=ELEMENTS_MAX)]
Version: TypeAlias = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Positions: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=STREAMS_MAX)]
Ranges: TypeAlias = Annotated[tuple[tuple[Elements, Elements], ...], Meta(max_length=RANGES_MAX)]

Epoch: TypeAlias = tuple[Count, Count]
"""(term, life): a broker restart raises life, a promotion raises term. Compared as a tuple."""

MergeLaw: TypeAlias = Literal["mean", "rda"]
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
    """What a Welcome asks of the learner first."""

    FOUND = "found"
    """Send your parameters: they become version 0."""
    WAIT = "wait"
    """Another learner sends version 0; wait for the next Welcome."""
    ADOPT = "adopt"
    """Fetch and adopt the current versions."""


class LayoutEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One parameter tensor that travels. `law` says how its outer gradients are merged."""

    name: Text
    shape: tuple[int, ...]
    dtype: DtypeName
    law: MergeLaw


class RunSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that the whole group shares. They live at the broker, told in Welcome."""

    mode: Mode
    fragment_count: int
    """P."""
    sync_period_steps: int
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int
    """tau: inner steps that an exchange may take without holding anybody up."""
    push_codec: str
    publish_codec: str
    push_rho: float
    """Quantisation step of pushes in units of the tensor piece's rms."""
    publish_rho: float
    chunk_elements: int
    streams: int
    """Data connections of a learner in each direction."""
    error_feedback: bool
    """Carry what the push codec dropped over to the next push of the fragment."""
    tokens_per_run_step: int
    """Tokens that make one step of the run's clock; learning-rate schedules follow that clock."""
    goal_tokens: int
    """Tokens after which the run ends; 0: never."""
    max_offline_s: float
    """A learner cut off for longer pauses training until it is back; 0: never pauses."""


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
    """Token x fragment counts of one incarnation; every one of them has exactly one fate.

    logged * fragment_count == pending + merged + overwritten + refused + rolled_back + skipped.
    """

    logged: Count = 0
    pending: Count = 0
    merged: Count = 0
    overwritten: Count = 0
    refused: Count = 0
    rolled_back: Count = 0
    skipped: Count = 0


class _Control(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower
):
    pass


# Learner to broker.


class Hello(_Control):
    """Asks to join, or to rejoin after a broken connection or a broker restart."""

    protocol: int
    name: Text
    incarnation: Text
    """32 hex digits, fresh per process start."""
    run_id: Text
    """The run this learner belongs to, "" on its first Hello."""
    epoch: Epoch
    """Highest epoch seen, (0, 0) on the first Hello."""
    layout: tuple[LayoutEntry, ...]
    frozen_digest: int
    """xxh3_64 over names and bytes of the parameters that do not travel; 0: none."""
    codecs: tuple[str, ...]
    step: Count
    tokens: Count


class Report(_Control):
    """Where the learner is; sent per inner step, thinned to a few a second."""

    step: Count
    """Inner steps of this incarnation."""
    tokens: Count
    """Tokens of this incarnation, cumulative."""
    step_s: Seconds
    """Smoothed seconds per inner step, 0 before the second step."""
    loss: float | None
    received: Positions
    """Stream position received, per downlink stream (the credit of the sender)."""
    ledger: TokenLedger


class Push(_Control):
    """Announces a contribution whose chunks travel on the uplink."""

    fragment: Count
    base_version: Version
    attempt: Count
    push_id: Count
    """Counts the pushes of this incarnation from 1."""
    elements: Elements
    tokens: Count
    """Tokens since the base was adopted (c_tokens)."""
    steps: Count
    """Inner steps since the base was adopted (c_steps)."""


class Decline(_Control):
    """No contribution to this round will come; nobody waits for it."""

    fragment: Count
    base_version: Version
    attempt: Count
    reason: Text


class Adopted(_Control):
    """The learner's parameters hold this version now."""

    fragment: Count
    version: Version


class Fetch(_Control):
    """Asks for what is newer than `have_version` (-1: nothing held)."""

    fragment: Count
    have_version: int


# Broker to learner.


class Welcome(_Control):
    """Admits a learner and tells it everything that the group shares."""

    run_id: Text
    epoch: Epoch
    role: Role
    settings: RunSettings
    uplink_port: int
    downlink_port: int
    fragments: tuple[FragmentHead, ...]
    rounds: tuple[OpenRound, ...]
    phase: Phase
    run_tokens: Count
    tokens_per_s: Seconds
    step: Count
    """Inner step at which this learner starts counting (modes streaming and diloco)."""


class Beat(_Control):
    """The broker's state, told on change and every second; losing one loses nothing."""

    epoch: Epoch
    phase: Phase
    versions: tuple[Version, ...]
    rounds: tuple[OpenRound, ...]
    run_tokens: Count
    tokens_per_s: Seconds
    received: Positions
    """Stream position received, per uplink stream of the addressee."""


class Refuse(_Control):
    """A refusal: of the session (push_id 0), or of one push."""

    code: Text
    message: Text
    expected: Text = ""
    got: Text = ""
    remedy: Text = ""
    fragment: int = -1
    push_id: Count = 0


class Probe(_Control):
    """Are you alive? Sent when a newcomer claims the name."""

    nonce: Count


# Both ways.


class DataKind(IntEnum):
    """What a data message carries."""

    PUSH = 1
    """Up: an outer gradient against `version`."""
    FOUND = 2
    """Up: parameters that become version 0."""
    PUBLICATION = 3
    """Down: the step from version - 1 to `version`."""
    STATE = 4
    """Down: the whole published copy at `version`, lossless."""


class Missing(_Control):
    """Asks for element ranges of a transfer that have not arrived."""

    kind: DataKind
    fragment: Count
    version: Version
    push_id: Count
    """The push, 0 on the downlink."""
    ranges: Ranges
    """(offset, count) in elements."""


class Alive(_Control):
    """Answers a Probe."""

    nonce: Count


class Bye(_Control):
    """An orderly end of the session."""

    reason: Text


# For operators.


class AskStatus(_Control):
    """Asks for a Status; needs no session."""


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


class Status(_Control):
    """The run as the broker sees it."""

    run_id: Text
    epoch: Epoch
    phase: Phase
    mode: Mode
    uptime_s: float
    versions: tuple[Version, ...]
    rounds: tuple[OpenRound, ...]
    run_tokens: Count
    goal_tokens: int
    tokens_per_s: Seconds
    merges: int
    contributions_merged: int
    contributions_refused: dict[str, int]
    mean_contributors_per_merge: float
    longest_merge_gap_s: float
    norms_clipped: int
    up_bytes: int
    down_bytes: int
    checkpoint_version: int
    """Sum of the versions in the newest durable checkpoint, -1: none yet."""
    waiting_for: str
    """What holds the run up now, "" if nothing does."""
    learners: tuple[LearnerStatus, ...]


ControlMessage: TypeAlias = (
    Hello | Report | Push | Decline | Adopted | Fetch | Welcome | Beat | Refuse | Probe
    | Missing | Alive | Bye | AskStatus | Status
)


class Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a data message, a msgpack array in this order."""

    protocol: int
    run_id: Text
    epoch: Epoch
    kind: DataKind
    learner: Text
    incarnation: Text
    """The learner's, on the uplink and on the downlink."""
    fragment: Count
    version: Version
    """PUSH: base version. FOUND: 0. PUBLICATION, STATE: the version that results."""
    push_id: Count
    """PUSH: its id. PUBLICATION, STATE: the addressee's last merged push of the fragment."""
    offset: Elements
    """First element of this chunk within the fragment."""
    count: Elements
    """Elements in this chunk."""
    codec: Text
    payload_digest: int
    """xxh3_64 of the payload frame."""
    result_digest: int
    """PUBLICATION, STATE: xxh3_64 of the published copy at `version`; else 0."""
    stream: int
    position: Count
    """Payload bytes sent on this stream so far, this message included."""
