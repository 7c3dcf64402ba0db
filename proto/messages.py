"""Every control message as a frozen struct; the header of a data message stands beside it.

PROTOCOL.md is the specification; this file is its Python form and changes with it.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from narrows.proto.header import Header
from narrows.proto.terms import (
    Codecs,
    Count,
    DataKind,
    DtypeName,
    Elements,
    Epoch,
    Fingerprint,
    FragmentHead,
    Heads,
    LayoutEntries,
    LayoutEntry,
    LearnerStatus,
    LearnerStatuses,
    MergeRule,
    Mode,
    OpenRound,
    OpenRounds,
    PartCount,
    PartIndex,
    Phase,
    Port,
    Positions,
    Proof,
    PublicKey,
    PushId,
    PushTokens,
    Ranges,
    Rate,
    Role,
    RunSettings,
    Seconds,
    Text,
    TokenLedger,
    Version,
    Versions,
)  # fmt: skip

__all__ = [
    "Adopted", "Alive", "AskLayout", "AskStatus", "Beat", "Bye", "ControlMessage", "Count",
    "DataKind", "Decline", "DtypeName", "Elements", "Enrol", "Enrolled", "Epoch", "Fetch",
    "FragmentHead", "Header", "Hello", "LayoutEntry", "LayoutPart", "LearnerStatus",
    "MergeRule", "Missing", "Mode", "OpenRound", "Phase", "Positions", "Probe", "Progress",
    "Push", "Ranges", "Refuse", "Report", "Role", "RunSettings", "Seconds", "Status", "Text",
    "TokenLedger", "Version", "Welcome",
]  # fmt: skip


class _Control(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of the control messages.

    Unknown fields are refused: peers have the same version, so such a field is an error.
    """


# Learner to broker.


class Hello(_Control, frozen=True):
    """Asks to join, or to rejoin after a broken connection or a broker restart."""

    protocol: int
    name: Text
    incarnation: Text
    """32 hex digits, fresh per process start."""
    run_id: Text
    """The run this learner belongs to, "" on its first Hello."""
    epoch: Epoch
    """The epoch that the learner followed last, (0, 0, 0) on its first Hello."""
    fingerprint: Fingerprint
    """The layout and the parameters that do not travel, in 16 bytes."""
    codecs: Codecs
    step: Count
    tokens: Count
    versions: Versions
    """Newest version held per fragment, empty before the first."""
    epoch_proof: Proof = ""
    """As told with `epoch` in Welcome, "" on its first Hello."""


class Report(_Control, frozen=True):
    """Progress of a learner; sent per inner step, but at most a few times a second."""

    step: Count
    """Inner steps of this incarnation."""
    tokens: Count
    """Tokens of this incarnation, cumulative."""
    step_s: Seconds
    """Smoothed seconds per inner step, 0 before the second step."""
    loss: float | None
    received: Positions
    """Stream position received, per downlink stream: the credit of the broker."""
    ledger: TokenLedger
    up_bits_per_s: Rate
    """The uplink rate that the learner keeps to: the last one that it was told."""


class Push(_Control, frozen=True):
    """Announces a contribution whose chunks travel on the uplink."""

    fragment: Count
    base_version: Version
    attempt: Count
    push_id: PushId
    """Counts the pushes of this incarnation from 1."""
    elements: Elements
    tokens: PushTokens
    """Tokens since the base was adopted (c_tokens)."""
    steps: PushTokens
    """Inner steps since the base was adopted (c_steps)."""


class Decline(_Control, frozen=True):
    """Says that no contribution to this round will come, so that nobody waits for it."""

    fragment: Count
    base_version: Version
    attempt: Count
    reason: Text


class Adopted(_Control, frozen=True):
    """Says that the learner's parameters hold this version now."""

    fragment: Count
    version: Version


class Fetch(_Control, frozen=True):
    """Asks for the versions after `have_version` (-1: none is held)."""

    fragment: Count
    have_version: int


class Enrol(_Control, frozen=True):
    """Hands over a public key: of a site that accepts an invitation, or the successor of one's own.

    The connection's own key says for which name.
    """

    protocol: int
    public_key: PublicKey


