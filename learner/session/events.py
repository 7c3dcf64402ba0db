"""What goes into a learner's session (events) and what comes out of it (effects). [pure]"""

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
    message: ControlMessage


@dataclass(frozen=True)
class Connected:
    """There is a new connection for control messages; what was sent before may be lost."""


@dataclass(frozen=True)
class ChunkDecoded:
    """A data message whose payload is checked and decoded; `handle` names the content."""

    header: Header
    handle: int


@dataclass(frozen=True)
class Applied:
    """A publication or state is applied: the published copy now is `version`."""

    fragment: int
    version: int
    digest: int


@dataclass(frozen=True)
class ApplyFailed:
    """The published copy is unchanged: the next one would not have the digest that the broker told,
    or, with a `reason`, it could not be made here."""

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
    """A copy was not made, or only half of it; of version 0 also when it cannot be encoded.

    Between the effect and this event nobody may stand at a boundary.
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
    """Tokens whose step never happened."""

    tokens: int


@dataclass(frozen=True)
class BoundaryReached:
    """The parameters may be read and written, no step was made (joining, waiting, ending)."""


@dataclass(frozen=True)
class Paused:
    reason: str


@dataclass(frozen=True)
class Continued:
    pass


@dataclass(frozen=True)
class LoopEnded:
    """The training loop is over: answer what is in flight, then leave; after `within_s` anyway."""

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
    message: ControlMessage


@dataclass(frozen=True)
class Redial:
    """Give up all connections, which may only look alive; dial the control port anew."""


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
    """Send the parameters of these fragments as version 0; `ranges` empty: all elements."""

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


@dataclass(frozen=True)
class Install:
    """The applied result becomes the published copy of this host."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Adopt:
    """Training thread, now: parameters of the fragment := the published copy."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Snapshot:
    """Training thread, now: copy the fragment to the host; then encode and push it."""

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
    """The push is over: stop sending it. `merged` decides which residual stays."""

    push_id: int
    merged: bool


@dataclass(frozen=True)
class Acknowledge:
    """The broker has received these uplink stream positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class SetRate:
    """What is sent from now on stays below this rate; 0: no limit."""

    bits_per_s: float


@dataclass(frozen=True)
class Fail:
    """The session is refused for good: raise this in the training thread."""

    error: NarrowsError


@dataclass(frozen=True)
class Left:
    """Bye is sent: the sockets may close."""


Copy: TypeAlias = Adopt | Snapshot | SendFounding
"""What only the training thread may do: its parameters are read or written."""

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
