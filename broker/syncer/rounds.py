"""One round: who was asked, what has arrived, who declined. [pure]

A round is the collection of contributions to (fragment, base version). It is state, told in
every Beat, so that no lost message can lose it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.merging import Contribution
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly
from narrows.proto.messages import Header, OpenRound, Push


@dataclass
class Incoming:
    """A push on its way: its announcement and its chunks, whichever come first."""

    learner: str
    incarnation: str
    push_id: int
    assembly: Assembly
    codec: str = ""
    """Of its chunks: the first one's."""
    decoding: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    """Chunks that are being decoded: offset, count, digest."""
    announced: Push | None = None
    declined_before: bool = False
    """Its learner had declined: nobody waited for it."""
    progress_at: float = 0.0
    asked_at: float = 0.0
    asks: int = 0
    """Since the last progress."""

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
        """Notes that a chunk is going to be decoded; False if it has been, or is being.

        Raises RemoteProtocolError BAD_RANGE for more chunks than anybody needs, CHUNK_CONFLICT for
        another codec than that of the push: the journal keeps one.
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
    """Learners that were asked; used for membership tests only, never iterated."""
    last: bool = False
    """The fragment's last round of the run."""
    incoming: dict[str, Incoming] = field(default_factory=dict[str, Incoming])
    contributed: dict[str, Contribution] = field(default_factory=dict[str, Contribution])
    declined: dict[str, str] = field(default_factory=dict[str, str])
    quorum_at: float | None = None
    merging: bool = False

    def open_round(self) -> OpenRound:
        """The round as the wire tells it."""
        return OpenRound(self.fragment, self.base_version, self.attempt, self.at_step)

    def cut_finer(self, chunks_max: int) -> None:
        """Messages have become smaller: pushes may come in more chunks."""
        self.chunks_max = chunks_max
        for push in self.incoming.values():
            push.assembly.chunks_max = chunks_max

    def push_of(self, name: str, incarnation: str, push_id: int, now: float) -> Incoming:
        """The push that a message belongs to, entered if it is the learner's first.

        Raises RemoteProtocolError PUSH_CONFLICT if the learner has another push in this round:
        at most one contribution per (learner, fragment, base version), the first complete one.
        """
        done = self.contributed.get(name)
        if done is not None and (done.incarnation, done.push_id) != (incarnation, push_id):
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"{name} has already contributed to fragment {self.fragment}",
                expected=f"push {done.push_id}",
                got=f"push {push_id}",
            )
        push = self.incoming.get(name)
        if push is None:
            assembly = Assembly(self.elements, self.chunks_max)
            push = Incoming(name, incarnation, push_id, assembly, progress_at=now, asked_at=now)
            if done is None and not self.merging:
                self.incoming[name] = push
        if push.push_id != push_id:
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"{name} has a newer push for fragment {self.fragment}",
                expected=f"push {push.push_id}",
                got=f"push {push_id}",
            )
        return push

    def announce(self, push: Incoming, message: Push) -> None:
        """Takes an announcement in; the same one again changes nothing."""
        if message.elements != self.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                f"push {message.push_id} of {push.learner}",
                expected=f"{self.elements} elements in fragment {self.fragment}",
                got=str(message.elements),
            )
        if message.tokens < 1 or message.steps < 1:
            raise RemoteProtocolError(
                ErrorCode.BAD_TOKENS,
                f"push {message.push_id} of {push.learner}",
                expected="at least one token and one step",
                got=f"{message.tokens} tokens, {message.steps} steps",
                remedy="log the tokens of each step before optimizer.step()",
            )
        before = push.announced
        if before is not None and (before.tokens, before.steps) != (message.tokens, message.steps):
            raise RemoteProtocolError(
                ErrorCode.PUSH_CONFLICT,
                f"push {message.push_id} of {push.learner} was announced differently",
                expected=f"{before.tokens} tokens, {before.steps} steps",
                got=f"{message.tokens} tokens, {message.steps} steps",
            )
        push.announced = message
        push.declined_before |= self.declined.pop(push.learner, None) is not None

    def add_chunk(self, push: Incoming, header: Header, handle: int, now: float) -> Arrival:
        """Takes a decoded chunk in."""
        push.decoding.discard((header.offset, header.count, header.payload_digest))
        arrival = push.assembly.add(header.offset, header.count, header.payload_digest, handle)
        push.progress_at = now
        return arrival

    def settle_if_complete(self, push: Incoming, now: float) -> bool:
        """Turns a complete push into a contribution; True if this one did."""
        if not push.complete or push.learner in self.contributed or self.merging:
            return False
        assert push.announced is not None
        self.contributed[push.learner] = Contribution(
            push.learner,
            push.incarnation,
            push.push_id,
            push.announced.tokens,
            push.announced.steps,
            push.assembly.handles,
        )
        self.incoming.pop(push.learner, None)
        if self.quorum_at is None and len(self.contributed) >= self.quorum:
            self.quorum_at = now
        return True

    def supersede(self, name: str, incarnation: str, push_id: int) -> tuple[int, ...]:
        """Drops an unfinished push that a newer one of the same learner replaces."""
        push = self.incoming.get(name)
        if push is None:
            return ()
        if push.incarnation == incarnation and push.push_id >= push_id:
            return ()
        return self.drop_push(name)

    def drop_push(self, name: str) -> tuple[int, ...]:
        """Forgets an unfinished push; returns the payloads that nobody needs any more."""
        push = self.incoming.pop(name, None)
        return push.assembly.handles if push else ()

    def close(self) -> tuple[int, ...]:
        """Ends the collection; returns the payloads of the unfinished pushes."""
        return tuple(handle for name in sorted(self.incoming) for handle in self.drop_push(name))

    def discard(self) -> tuple[int, ...]:
        """Gives the round up; returns the payloads of all its pushes."""
        handles = self.close()
        for done in self.contributions():
            handles += done.handles
        self.contributed.clear()
        return handles

    def awaits(self, name: str) -> bool:
        """A contribution of this learner may still come: it was asked, or all are below the
        quorum, and it has neither contributed nor declined, nor is its push being decoded."""
        asked = name in self.expected or len(self.contributed) < self.quorum
        over = self.merging or name in self.contributed or name in self.declined
        return asked and not over and not self.is_here(name)

    def is_here(self, name: str) -> bool:
        """All of the learner's push has arrived; the rest is ours to do."""
        return name in self.incoming and self.incoming[name].here

    def has(self, incarnation: str, push_id: int, name: str) -> bool:
        """True if this very push is a complete contribution already."""
        done = self.contributed.get(name)
        return done is not None and (done.incarnation, done.push_id) == (incarnation, push_id)

    def contributions(self) -> tuple[Contribution, ...]:
        """In learner-name order: sums must not depend on arrival."""
        return tuple(self.contributed[name] for name in sorted(self.contributed))
