"""The exchange of one fragment: what its parameters stand on, what arrives, what is pushed.

Three versions matter. `held` is the base: the version that the parameters stand on. `tip` is the
newest published copy that is whole on this machine; a boundary adopts it. `head` is the newest
version that the broker has told of; what lies between tip and head is fetched.

The push of a fragment goes through four states, and no second push exists before it is NONE again:

    NONE --snapshot--> ENCODING --encoded--> WAITING --a version holds it--> MERGED --adopt--> NONE
                       ENCODING --failed---> NONE    WAITING --refused--> NONE

When a push fails or is refused, its work is in the parameters still: its tokens and steps count as
unpushed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeAlias

from narrows.learner.effects import Adopt, Assemble, Effect, Forget, Snapshot
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import Fragment
from narrows.proto.messages import (
    PUBLICATIONS_KEPT,
    DataKind,
    Fetch,
    Header,
    Held,
    Push,
    RunSettings,
)

AHEAD_MAX: Final = 2 * PUBLICATIONS_KEPT
"""Publications kept beyond the copy that is here or on its way. While a state is fetched the live
ones go on, and they lead from it to the head; so many cost about as much memory as the state."""

Key: TypeAlias = tuple[DataKind, int]
"""Kind and version of a transfer."""


class Standing(Enum):
    """How the parameters stand to the run."""

    ADRIFT = auto()
    """They are not of this run: before the first adoption, after another history, or not finite.
    Nothing is pushed, and the next adoption overwrites them."""
    BASED = auto()
    """They are `held`, and what this learner has learned since."""
    FINAL = auto()
    """They are the run's final model, bit for bit."""


class Pushed(Enum):
    """The state of a fragment's push; see the module's table."""

    NONE = auto()
    ENCODING = auto()
    WAITING = auto()
    MERGED = auto()


