"""Names the events that a learner's session takes and the effects that it asks for. [pure]

An effect is performed by the shell, in the order in which the session returned them. The shell
answers some effects with an event: Apply with Applied or ApplyFailed, a Copy only if it failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from narrows.proto.errors import NarrowsError
from narrows.proto.fragments import Fragment
from narrows.proto.machine_events import DeadlineReached as DeadlineReached
from narrows.proto.machine_events import Drop as Drop
from narrows.proto.machine_events import Note as Note
from narrows.proto.messages import ControlMessage, DataKind, Epoch, Header, RunSettings

# Events from the network and the workers.


@dataclass(frozen=True)
class Received:
    """A control message of the broker; it is decoded, and not yet believed."""

    message: ControlMessage


@dataclass(frozen=True)
class Connected:
    """There is a new control connection; messages sent on the old one may be lost."""


@dataclass(frozen=True)
class ChunkDecoded:
    """A data message whose payload is checked and decoded; the shell keeps it as `handle`."""

    header: Header
    handle: int


@dataclass(frozen=True)
class Applied:
    """A publication or state is applied: the next published copy is ready to be installed."""

    fragment: int
    version: int
    digest: int


@dataclass(frozen=True)
class ApplyFailed:
    """The published copy is unchanged.

    Without a `reason` the next one has not the broker's digest; with one it could not be made here.
    """

    fragment: int
    version: int
    digest: int
    reason: str = ""


@dataclass(frozen=True)
class EncodeFailed:
    """A snapshot cannot be sent, for example because it is not finite."""

    push_id: int
    reason: str


@dataclass(frozen=True)
class CopyFailed:
    """A copy was not made, or only half of it; also: version 0 cannot be encoded.

    Between the effect and this event no boundary may be reported, as that would say that all copies
    are made.
    """

    copy: Copy
    reason: str


# Events from the training thread.


@dataclass(frozen=True)
class StepTaken:
    """An inner step is complete; `at_boundary`: the parameters may be touched now."""

    tokens: int
    loss: float | None = None
    at_boundary: bool = True


@dataclass(frozen=True)
class StepSkipped:
    """Tokens were logged, and the step that should have learned from them never happened."""

    tokens: int


@dataclass(frozen=True)
class BoundaryReached:
    """The parameters may be touched although no step was made: joining, waiting or ending."""


@dataclass(frozen=True)
class Paused:
    """No boundary will come for a while; the broker is told the reason."""

    reason: str


@dataclass(frozen=True)
class Continued:
    """Boundaries come again after a pause."""


@dataclass(frozen=True)
class LoopEnded:
    """The training loop is over: leave once nothing is open, after `within_s` seconds anyway."""

    within_s: float = math.inf


Event: TypeAlias = (
    Received
    | Connected
    | ChunkDecoded
    | Applied
    | ApplyFailed
    | EncodeFailed
    | CopyFailed
    | StepTaken
    | StepSkipped
    | BoundaryReached
    | Paused
    | Continued
    | LoopEnded
    | DeadlineReached
)

# Effects.


@dataclass(frozen=True)
class Send:
    """Send this control message; a lost one is repeated by the session."""

    message: ControlMessage


@dataclass(frozen=True)
class Redial:
    """Give up all connections, since they may only look alive; dial the control port anew."""


@dataclass(frozen=True)
class OpenStreams:
    """Connect the data sockets; the fragment table is fixed from now on."""

    settings: RunSettings
    table: tuple[Fragment, ...]
    uplink_port: int
    downlink_port: int


@dataclass(frozen=True)
class Identify:
    """Data headers carry this run id and epoch from now on."""

    run_id: str
    epoch: Epoch


@dataclass(frozen=True)
class SendFounding:
    """Training thread, now: read a fragment as version 0, to be sent; `ranges` empty: all of it."""

    fragment: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Apply:
    """Make `version` of the published copy from these chunks, off the training thread."""

    fragment: int
    version: int
    kind: DataKind
    handles: tuple[int, ...]
    digest: int
    """The broker's digest; a result with another one is no version."""


@dataclass(frozen=True)
class Install:
    """The result that was applied last becomes the published copy of this host."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Adopt:
    """Training thread, now: the parameters of the fragment take the published copy."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Snapshot:
    """Training thread, now: copy the fragment, to be encoded and pushed."""

    fragment: int
    base_version: int
    push_id: int


@dataclass(frozen=True)
class Resend:
    """Send these ranges of a push again."""

    push_id: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SettlePush:
    """The push is over: stop sending it. Its residual stays if it was `merged`, else the one from
    before."""

    push_id: int
    merged: bool


@dataclass(frozen=True)
class Acknowledge:
    """The broker has received the uplink streams up to these positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class SetRate:
    """Send no faster than this from now on; 0: no limit."""

    bits_per_s: float


@dataclass(frozen=True)
class Fail:
    """The session is refused for good: raise this in the training thread."""

    error: NarrowsError


@dataclass(frozen=True)
class Left:
    """The session is over: the sockets may close."""


Copy: TypeAlias = Adopt | Snapshot | SendFounding
"""Effects that only the training thread performs, since they read or write the parameters."""

Effect: TypeAlias = (
    Send
    | Redial
    | OpenStreams
    | Identify
    | SendFounding
    | Apply
    | Install
    | Drop
    | Adopt
    | Snapshot
    | Resend
    | SettlePush
    | Acknowledge
    | SetRate
    | Fail
    | Left
    | Note
)
