"""The session's way in and out: what the learner's host tells it, and what it asks for.

Events are methods of `Session`, effects the tuples here; as with the syncer, an effect carries all
that it needs.

    Session(name, incarnation, layout, now)

    control(message, now)                   a decoded control message of the broker
    chunk(header, now) -> bool              True: wanted; the host keeps the payload, then `settle`
    settle(fragment, now)                   a wanted chunk is kept: assemble what is complete
    assembled(header, now, *, agrees)       `header` is that of chunk 0, which tells the outcome;
        -> bool                             True: the copy is the fragment's newest, keep it
    boundary(tokens, loss, now)             after an inner step, on the training thread
    join(now)                               between two steps, while none is made: before the first,
                                            in lockstep, at the end; adopts what is here
    encoded(fragment, push_id, now)         the push is coded; it is announced and sent
    encode_failed(fragment, push_id, now, *, reason, finite)
                                            its tokens and steps count as unpushed again
    sent(now)                               a chunk of this learner has left
    pause(reason, now) / resume(now)        the loop makes no steps for a while
    lost(now)                               there is a new connection: say Hello
    leave(now) / abandon()                  the loop is over: push what is left, then Bye / at once
    tick(now); deadline(now) -> float       time
    check()                                 asserts every invariant; the simulator calls it

    joined, must_wait(now), stopping, ended, final, lacks, refused
                                            what the training thread asks
    run_tokens(now), health(now), waits_for, ledger, ports, settings
                                            what the link and the user read

The session imports no zmq, time, threading, socket or torch, and holds no parameters.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from narrows.proto.messages import ControlMessage, DataKind, Ranges


class Send(NamedTuple):
    """Send a control message to the broker."""

    message: ControlMessage


class SendLayout(NamedTuple):
    """Send the layout: this learner seeds the run."""


class SendChunks(NamedTuple):
    """Send chunks of a push or of version 0."""

    kind: DataKind
    fragment: int
    push_id: int
    chunks: Ranges | None
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
    """Apply the rule of push.py to the parameters, now:

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


class Forget(NamedTuple):
    """The bytes and codes of the waiting push of a fragment are no longer needed."""

    fragment: int
    push_id: int


class Note(NamedTuple):
    """One line for the log and the events file."""

    event: str
    text: str
    fields: dict[str, object]
    warning: bool = False


Effect: TypeAlias = Send | SendLayout | SendChunks | Assemble | Snapshot | Adopt | Forget | Note
