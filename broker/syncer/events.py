"""The effects of the syncer: everything that it asks the host to do.

Inputs are methods of `Syncer`, effects are the structs here. After every call the host empties
`syncer.effects` and performs them in order. The machine's state is ahead of its effects when they
are performed, so an effect carries all that it needs and the host never looks back.

Seed, MergeRound, Commit and CommitEnd take long. Once the host has performed one of them it calls
`syncer.done`, and if it could not, `syncer.failed`. It tries again what the disk refuses.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from narrows.broker.records import Round
from narrows.proto.messages import ControlMessage, Fetch, Layout


class Send(Struct, frozen=True, tag=True):
    """Send a control message to a connection."""

    peer: str
    message: ControlMessage


class AnswerStatus(Struct, frozen=True, tag=True):
    """Send a Status to a connection. The host has the half of it that is about lines and disk."""

    peer: str


class Seed(Struct, frozen=True, tag=True):
    """All chunks of version 0 are here: make it durable. A failure refuses its learner."""

    layout: Layout


class MergeRound(Struct, frozen=True, tag=True):
    """Merge the pushes of a round on a worker. Where the sum is not finite, the longest push is
    refused and the others are merged without it; any other failure refuses them all."""

    round_: Round
    """Its contributions are in the order of sums, and have no chunks: the pipeline keeps those."""


class Commit(Struct, frozen=True, tag=True):
    """Make the merged round of a fragment durable. After a failure the host tries it again."""

    fragment: int


class Publish(Struct, frozen=True, tag=True):
    """Send the newest publication of a fragment to everybody."""

    fragment: int
    version: int


class Drop(Struct, frozen=True, tag=True):
    """Forget the payloads of a push that no round will take; push_id 0: of version 0."""

    fragment: int
    incarnation: str
    push_id: int


class Serve(Struct, frozen=True, tag=True):
    """Answer a learner's Fetch of a PUBLICATION or a STATE, on its own topic."""

    incarnation: str
    fetch: Fetch


class CommitEnd(Struct, frozen=True, tag=True):
    """Make durable that the run has ended. The host tries until the disk works."""


class Finish(Struct, frozen=True, tag=True):
    """The run is over and every learner that could be awaited has the final model: exit 0."""

    missing: tuple[str, ...]
    """Learners that were given up, each with what it lacks; for the log."""


class Note(Struct, frozen=True, tag=True):
    """One line for the log and the events file."""

    event: str
    """joined, rejoined, left, lost, refused, merged, history_lost, alarm, goal, ended, ..."""
    text: str
    fields: dict[str, object]
    warning: bool = False


Slow: TypeAlias = Seed | MergeRound | Commit | CommitEnd
"""Effects that a worker performs, and that the host answers."""

Effect: TypeAlias = Send | AnswerStatus | Slow | Publish | Drop | Serve | Finish | Note
