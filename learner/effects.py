"""The effects of a learner's session: its host performs them.

A session is ahead of its effects when they are performed, so an effect carries all that it needs.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from narrows.proto.messages import ControlMessage, DataKind, Ranges


class Send(NamedTuple):
    """Send a control message to the broker."""

    message: ControlMessage


class SendChunks(NamedTuple):
    """Send chunks of a push, or the layout or chunks of version 0, which this learner seeds."""

    kind: DataKind
    fragment: int = 0
    push_id: int = 0
    chunks: Ranges | None = None
    """None: all of them."""


class Assemble(NamedTuple):
    """All chunks of a transfer are here: build the published copy off the loop, check its digest,
    then call `assembled`."""

    kind: DataKind
    fragment: int
    version: int


class Snapshot(NamedTuple):
    """Copy `published - parameters` of a fragment now, encode it off the loop, call `encoded`."""

    fragment: int
    push_id: int
    base: int


class Adopt(NamedTuple):
    """Apply the rule of island.py to the parameters, now:

    params = new + keep * (params - old + push) - (0 if merged else push)
    """

    fragment: int
    version: int
    """The assembled copy that the parameters go to."""
    push_id: int
    """The waiting push; 0: none."""
    keep: float
    merged: bool
    """The versions since the old copy hold the waiting push."""
    overwrite: bool
    """params = new, whatever they were: first adoption, another history, not finite, the end."""


class Note(NamedTuple):
    """One line for the log and the events file."""

    event: str
    text: str
    warning: bool = True


Effect: TypeAlias = Send | SendChunks | Assemble | Snapshot | Adopt | Note
