"""One round: learners asked, pushes that arrive, contributions, refusals to take part. [pure]

A round is the collection of contributions to (fragment, base version). It is part of the state that
every Beat repeats, so that no lost message can lose it.

The words for a learner's work, in the order of time: `Push` is the message that announces it,
`Incoming` is the push while it arrives, `Contribution` is the complete push, `Outcome` is what a
merge makes of several.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.merging import Contribution
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly
from narrows.proto.messages import Header, OpenRound, Push


@dataclass
class Incoming:
    """A push that is arriving: its announcement and its chunks, in any order."""

    learner: str
    incarnation: str
    push_id: int
    assembly: Assembly
    codec: str = ""
    """Codec of its first chunk, which all others must have."""
    decoding: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    """Chunks that are being decoded: offset, count, digest."""
    announced: Push | None = None
    declined_before: bool = False
    """Its learner had declined before, so nobody waited for it."""
    seconds: float = 0.0
    """Seconds from the adoption of its base to its announcement, as the broker saw them."""
    progress_at: float = 0.0
    asked_at: float = 0.0
    asks: int = 0
    """Requests for missing chunks since the last progress."""

    @property
    def complete(self) -> bool:
        return self.announced is not None and self.assembly.complete

    @property
    def here(self) -> bool:
        """Announced, and no element is missing that is not being decoded already."""
        coming = sum(count for _, count, _ in self.decoding)
        received = self.assembly.received + coming
        return self.announced is not None and received >= self.assembly.elements

    def wants(self, header: Header) -> bool:
        """Notes that a chunk is going to be decoded; False if it has been, or is being, decoded.

        Raises RemoteProtocolError BAD_RANGE for more chunks than a push needs, and CHUNK_CONFLICT
        for a second codec: the journal keeps one per push.
        """
        if self.codec and header.codec != self.codec:
            raise RemoteProtocolError(
                ErrorCode.CHUNK_CONFLICT,
                f"push {self.push_id} of {self.learner}",
                expected=f"{self.codec}, as its first chunk",
                got=header.codec,
                remedy="one push has one codec",
            )
        chunk = (header.offset, header.count, header.payload_digest)
        if chunk in self.decoding or self.assembly.has(*chunk):
            return False
        # Counted before decoding: a flood of tiny chunks must not cost a decode each.
        self.assembly.check_room(len(self.decoding))
        self.codec = header.codec
        self.decoding.add(chunk)
        return True


@dataclass
class Round:
    """An open round; `merging` once its contributions are fixed."""

    fragment: int
    base_version: int
    attempt: int
    at_step: int
    elements: int
    chunks_max: int
    opened_at: float
    quorum: int
    expected: set[str]
    """Learners that were ready at the opening; for membership tests only, never iterated."""
    last: bool = False
    """True for the fragment's last round of the run."""
    incoming: dict[str, Incoming] = field(default_factory=dict[str, Incoming])
    contributed: dict[str, Contribution] = field(default_factory=dict[str, Contribution])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """The same of each contribution."""
    declined: dict[str, str] = field(default_factory=dict[str, str])
    quorum_at: float | None = None
    merging: bool = False

    def open_round(self) -> OpenRound:
        """Returns the round as it travels."""
        assert not self.merging
        return OpenRound(self.fragment, self.base_version, self.attempt, self.at_step)

    def cut_finer(self, chunks_max: int) -> None:
        """Allows more chunks per push: messages have become smaller."""
        assert chunks_max >= self.chunks_max, "the smallest chunk size of an epoch never grows"
        self.chunks_max = chunks_max
        for incoming in self.incoming.values():
            incoming.assembly.chunks_max = chunks_max

    def incoming_of(self, name: str, incarnation: str, push_id: int, now: float) -> Incoming:
        """Returns the push that a message belongs to, entered if it is the learner's first.

        Raises RemoteProtocolError PUSH_CONFLICT if the learner has another push in this round. A
        round has at most one contribution per learner, the first complete one.
        """
        assert not self.merging
        complete = self.contributed.get(name)
        own = (incarnation, push_id)
        if complete is not None and (complete.incarnation, complete.push_id) != own:
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"{name} has already contributed to fragment {self.fragment}",
                expected=f"push {complete.push_id}",
                got=f"push {push_id}",
            )
        incoming = self.incoming.get(name)
        # Chunks may overtake the announcement: they travel on other connections.
        if incoming is None:
            assembly = Assembly(self.elements, self.chunks_max)
            incoming = Incoming(name, incarnation, push_id, assembly, progress_at=now, asked_at=now)
            if complete is None:
                self.incoming[name] = incoming
        if incoming.push_id != push_id:
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"{name} has a newer push for fragment {self.fragment}",
                expected=f"push {incoming.push_id}",
                got=f"push {push_id}",
            )
        return incoming

    def announce(self, incoming: Incoming, message: Push) -> None:
        """Takes an announcement in; the same one again changes nothing.

        Raises RemoteProtocolError BAD_RANGE, BAD_TOKENS or PUSH_CONFLICT.
        """
        if message.elements != self.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                f"push {message.push_id} of {incoming.learner}",
                expected=f"{self.elements} elements in fragment {self.fragment}",
                got=str(message.elements),
            )
        if message.tokens < 1 or message.steps < 1:
            raise RemoteProtocolError(
                ErrorCode.BAD_TOKENS,
                f"push {message.push_id} of {incoming.learner}",
                expected="at least one token and one step",
                got=f"{message.tokens} tokens, {message.steps} steps",
                remedy="log the tokens of each step before optimizer.step()",
            )
        before = incoming.announced
        if before is not None and (before.tokens, before.steps) != (message.tokens, message.steps):
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"push {message.push_id} of {incoming.learner} was announced differently",
                expected=f"{before.tokens} tokens, {before.steps} steps",
                got=f"{message.tokens} tokens, {message.steps} steps",
            )
        # A learner that had declined and pushes now answers after all.
        incoming.announced = message
        incoming.declined_before |= self.declined.pop(incoming.learner, None) is not None

    def add_chunk(self, incoming: Incoming, header: Header, handle: int, now: float) -> Arrival:
        """Takes a decoded chunk in. Raises RemoteProtocolError if it does not fit the others."""
        assert not self.merging and self.incoming.get(incoming.learner) is incoming
        incoming.decoding.discard((header.offset, header.count, header.payload_digest))
        arrival = incoming.assembly.add(header.offset, header.count, header.payload_digest, handle)
        incoming.progress_at = now
        return arrival

    def settle_if_complete(self, incoming: Incoming, now: float) -> bool:
        """Turns a complete push into a contribution; True if this one did."""
        if not incoming.complete or incoming.learner in self.contributed or self.merging:
            return False
        assert incoming.announced is not None and incoming.announced.tokens >= 1
        self.contributed[incoming.learner] = Contribution(
            incoming.learner,
            incoming.incarnation,
            incoming.push_id,
            incoming.announced.tokens,
            incoming.announced.steps,
            incoming.assembly.handles,
        )
        self.seconds[incoming.learner] = incoming.seconds
        self.incoming.pop(incoming.learner, None)
        if self.quorum_at is None and len(self.contributed) >= self.quorum:
            self.quorum_at = now
        assert incoming.learner not in self.incoming
        return True

    def supersede(self, name: str, incarnation: str, push_id: int) -> tuple[int, ...]:
        """Drops an unfinished push that a newer push of the same learner replaces."""
        incoming = self.incoming.get(name)
        if incoming is None:
            return ()
        if incoming.incarnation == incarnation and incoming.push_id >= push_id:
            return ()
        return self.drop_incoming(name)

    def drop_incoming(self, name: str) -> tuple[int, ...]:
        """Forgets an unfinished push; returns its payloads."""
        assert not self.merging or name not in self.incoming
        incoming = self.incoming.pop(name, None)
        return incoming.assembly.handles if incoming else ()

    def close(self) -> tuple[int, ...]:
        """Drops all unfinished pushes; returns their payloads."""
        names = sorted(self.incoming)
        handles = tuple(handle for name in names for handle in self.drop_incoming(name))
        assert not self.incoming
        return handles

    def discard(self) -> tuple[int, ...]:
        """Gives the round up; returns the payloads of all its pushes."""
        # The contributions' payloads go too: no merge will ever use them.
        handles = self.close()
        for contribution in self.contributions():
            handles += contribution.handles
        self.contributed.clear()
        return handles

    def awaits(self, name: str) -> bool:
        """True if a contribution of this learner may still come.

        It was asked, or the round is below the quorum and takes anybody. It has neither contributed
        nor declined, and its push is not merely being decoded.
        """
        asked = name in self.expected or len(self.contributed) < self.quorum
        over = self.merging or name in self.contributed or name in self.declined
        return asked and not over and not self.is_here(name)

    def is_here(self, name: str) -> bool:
        """True if all of the learner's push has arrived, and only decoding is left to do."""
        return name in self.incoming and self.incoming[name].here

    def has(self, incarnation: str, push_id: int, name: str) -> bool:
        """True if this very push is a complete contribution already."""
        complete = self.contributed.get(name)
        if complete is None:
            return False
        return (complete.incarnation, complete.push_id) == (incarnation, push_id)

    def contributions(self) -> tuple[Contribution, ...]:
        """Contributions in learner-name order: sums must not depend on the order of arrival."""
        return tuple(self.contributed[name] for name in sorted(self.contributed))
