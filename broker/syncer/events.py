"""The syncer's way in and out: what the host tells it, and what it asks the host to do.

Events are methods of `Syncer`; effects are the tuples here. After every call the host empties
`syncer.effects` and performs them in order. The machine's state is ahead of its effects when they
are performed, so an effect carries all that it needs and the host never looks back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from narrows.proto.messages import ControlMessage, Fetch, Layout, Phase


class Resumed(NamedTuple):
    """The facts that a syncer goes on from after a start on a state directory with version 0."""

    layout: Layout
    heads: tuple[int, ...]
    clock: int
    """Tokens of all merged pushes, summed over fragments."""
    merged: Mapping[tuple[str, int], int]
    """(incarnation, fragment) -> newest merged push id."""
    period_s: float
    """Period of the newest round; 0: none."""
    phase: Phase
    """RUNNING or ENDED."""
    merged_tokens: Mapping[str, int]
    """Incarnation -> tokens of its merged pushes, summed over fragments; for the status."""


class PushFacts(NamedTuple):
    """A complete push that a merge takes, in the order of `records.Contribution.order`."""

    learner: str
    incarnation: str
    push_id: int
    base: int
    tokens: int
    steps: int


class Send(NamedTuple):
    """Send a control message to a connection."""

    peer: str
    message: ControlMessage


class Seed(NamedTuple):
    """All chunks of version 0 are here: make it durable, then call `seeded`."""

    incarnation: str
    layout: Layout


class Merge(NamedTuple):
    """Merge these pushes on a worker, then call `merged` or `merge_failed`."""

    fragment: int
    version: int
    pushes: tuple[PushFacts, ...]
    period_s: float
    reason: str


class Commit(NamedTuple):
    """Make the merged round of a fragment durable, then call `durable`."""

    fragment: int


class Publish(NamedTuple):
    """Send the newest publication of a fragment to everybody."""

    fragment: int
    version: int


class Drop(NamedTuple):
    """Forget the payloads of a push that no round will take; push_id 0: of version 0."""

    fragment: int
    incarnation: str
    push_id: int


class Serve(NamedTuple):
    """Answer a learner's Fetch of a PUBLICATION or a STATE, on its own topic."""

    incarnation: str
    fetch: Fetch


class CommitEnd(NamedTuple):
    """Make durable that the run has ended, then call `ended`."""


class Finish(NamedTuple):
    """The run is over and every learner that could be awaited has the final model: exit 0."""

    missing: tuple[str, ...]
    """Learners that were given up, each with what it lacks; for the log."""


class Note(NamedTuple):
    """One line for the log and the events file."""

    event: str
    """joined, rejoined, left, lost, refused, merged, history_lost, alarm, goal, ended, ..."""
    text: str
    fields: dict[str, object]
    warning: bool = False


Effect: TypeAlias = (
    Send | Seed | Merge | Commit | Publish | Drop | Serve | CommitEnd | Finish | Note
)