@dataclass
class FragmentSession:
    """The state of one fragment at a learner; decides on copies and pushes, not on their time."""

    fragment: Fragment
    standing: Standing = Standing.ADRIFT
    held: int = -1
    tip: int = -1
    tip_digest: int = 0
    head: int = -1
    pushed: Pushed = Pushed.NONE
    push: Push | None = None
    """As announced; None in state NONE."""
    tokens: int = 0
    """Tokens of the steps that no push has taken yet."""
    steps: int = 0
    merged_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of steps whose work an adoption overwrote, or that ended in a lost history."""
    arriving: dict[Key, Transfer] = field(default_factory=dict[Key, Transfer])
    assembling: Key | None = None
    """The host makes this copy now. One at a time: a publication builds on the copy before it."""

    @property
    def index(self) -> int:
        """The fragment's number."""
        return self.fragment.index

    @property
    def push_id(self) -> int:
        """Number of the push on its way; 0: there is none."""
        return self.push.push_id if self.push else 0

    @property
    def told(self) -> Held:
        """The entry of a Hello about this fragment."""
        return Held(self.tip, self.tip_digest)

    @property
    def finished(self) -> bool:
        """Nothing of this learner is left that a version could take."""
        return self.steps == 0 and self.pushed in (Pushed.NONE, Pushed.MERGED)

    # Down: versions on their way.

    def note_head(self, version: int) -> None:
        """The broker has this version; older news change nothing."""
        self.head = max(self.head, version)

    def chunk(self, header: Header, settings: RunSettings, now: float) -> bool:
        """Whether this chunk of a PUBLICATION or STATE is wanted; if so, it counts as here."""
        kind, version = header.kind, header.version
        coming, near = self._coming_state, max(self.tip, self._coming_state)
        if version <= self.tip or (kind, version) == self.assembling:
            return False
        if kind is DataKind.PUBLICATION and not near < version <= near + AHEAD_MAX:
            return False
        # The broker may answer with a copy that it serves to others, and go on with a newer one.
        if kind is DataKind.STATE and version < coming and self.arriving[kind, coming].here:
            return False
        self.note_head(version)
        # A state comes only when this learner has asked: for it, for another one, or for a
        # publication that is no longer kept. So the rest of it must be asked for.
        transfer = self._transfer(kind, version, settings, now, unasked=kind is not DataKind.STATE)
        return transfer.add(header.chunk, now)

    def next_assembly(self) -> list[Effect]:
        """The next copy that can be made: a complete state, or the complete next publication."""
        if self.assembling is not None:
            return []
        for key in ((DataKind.STATE, self._coming_state), (DataKind.PUBLICATION, self.tip + 1)):
            transfer = self.arriving.get(key)
            # Without a copy there is nothing that a publication could be added to.
            if transfer and transfer.complete and (key[0] is DataKind.STATE or self.tip >= 0):
                self.assembling = key
                return [Assemble(key[0], self.index, key[1])]
        return []

    def assembled(
        self, header: Header, incarnation: str, settings: RunSettings, now: float, *, agrees: bool
    ) -> bool:
        """The host has made a copy; True if it is the new tip. `header` is that of chunk 0.

        If its digest does not agree, the copy that it was built on or a chunk is wrong: everything
        on its way is dropped, and the state is fetched.
        """
        if (header.kind, header.version) != self.assembling:
            return False
        self.assembling = None
        if not agrees:
            self.arriving.clear()
            self._transfer(DataKind.STATE, self.head, settings, now, unasked=False)
            return False
        self.tip, self.tip_digest = header.version, header.result_digest
        self.arriving = {key: each for key, each in self.arriving.items() if key[1] > self.tip}
        if self.pushed is Pushed.WAITING:
            assert self.push is not None
            if header.kind is DataKind.STATE:
                held = header.push_id >= self.push.push_id
            else:
                held = (incarnation, self.push.push_id) in header.contributors
            self.pushed = Pushed.MERGED if held else Pushed.WAITING
        return True

    def expect(self, settings: RunSettings, now: float, *, pull: bool) -> None:
        """Begins the transfers that lead from the tip to the head.

        `pull`: nothing of them is on its way; else a live publication gets its time to arrive.
        """
        if self.tip >= self.head or self._coming_state >= 0:
            return
        if self.tip < 0 or self.head - self.tip > PUBLICATIONS_KEPT:
            self._transfer(DataKind.STATE, self.head, settings, now, unasked=False)
            return
        for version in range(self.tip + 1, self.head + 1):
            self._transfer(DataKind.PUBLICATION, version, settings, now, unasked=not pull)

    @property
    def asked(self) -> int:
        """Messages asked for and not here."""
        return sum(transfer.asked for transfer in self.arriving.values())

    def asks(self, now: float, heard_at: float, room: int) -> list[Fetch]:
        """Fetches of what is missing and due, of at most `room` messages."""
        fetches: list[Fetch] = []
        for (kind, version), transfer in self._pulled():
            if ranges := transfer.ask(now, heard_at, room + transfer.asked):
                fetches.append(Fetch(kind, self.index, version, 0, ranges))
                room -= sum(count for _, count in ranges)
        return fetches

    def deadline(self, now: float) -> float:
        """The time at which `asks` may have something to ask for."""
        return min((each.deadline(now) for _, each in self._pulled()), default=math.inf)

    @property
    def _coming_state(self) -> int:
        """Version of the state that is on its way; -1: none is."""
        return max(
            (version for kind, version in self.arriving if kind is DataKind.STATE), default=-1
        )

    def _pulled(self) -> list[tuple[Key, Transfer]]:
        """The transfers to ask for: a state covers all publications that it could need."""
        state = (DataKind.STATE, self._coming_state)
        if state in self.arriving:
            return [(state, self.arriving[state])]
        return sorted(self.arriving.items())

    def _transfer(
        self, kind: DataKind, version: int, settings: RunSettings, now: float, *, unasked: bool
    ) -> Transfer:
        known = self.arriving.get((kind, version))
        if known is not None:
            return known
        if kind is DataKind.STATE:
            # It replaces an older state, and every publication that it covers.
            self.arriving = {
                key: each
                for key, each in self.arriving.items()
                if key[0] is not DataKind.STATE and key[1] > version
            }
        lossless = kind is DataKind.STATE
        size = settings.state_chunk_elements if lossless else settings.chunk_elements
        transfer = Transfer(self.fragment.chunk_count(size), now, unasked=unasked)
        self.arriving[kind, version] = transfer
        return transfer

    # The training thread: adopt, then push.

    @property
    def behind(self) -> int:
        """Versions that the next adoption moves on."""
        return self.tip - self.held

    @property
    def can_adopt(self) -> bool:
        """A copy is here that the parameters should take. While a push is being encoded nobody
        knows how it is coded, and the rule needs that."""
        newer = self.tip > self.held or (self.standing is Standing.ADRIFT and self.tip >= 0)
        return newer and self.pushed is not Pushed.ENCODING

    def step(self, tokens: int) -> None:
        """The parameters have made an inner step."""
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1

    def adopt(self, keep: float, *, final: bool = False) -> list[Effect]:
        """Moves the parameters to the tip; `final` makes them equal to it, whatever they were."""
        assert self.tip >= 0, self
        overwrite = final or self.standing is Standing.ADRIFT
        keep = 0.0 if overwrite else keep
        effects: list[Effect] = []
        push_id, merged = self.push_id, self.pushed is Pushed.MERGED
        effects.append(Adopt(self.index, self.tip, push_id, keep, merged, overwrite))
        if overwrite or keep == 0:
            self.lost_tokens, self.tokens, self.steps = self.lost_tokens + self.tokens, 0, 0
        if merged or overwrite:
            effects += self._settle(merged=merged)
        self.held = self.tip
        self.standing = Standing.FINAL if final else Standing.BASED
        return effects

    def snapshot(self, push_id: int) -> list[Effect]:
        """Everything that no push has taken yet becomes one."""
        assert self.standing is Standing.BASED and self.push is None and self.steps > 0, self
        self.push = Push(self.index, push_id, self.held, self.tokens, self.steps)
        self.pushed = Pushed.ENCODING
        self.tokens = self.steps = 0
        return [Snapshot(self.index, push_id, self.held)]

    def encoded(self, push_id: int) -> bool:
        """The host has coded a push; False: it was given up meanwhile."""
        if not push_id == self.push_id > 0:
            return False
        assert self.pushed is Pushed.ENCODING, self
        self.pushed = Pushed.WAITING
        return True

    def give_up(self, push_id: int, *, finite: bool = True) -> list[Effect]:
        """No version will hold this push: refused, or it could not be encoded.

        Parameters that are not finite can never be pushed: they are set back to the base.
        """
        if self.push is None or self.push.push_id != push_id or self.pushed is Pushed.MERGED:
            return []
        self.tokens, self.steps = self.tokens + self.push.tokens, self.steps + self.push.steps
        self.push, self.pushed = None, Pushed.NONE
        if not finite:
            self.standing = Standing.ADRIFT
        return [Forget(self.index, push_id)]

    def _settle(self, *, merged: bool) -> list[Effect]:
        if self.push is None:
            return []
        push, self.push, self.pushed = self.push, None, Pushed.NONE
        if merged:
            self.merged_tokens += push.tokens
        else:
            self.lost_tokens += push.tokens
        return [Forget(self.index, push.push_id)]

    # Another life of the broker.

    def new_epoch(self) -> None:
        """Forgets what was on its way: a new life of the broker may cut chunks anew."""
        self.arriving.clear()
        self.assembling, self.head = None, self.tip

    def go_back(self) -> list[Effect]:
        """The copy here is not of the broker's history: its head replaces everything."""
        effects = self._settle(merged=self.pushed is Pushed.MERGED)
        self.standing, self.held, self.tip, self.tip_digest, self.head = (
            Standing.ADRIFT,
            -1,
            -1,
            0,
            -1,
        )
        return effects

    def check(self) -> None:
        """Asserts what always holds."""
        assert -1 <= self.held <= self.tip <= self.head, self
        assert (self.push is None) == (self.pushed is Pushed.NONE), self
        assert self.push is None or self.standing is Standing.BASED, self
        assert (self.steps > 0) or self.tokens == 0, self
        assert all(version > self.tip for _, version in self.arriving), self
        assert sum(kind is DataKind.STATE for kind, _ in self.arriving) <= 1, self
