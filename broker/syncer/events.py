"""Events that go into the syncer, and effects that come out of it. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from narrows.broker.config import BrokerConfig, WanSection
from narrows.broker.merging import Contribution
from narrows.proto.key_holder import KeyHolder
from narrows.proto.machine_events import DeadlineReached as DeadlineReached
from narrows.proto.machine_events import Drop as Drop
from narrows.proto.machine_events import Note as Note
from narrows.proto.messages import ControlMessage, DataKind, Header, LayoutEntry, RunSettings

Peer: TypeAlias = bytes
"""Routing id of a control connection."""

# Events.


@dataclass(frozen=True)
class Received:
    """A control message from `peer`, which connected from `address`."""

    peer: Peer
    message: ControlMessage
    address: str = ""
    holder: KeyHolder | None = None
    """Holder of the connection's key; None: the broker has no keys."""
    sent: tuple[int, ...] = ()
    """Where the streams to the learner stand that speaks on this connection."""


@dataclass(frozen=True)
class PeerLost:
    """The control connection is gone."""

    peer: Peer


@dataclass(frozen=True)
class ChunkArrived:
    """The header of a data message; `handle` names the payload that the shell holds."""

    header: Header
    handle: int
    size_bytes: int = 0
    """Bytes of its frames; the header says nothing of what has really come."""


@dataclass(frozen=True)
class ChunkUnpacked:
    """The payload of an accepted chunk is checked and decoded."""

    header: Header
    handle: int


@dataclass(frozen=True)
class ChunkDamaged:
    """The payload of a chunk does not decode: `code` and `reason` go to its sender."""

    header: Header
    handle: int
    code: str
    reason: str


@dataclass(frozen=True)
class Founded:
    """Version 0 stands in memory; digests of the published copies by fragment."""

    digests: tuple[int, ...]


@dataclass(frozen=True)
class FoundingFailed:
    """Version 0 cannot be made from what is there (non-finite values, another shape)."""

    reason: str


@dataclass(frozen=True)
class Merged:
    """A merge is done and durable: `version` exists, its publication is encoded."""

    fragment: int
    version: int
    digest: int
    clipped: int
    suspects: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a contributor may poison the model, by name."""
    forgiven: frozenset[str] = frozenset()
    """Contributors that are no suspects, whatever they were before."""


@dataclass(frozen=True)
class MergeFailed:
    """A merge would have made the parameters non-finite; nothing was changed."""

    fragment: int
    reason: str


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is durable; `version_sum` is the sum of the fragment versions in it."""

    version_sum: int


@dataclass(frozen=True)
class CheckpointFailed:
    """The disk did not take a checkpoint."""

    reason: str


@dataclass(frozen=True)
class JournalFailed:
    """Merged rounds cannot be made durable; it is tried again and again."""

    reason: str


@dataclass(frozen=True)
class JournalGap:
    """A round exists that the journal did not take."""

    reason: str


@dataclass(frozen=True)
class JournalWorks:
    """Merged rounds can be made durable again."""


@dataclass(frozen=True)
class ConfigRead:
    """The operator had the configuration read again."""

    config: BrokerConfig


@dataclass(frozen=True)
class StopRequested:
    """The operator wants the broker to end (SIGTERM)."""

    reason: str


Event: TypeAlias = (
    Received
    | PeerLost
    | ChunkArrived
    | ChunkUnpacked
    | ChunkDamaged
    | Founded
    | FoundingFailed
    | Merged
    | MergeFailed
    | CheckpointWritten
    | CheckpointFailed
    | JournalFailed
    | JournalGap
    | JournalWorks
    | ConfigRead
    | StopRequested
    | DeadlineReached
)

# Effects, in the order in which they must happen.


@dataclass(frozen=True)
class Send:
    """Send a control message on a connection."""

    peer: Peer
    message: ControlMessage


@dataclass(frozen=True)
class Unpack:
    """Check and decode the payload of `handle`; answer with ChunkUnpacked or ChunkDamaged."""

    header: Header
    handle: int


@dataclass(frozen=True)
class Found:
    """Make version 0: from the payloads by fragment, or (None) from the initial file."""

    layout: tuple[LayoutEntry, ...]
    handles: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class StartMerge:
    """Merge into `fragment`, making `version`. Contributions are in learner-name order."""

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    reason: str
    organisations: int = 1
    """Organisations of the run's learners; merge.weights = "auto" follows it."""


@dataclass(frozen=True)
class Publish:
    """Send the newest publication of `fragment` to a learner, or one that was kept before."""

    learner: str
    fragment: int
    version: int
    push_id: int
    """Last merged push of the learner in this fragment; 0: none."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Only these elements (repair); empty: all."""
    kind: DataKind = DataKind.PUBLICATION


@dataclass(frozen=True)
class Admit:
    """A learner has this incarnation now: make its outbox, forget the one before."""

    learner: str
    incarnation: str


@dataclass(frozen=True)
class Acknowledge:
    """The learner has received these stream positions."""

    learner: str
    positions: tuple[int, ...]


@dataclass(frozen=True)
class RatesChanged:
    """From now on these are the downlink's rates, and the settings that the group shares."""

    wan: WanSection
    settings: RunSettings


@dataclass(frozen=True)
class Forget:
    """A learner is gone: nothing more is sent to it."""

    learner: str


@dataclass(frozen=True)
class Erase:
    """A name is forgotten: whoever comes with it is new."""

    learner: str


@dataclass(frozen=True)
class LogFate:
    """Fate of a learner or of a push, for the journal."""

    what: Literal["joined", "left", "forgotten", "refused", "expired"]
    learner: str
    incarnation: str
    fragment: int = -1
    push_id: int = 0
    reason: str = ""


@dataclass(frozen=True)
class WriteCheckpoint:
    """Write a checkpoint; answer with CheckpointWritten or CheckpointFailed."""


@dataclass(frozen=True)
class Finish:
    """The process may exit: everything is durable, and the learners have heard of it."""

    reason: str


Effect: TypeAlias = (
    Send
    | Unpack
    | Drop
    | Found
    | StartMerge
    | Publish
    | Admit
    | Acknowledge
    | RatesChanged
    | Forget
    | Erase
    | LogFate
    | WriteCheckpoint
    | Finish
    | Note
)
