"""Everything that travels, as types with bounds: ten control messages, the data header, settings.

PROTOCOL.md is the specification and this file is its Python form. Bounds stand in the types, so
the decoder checks every field before any other code sees it. A message beyond a bound is refused
whole, never cut: a bound protects the memory and the time of the receiver.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct

PROTOCOL: Final = 1
"""Version of the wire format; peers must agree exactly."""

CONTROL_BYTES_MAX: Final = 4 << 20
"""Bytes of a control message to a learner. The largest is a Status or a refusal with a layout."""

CONTROL_UP_BYTES_MAX: Final = 128 << 10
"""Bytes of a control message to the broker. The largest is the Hello of 4,096 fragments."""

HEADER_BYTES_MAX: Final = 128 << 10
"""Bytes of a data header: 1,024 contributors of a publication, of about 100 bytes each."""

CHUNK_ELEMENTS_MAX: Final = 1 << 20
"""Elements of a chunk: 4 MiB as float32. More would hold up what waits behind it."""

PAYLOAD_BYTES_MAX: Final = CHUNK_ELEMENTS_MAX * 4 + (1 << 16)
"""Bytes of a payload: one float32 per element, and room for scales and frames."""

LEARNERS_MAX: Final = 1024
FRAGMENTS_MAX: Final = 4096
TENSORS_MAX: Final = 30_000
DIMENSIONS_MAX: Final = 8
STREAMS_MAX: Final = 64
RANGES_MAX: Final = 256
TEXT_CHARACTERS_MAX: Final = 1024
TENSOR_NAME_CHARACTERS_MAX: Final = 512

ELEMENTS_MAX: Final = 1 << 48
"""Elements of a model, so that no sum of sizes can wrap."""

TOKENS_MAX: Final = 1 << 62
PUSH_TOKENS_MAX: Final = 1 << 40
"""Tokens or steps of one push; the sum of four million such pushes is within TOKENS_MAX."""

VERSION_MAX: Final = 1 << 53
PUBLICATIONS_KEPT: Final = 8
"""Publications of a fragment that the broker keeps; a learner further behind fetches the state."""

NAME_PATTERN: Final = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,47}(/[A-Za-z0-9._-]{1,15})?\Z"
"""Names: a site, or a site and one of its learners (`site-a`, `site-a/0`). Safe in logs."""

INCARNATION_PATTERN: Final = NAME_PATTERN[:-2] + r"\.[0-9a-f]{8}\Z"
"""An incarnation is a name, a dot and eight hex digits, drawn at each start of a process."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
FragmentIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]
VersionNumber: TypeAlias = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
VersionOrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=VERSION_MAX)]
"""A version that a learner has; -1: none yet."""
PushId: TypeAlias = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
"""Counts the pushes of an incarnation from 1; 0: none."""
PushTokens: TypeAlias = Annotated[int, Meta(ge=0, le=PUSH_TOKENS_MAX)]
PushSteps: TypeAlias = Annotated[int, Meta(ge=1, le=PUSH_TOKENS_MAX)]
Chunk: TypeAlias = Annotated[int, Meta(ge=0, le=ELEMENTS_MAX)]
Digest: TypeAlias = Annotated[int, Meta(ge=0)]
"""xxh3_64; unsigned."""
Digests: TypeAlias = Annotated[tuple[Digest, ...], Meta(max_length=FRAGMENTS_MAX)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Bits per second; 0: no limit."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Name: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
Incarnation: TypeAlias = Annotated[str, Meta(pattern=INCARNATION_PATTERN)]
Fingerprint: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Epoch: TypeAlias = Annotated[str, Meta(pattern=r"\A([0-9]{1,15}-[0-9a-f]{8})?\Z")]
"""One life of the broker: "LIFE-NONCE", or "" for none. The nonce tells a life from one with the
same number that began on an older copy of the state directory."""
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
FragmentIndexes: TypeAlias = Annotated[tuple[FragmentIndex, ...], Meta(max_length=FRAGMENTS_MAX)]
VersionNumbers: TypeAlias = Annotated[tuple[VersionNumber, ...], Meta(max_length=FRAGMENTS_MAX)]
VersionsOrNone: TypeAlias = Annotated[tuple[VersionOrNone, ...], Meta(max_length=FRAGMENTS_MAX)]
Ranges: TypeAlias = Annotated[
    tuple[tuple[Chunk, Annotated[int, Meta(ge=1, le=ELEMENTS_MAX)]], ...],
    Meta(min_length=1, max_length=RANGES_MAX),
]
"""(first chunk, number of chunks), one or more."""

CodecName: TypeAlias = Literal["int4-zstd", "int8-zstd", "f32-blosc2"]
LOSSLESS: Final[CodecName] = "f32-blosc2"
"""Codec of states and of version 0: these are values and no differences, so no later push would
correct their error."""

MergeRule: TypeAlias = Literal["mean", "rda"]
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


class Mode(StrEnum):
    """How learners and broker keep step; the same code with other settings."""

    DECOUPLED = "decoupled"
    """Quorum and grace; no learner ever waits."""
    STREAMING = "streaming"
    """Every ready learner contributes to every round."""
    DILOCO = "diloco"
    """One fragment, every learner, plain mean; learners wait for the new version."""


class Phase(StrEnum):
    """Where the run stands."""

    SEEDING = "seeding"
    """Version 0 is not durable yet."""
    RUNNING = "running"
    ENDING = "ending"
    """The goal is reached: learners stop stepping, every fragment gets one last round."""
    ENDED = "ended"
    """The heads are final: learners adopt them and say Bye."""


class Role(StrEnum):
    """The first thing that a Welcome asks of a learner."""

    SEED = "seed"
    """Send the layout and your parameters: they become version 0."""
    WAIT = "wait"
    """Another learner sends version 0, or too few have joined; another Welcome follows."""
    ADOPT = "adopt"
    """Fetch and adopt what the Beat in this Welcome names."""


class DataKind(IntEnum):
    """The content of a data message. PUSH, SEED and LAYOUT go up, the others down."""

    PUSH = 0
    SEED = 1
    PUBLICATION = 2
    STATE = 3
    LAYOUT = 4


class LayoutEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One parameter tensor that travels. `rule` says how its outer gradients are merged."""

    name: Annotated[str, Meta(min_length=1, max_length=TENSOR_NAME_CHARACTERS_MAX)]
    shape: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=ELEMENTS_MAX)], ...], Meta(max_length=DIMENSIONS_MAX)
    ]
    dtype: DtypeName
    rule: MergeRule


class Layout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tensors that travel, in order. Travels as one LAYOUT message: zstd of its MessagePack."""

    frozen_digest: Digest
    """xxh3_64 over names and bytes of the parameters that do not travel; 0: there are none."""
    entries: Annotated[tuple[LayoutEntry, ...], Meta(min_length=1, max_length=TENSORS_MAX)]


class RunSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that the whole group shares. The broker holds them and tells them in Welcome."""

    mode: Mode = Mode.DECOUPLED
    fragments: Annotated[int, Meta(ge=1, le=FRAGMENTS_MAX)] = 4
    """P: fragments that the model is cut into."""
    sync_period_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """H: inner steps between two rounds of a fragment."""
    overlap_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 2
    """tau: inner steps that an exchange may take before anything waits for it."""
    keep: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    """Share of the steps made since the snapshot that an adoption keeps."""
    handover: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of Adam's first moments that an adoption replaces by the published movement."""
    push_codec: CodecName = "int4-zstd"
    push_rho: Annotated[float, Meta(ge=0.001, le=100.0)] = 0.5
    """Quantisation step of pushes in units of the tensor piece's rms."""
    chunk_elements: Annotated[int, Meta(ge=256, le=CHUNK_ELEMENTS_MAX)] = 1 << 18
    """Elements of a coded chunk (PUSH, PUBLICATION); a power of two, fixed for an epoch."""
    state_chunk_elements: Annotated[int, Meta(ge=256, le=CHUNK_ELEMENTS_MAX)] = 1 << 18
    """Elements of a lossless chunk (SEED, STATE); a power of two, fixed for an epoch."""
    streams: Annotated[int, Meta(ge=1, le=STREAMS_MAX)] = 4
    """Data connections of a learner in each direction. Chunk i travels on stream i mod streams."""
    window_messages: Annotated[int, Meta(ge=1, le=65536)] = 256
    """W: messages that a learner may have asked for and not received."""
    goal_tokens: Count = 0
    """Tokens after which the run ends; 0: never."""
    tokens_per_run_step: Count = 0
    """Tokens that make one step of the run's clock, which learning-rate schedules follow; 0: each
    learner takes those of one inner step of its own."""
    max_offline_s: Seconds = 3600.0
    """A learner that is cut off for longer pauses training until it is back; 0: it never pauses."""


class _Control(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of the control messages: MessagePack maps whose `type` names the message."""


class CopyDigest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Version and result digest of a published copy; in Hello, of the newest one at the learner."""

    version: VersionOrNone
    digest: Digest


# Learner to broker.


class Hello(_Control, frozen=True):
    """Asks to join, or to go on after a broken connection or a new life of the broker."""

    protocol: int
    name: Name
    incarnation: Incarnation
    run_id: Text
    """The run that the learner belongs to; "" before its first Welcome."""
    epoch: Epoch
    """The epoch that the learner followed last; "" before its first Welcome."""
    fingerprint: Fingerprint
    """Fingerprint of the layout and of the parameters that do not travel."""
    copies: Annotated[tuple[CopyDigest, ...], Meta(max_length=FRAGMENTS_MAX)]
    """Per fragment; empty before the first Welcome."""


class Report(_Control, frozen=True):
    """Progress: each second, at a boundary if one is due, and at once after a Welcome."""

    steps: Count
    """Inner steps of this incarnation."""
    tokens: Count
    """Tokens that this incarnation has logged."""
    loss: float | None
    bases: VersionsOrNone
    """Version that the parameters stand on, per fragment."""
    paused: Text | None = None
    """Reason why the learner makes no steps now, so that no round waits for it."""
    lost_tokens: Count = 0
    """Logged tokens whose work is in no version and never will be."""
    finished: FragmentIndexes = ()
    """In phase ENDING: fragments for which this learner has nothing more to push."""


class Push(_Control, frozen=True):
    """Announces a push whose chunks travel on the uplink; repeated after every Welcome, and every
    10 s without an outcome."""

    fragment: FragmentIndex
    push_id: Annotated[int, Meta(ge=1, le=VERSION_MAX)]
    base: VersionNumber
    """Version that the parameters stood on at the snapshot."""
    tokens: PushTokens
    """Tokens of this fragment that were unpushed at the snapshot."""
    steps: PushSteps
    loss: float | None = None
    """Mean training loss since the snapshot of this fragment before; None: none was logged."""


class AskStatus(_Control, frozen=True):
    """Asks for a Status; needs no Hello."""


# Broker to learner.


class Beat(_Control, frozen=True):
    """The broker's state: to everybody each second and at a new phase, to a learner at a new rate,
    to some when a round opens or closes. Losing one loses nothing."""

    epoch: Epoch
    phase: Phase
    heads: VersionNumbers
    """Newest durable version per fragment; empty before version 0."""
    collecting: FragmentIndexes
    """Fragments whose round is open."""
    period_s: Seconds
    """Seconds between two rounds of a fragment: H times the mean step time; 0: not known yet."""
    run_tokens: Count
    tokens_per_s: Rate
    up_bits_per_s: Rate
    """Rate that the addressee may send, with everything that crosses the line."""
    digests: Digests = ()
    """Digests of the published copies of `heads`, per fragment, once a second; else empty. They do
    not pass a relay, so they show what a relay has altered."""


class Welcome(_Control, frozen=True):
    """Admits a learner and tells it everything that the group shares."""

    run_id: Text
    role: Role
    settings: RunSettings
    uplink_port: Port
    downlink_port: Port
    go_back: FragmentIndexes
    """Fragments whose copy, as told in Hello, is not part of this broker's history: drop it and
    adopt the head."""
    beat: Beat


class Refuse(_Control, frozen=True):
    """Refuses the session (push_id 0), or one push."""

    code: Text
    message: Text
    expected: Text = ""
    got: Text = ""
    remedy: Text = ""
    fragment: FragmentIndex = 0
    push_id: PushId = 0
    layout: Annotated[bytes, Meta(max_length=1 << 21)] = b""
    """With `layout_differs`: the run's layout as it travels, so that the learner can name the
    difference; empty if it is larger than 2 MiB."""


class LearnerState(StrEnum):
    """The word for a learner in a Status. A newer broker may have others."""

    JOINING = "joining"
    """It fetches the model."""
    TRAINING = "training"
    PAUSED = "paused"
    """It makes no steps, and has said so."""
    STALLED = "no steps"
    """It is here and makes no steps, though it should."""
    SILENT = "silent"
    """Its connection stands, and nothing was heard for 3 s."""
    LOST = "lost"
    LEFT = "left"
    REVOKED = "key revoked"


class LearnerStatus(Struct, array_like=True, gc=False):
    """A learner as the broker sees it; tokens and steps are those of its newest incarnation."""

    incarnation: Text = ""
    state: Text = LearnerState.JOINING
    """A LearnerState."""
    reason: Text = ""
    """Why it pauses, in its own words."""
    since_s: Seconds = 0.0
    """How long it has been in this state."""
    paused_s: Seconds | None = None
    """Since it said that it pauses; None: it does not."""
    heard_s: Seconds = 0.0
    """Since its last message."""
    stepped_s: Seconds = 0.0
    """Since it last told of a new step."""
    merged_s: Seconds | None = None
    """Since a push of it was merged; None: never in this life of the broker."""
    taken_s: Seconds = 0.0
    """Since it took a version, while there is one that it has not; 0: it has all."""
    no_data_s: Seconds = 0.0
    """For how long a push that it has announced has brought no data; 0: none is on its way."""
    no_version_s: Seconds = 0.0
    """For how long it has taken no version, though it should have; 0: it has, or nobody knows."""
    steps: Count = 0
    steps_per_s: Rate = 0.0
    loss: float | None = None
    """Newest training loss."""
    logged_tokens: Count = 0
    """Tokens that it has trained on."""
    merged_tokens: Count = 0
    """Those of them that are in the model."""
    lost_tokens: Count = 0
    """Those of them that never will be."""
    contributions: Count = 0
    versions_behind: Count = 0
    """Versions of the fragment that it lacks most of, as of its newest Report."""
    up_bits_per_s: Rate = 0.0
    """Measured, payloads of its pushes."""
    down_bits_per_s: Rate = 0.0
    """Measured, payloads for it."""
    up_bits_per_s_granted: Rate = 0.0
    """That it may send; 0: no limit."""
    up_bytes: Count = 0
    down_bytes: Count = 0
    hint: Text = ""
    """Where to look, if its line seems closed one way; "": it does not."""


class FragmentStatus(Struct, frozen=True, array_like=True):
    """A fragment, and the round that is under way for it."""

    elements: Count = 0
    version: VersionOrNone = -1
    version_s: Seconds = 0.0
    """Since that version became durable, or the broker started."""
    stage: Text = "idle"
    """"idle", "collecting", "merging" or "committing"."""
    stage_s: Seconds = 0.0
    """In this stage; 0: idle."""
    pushes: Count = 0
    """Pushes that wait, or that the round holds."""


class RefusalStatus(Struct, frozen=True, array_like=True):
    """Refusals of one peer with one code."""

    learner: Text = ""
    """Its name; "": a connection without one."""
    code: Text = ""
    text: Text = ""
    """The newest one, in words."""
    ago_s: Seconds = 0.0
    """Since the newest one."""
    times: Count = 0


class MergeStatus(Struct, frozen=True):
    """A merged round."""

    fragment: FragmentIndex = 0
    version: VersionNumber = 0
    ago_s: Seconds = 0.0
    reason: Text = ""
    """Why it was merged then: "everybody", "window" or "last"."""
    contributors: tuple[Text, ...] = ()


class QuorumStatus(Struct, frozen=True):
    """The learners that rounds need, and those that are here."""

    needed: Count = 0
    """Learners that a merge waits for; 0: all that train."""
    at_start: Count = 0
    """Learners with which the run begins."""
    here: Count = 0
    """Connected and heard."""
    ready: Count = 0
    """Those of them that have the model."""
    training: Count = 0
    """Those of them that make steps: rounds wait for them."""
    idle_s: Seconds = 0.0
    """For how long nobody has trained."""
    short_s: Seconds = 0.0
    """For how long fewer than `needed` have trained."""


class LineStatus(Struct, frozen=True):
    """The broker's line: limits in bit/s, 0 for none; and what crosses it, headers included."""

    up_limit: Rate = 0.0
    """For each learner."""
    down_limit: Rate = 0.0
    total_up_limit: Rate = 0.0
    total_down_limit: Rate = 0.0
    up_bits_per_s: Rate = 0.0
    """Measured, of all learners."""
    down_bits_per_s: Rate = 0.0
    up_bytes: Count = 0
    """Since the broker's start."""
    down_bytes: Count = 0
    up_full_s: Seconds = 0.0
    """For how long the limits have been used up."""
    down_full_s: Seconds = 0.0


class DiskStatus(Struct, frozen=True):
    """The state directory."""

    free_bytes: Count | None = None
    """None: not known."""
    journal_bytes: Count = 0
    commit_p50_ms: float = 0.0
    """Among the last 256 commits."""
    commit_p99_ms: float = 0.0
    versions_since_snapshot: Count = 0
    """For one fragment, at most: a start merges them again."""
    error: Text = ""
    """Why the disk refuses the version that is to be written now; "": it does not."""
    error_s: Seconds = 0.0
    """For how long it has done so."""
    snapshot_error: Text = ""
    """The same of snapshots: without them the next start takes longer, and no payload goes."""
    snapshot_error_s: Seconds = 0.0


class ProcessStatus(Struct, frozen=True):
    """The broker's process."""

    rss_bytes: Count = 0
    cpu_s: float = 0.0
    open_files: Count = 0
    workers: Count = 0
    """Threads that decode, merge and write."""
    queue: Count = 0
    """Pieces of work that wait for one, or have one."""
    busy_s: Seconds = 0.0
    """For how long there has always been one."""


class SettingsStatus(Struct, frozen=True):
    """The settings that explain what is seen; RunSettings and `narrows broker --help` say more."""

    mode: Text = ""
    fragments: Count = 0
    sync_period_steps: Count = 0
    overlap_steps: Count = 0
    keep: float = 0.0
    push_codec: Text = ""
    push_rho: float = 0.0
    publish_codec: Text = ""
    streams: Count = 0


class Status(_Control, frozen=True, forbid_unknown_fields=False):
    """The run as the broker sees it, for people, pages and programs. A reader skips a field that it
    does not know, and has the default of one that an older broker does not tell."""

    narrows: Text = ""
    """Version of the broker's program."""
    run_id: Text = ""
    epoch: Text = ""
    phase: Text = ""
    stopping: Text = ""
    """Why the process stops; "": it serves."""
    uplink_port: Count = 0
    downlink_port: Count = 0
    uptime_s: Seconds = 0.0
    run_tokens: Count = 0
    goal_tokens: Count = 0
    """0: none."""
    tokens_per_s: Rate = 0.0
    left_s: Seconds | None = None
    """Until the goal at this speed; None: no goal, or no speed."""
    period_s: Seconds = 0.0
    sync_s: Seconds = 0.0
    """Mean seconds from due to durable."""
    merges: Count = 0
    """Since the broker's start."""
    contributions: Count = 0
    waiting_for: tuple[Text, ...] = ()
    """In words, for people."""
    awaited: tuple[Text, ...] = ()
    """Learners that the end of the run waits for."""
    last_merge: MergeStatus | None = None
    quorum: QuorumStatus = QuorumStatus()
    settings: SettingsStatus = SettingsStatus()
    line: LineStatus = LineStatus()
    disk: DiskStatus = DiskStatus()
    process: ProcessStatus = ProcessStatus()
    refused: tuple[RefusalStatus, ...] = ()
    """In the last ten minutes, the newest last."""
    refusals: dict[str, Count] = {}
    """Code -> number since the broker's start."""
    fragments: tuple[FragmentStatus, ...] = ()
    """By index."""
    learners: dict[str, LearnerStatus] = {}
    """By name: all that this life of the broker has met."""


# Both ways.


class Fetch(_Control, frozen=True):
    """Asks for chunks: a learner for PUBLICATION or STATE, the broker for PUSH, SEED or LAYOUT."""

    kind: DataKind
    fragment: FragmentIndex
    version: VersionNumber
    """0 for PUSH, SEED and LAYOUT."""
    push_id: PushId
    """The push, else 0."""
    chunks: Ranges


class Bye(_Control, frozen=True):
    """An orderly end of the session; from the broker also: say Hello, this life has not met you."""

    reason: Text


ControlMessage: TypeAlias = (
    Hello | Report | Push | AskStatus | Beat | Welcome | Refuse | Status | Fetch | Bye
)


class Contributor(NamedTuple):
    """A push that a publication holds."""

    incarnation: str
    push_id: int


class Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a data message: a MessagePack array of eleven fields."""

    epoch: Epoch
    kind: DataKind
    incarnation: Annotated[str, Meta(pattern=rf"\A\Z|{INCARNATION_PATTERN}")]
    """Up: the sender's. Down: the one of the learner that asked; "" on the shared topic."""
    fragment: FragmentIndex
    version: VersionNumber
    """The version that the transfer makes; the base of a PUSH."""
    push_id: PushId
    """Number of a PUSH; in a STATE the newest push of the asker that it holds, or 0."""
    chunk: Chunk
    codec: CodecName
    payload_digest: Digest
    """xxh3_64 of the payload."""
    result_digest: Digest
    """Digest of the whole published copy once the transfer is applied; 0 on the uplink."""
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=LEARNERS_MAX)] = ()
    """The pushes that a PUBLICATION holds; in its chunk 0 only."""