# Broker to learner.


class Enrolled(_Control, frozen=True):
    """Says that the key of an Enrol speaks for this name from now on."""

    name: Text


class Welcome(_Control, frozen=True):
    """Admits a learner and tells it everything that the group shares."""

    run_id: Text
    epoch: Epoch
    role: Role
    settings: RunSettings
    uplink_port: Port
    downlink_port: Port
    fragments: Heads
    rounds: OpenRounds
    phase: Phase
    run_tokens: Count
    tokens_per_s: Rate
    step: Count
    """Inner step at which this learner starts counting (modes streaming and diloco)."""
    up_bits_per_s: Rate
    """Rate that the addressee may use, with everything that crosses the line; 0: no limit."""
    epoch_proof: Proof = ""
    """Shows in a later Hello that the learner has met this epoch."""


class Beat(_Control, frozen=True):
    """The broker's state, on change and every second; losing one loses nothing."""

    epoch: Epoch
    phase: Phase
    versions: Versions
    rounds: OpenRounds
    run_tokens: Count
    tokens_per_s: Rate
    received: Positions
    """Stream position received, per uplink stream of the addressee."""
    up_bits_per_s: Rate
    """As in Welcome. It changes often, since a learner without work lends its share."""


class Progress(_Control, frozen=True):
    """Uplink positions while data comes, between two Beats: a sender must not run out of credit."""

    received: Positions


class Refuse(_Control, frozen=True):
    """A refusal: of the session (push_id 0), or of one push."""

    code: Text
    message: Text
    expected: Text = ""
    got: Text = ""
    remedy: Text = ""
    fragment: int = -1
    push_id: Count = 0


class Probe(_Control, frozen=True):
    """Asks the holder of a name for a sign of life; sent when a newcomer claims the name."""

    nonce: Count


class Missing(_Control, frozen=True):
    """Asks for element ranges of a transfer that have not arrived."""

    kind: DataKind
    fragment: Count
    version: Version
    push_id: Count
    """The push, 0 on the downlink."""
    ranges: Ranges
    """(offset, count) in elements."""


class AskLayout(_Control, frozen=True):
    """Asks for the parts of a layout: the broker its founder, a learner of another layout the
    broker."""

    first: PartIndex
    """The first part that is missing."""


class LayoutPart(_Control, frozen=True):
    """Some tensors of a layout, in its order."""

    index: PartIndex
    count: PartCount
    """Parts of the layout."""
    frozen_digest: int
    """xxh3_64 over names and bytes of the parameters that do not travel; 0: none."""
    entries: LayoutEntries


class Alive(_Control, frozen=True):
    """Answers a Probe."""

    nonce: Count


class Bye(_Control, frozen=True):
    """An orderly end of the session."""

    reason: Text


class AskStatus(_Control, frozen=True):
    """Asks for a Status; needs no session."""


class Status(_Control, frozen=True):
    """The run as the broker sees it."""

    run_id: Text
    epoch: Epoch
    phase: Phase
    mode: Mode
    uptime_s: float
    versions: Versions
    rounds: OpenRounds
    run_tokens: Count
    goal_tokens: int
    tokens_per_s: Rate
    merges: Count
    contributions_merged: Count
    contributions_refused: dict[str, int]
    mean_contributors_per_merge: float
    longest_merge_gap_s: float
    norms_clipped: int
    up_bytes: int
    down_bytes: int
    checkpoint_version: int
    """Sum of the versions in the newest durable checkpoint, -1: none yet."""
    waiting_for: str
    """The phrase that says what holds the run up now; "" if nothing does."""
    learners: LearnerStatuses


ControlMessage: TypeAlias = (
    Hello
    | Report
    | Push
    | Decline
    | Adopted
    | Fetch
    | Enrol
    | Enrolled
    | Welcome
    | Beat
    | Progress
    | Refuse
    | Probe
    | Missing
    | AskLayout
    | LayoutPart
    | Alive
    | Bye
    | AskStatus
    | Status
)
