"""The decisions of a learner's session: effects for its host, tasks for the training thread.

A session is ahead of its effects when they are performed, so an effect carries all that it needs.
A control message is an effect by itself: it is sent to the broker.
Two effects touch parameters. Of these the host makes tasks, complete with the copies that they
need, and learner/boundary.py performs them on the training thread.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from msgspec import Struct

from narrows.proto.layout import Fragment
from narrows.proto.messages import ControlMessage, DataKind, Ranges
from narrows.proto.ports import Adoption, Copy, Prepared


class SendChunks(Struct, frozen=True, tag=True):
    """Send chunks of a push, or the layout or chunks of version 0, which this learner seeds."""

    kind: DataKind
    fragment: int = 0
    push_id: int = 0
    chunks: Ranges | None = None
    """None: all of them."""


class Assemble(Struct, frozen=True, tag=True):
    """All chunks of a transfer are here: build the published copy off the loop, check its digest,
    then call `assembled`."""

    kind: DataKind
    fragment: int
    version: int


class Snapshot(Struct, frozen=True, tag=True):
    """Copy parameters of a fragment at this boundary, code `published - parameters` off the loop,
    call `encoded`."""

    fragment: int
    push_id: int
    base: int


class Adopt(Struct, frozen=True, tag=True):
    """Apply the rule of island.py to the parameters at this boundary:

    params = new + keep * (params - old + push) - (0 if merged else push)

    With keep 0 and no push that is `params = new`, whatever they were: the first adoption, another
    history, parameters that are not finite, the end.
    """

    fragment: int
    version: int
    """The assembled copy that the parameters go to."""
    push_id: int
    """The push on its way, whose values the rule needs; 0: none."""
    keep: float
    merged: bool
    """The versions since the old copy hold that push."""
    base: int = -1
    """The version that the parameters stand on, from which the published movement is taken over;
    -1: none, or they end as the final model, or the optimizer warms up."""


class Note(Struct, frozen=True, tag=True):
    """One line for the log and the events file."""

    event: str
    text: str
    warning: bool = True


Effect: TypeAlias = ControlMessage | SendChunks | Assemble | Snapshot | Adopt | Note


# What the training thread does at a boundary, in this order. It hands each result to the host.


class Move(NamedTuple):
    """Move the parameters of a fragment by the rule of an adoption, then call `adopted`."""

    effect: Adopt
    fragment: Fragment
    rule: Adoption
    prepared: Prepared | None
    """The first part of this very rule, by a worker; None: it is prepared now."""


class TakeSnapshot(NamedTuple):
    """Copy the parameters of a fragment, which stand on a published copy, then call
    `snapshot_taken`."""

    effect: Snapshot
    fragment: Fragment
    published: Copy


class Read(NamedTuple):
    """Read the parameters of a fragment for version 0, then call `seed_read`."""

    fragment: Fragment


Task: TypeAlias = Move | TakeSnapshot | Read
