"""State of one fragment at a learner: the base of its parameters, what arrives, what is pushed.

Three versions matter. `base` is the version that the parameters stand on. `tip` is the newest
published copy that is whole on this machine; a boundary adopts it. `head` is the newest version
that the broker has told of; the versions between tip and head are fetched. The tip is below the
base only after a copy was found damaged, until the versions up to the head are here again.

The push of a fragment goes through four states, and no second push exists before it is NONE again:

    NONE --snapshot--> ENCODING --encoded--> ANNOUNCED --version holds it--> MERGED --adopt--> NONE
    ENCODING --failed--> NONE      ANNOUNCED --refused--> NONE
    MERGED --the copy is dropped as damaged--> ANNOUNCED
    any state --the parameters are overwritten, or cast adrift--> NONE

When a push fails or is refused, its work is in the parameters still: its tokens and steps count as
unpushed again. The last line is that of the final model, of another history, of altered copies and
of a boundary that was broken off: work that no version holds is lost there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from narrows.learner.effects import Adopt, Assemble, Snapshot
from narrows.proto import messages as msg
from narrows.proto import timing
from narrows.proto.flow.transfer import Transfer
from narrows.proto.layout import Fragment
from narrows.proto.messages import PUBLICATIONS_KEPT, DataKind

AHEAD_MAX: Final = 2 * PUBLICATIONS_KEPT
"""Publications kept beyond the copy that is here or on its way. While a state is fetched the live
ones go on, and they lead from it to the head; so many cost about as much memory as the state."""

NO_COPY: Final = msg.CopyDigest(-1, 0)


class Key(NamedTuple):
    """Names a transfer of a fragment."""

    kind: DataKind
    version: int


class Standing(Enum):
    """How the parameters stand to the run."""

    ADRIFT = auto()
    """They are not of this run: before the first adoption, after another history, not finite, of
    an altered copy, or of an adoption that was broken off. Nothing is pushed, and the next adoption
    overwrites them."""
    BASED = auto()
    """They are `base`, and what this learner has learned since."""
    FINAL = auto()
    """They are the run's final model, bit for bit."""


class Pushed(Enum):
    """The state of a fragment's push; see the module's table."""

    NONE = auto()
    ENCODING = auto()
    ANNOUNCED = auto()
    MERGED = auto()


class Losses(NamedTuple):
    """The losses that a learner has logged, summed."""

    total: float = 0.0
    number: int = 0

    def with_one(self, loss: float | None) -> Losses:
        """These and one more, if it is a number: one NaN would hide all that come after it."""
        if loss is None or not math.isfinite(loss):
            return self
        return Losses(self.total + loss, self.number + 1)

    def mean_since(self, before: Losses) -> float | None:
        """The mean of those that are not among the ones before; None: there are none."""
        number = self.number - before.number
        return (self.total - before.total) / number if number else None


NO_LOSSES: Final = Losses()


@dataclass
class FragmentSession:
    """The state of one fragment at a learner; decides on copies and pushes, not on their time."""

    fragment: Fragment
    settings: msg.RunSettings
    """As they are in this epoch."""
    standing: Standing = Standing.ADRIFT
    base: int = -1
    tip: int = -1
    head: int = -1
    pushed: Pushed = Pushed.NONE
    push: msg.Push | None = None
    """Its announcement, which is sent once the push is coded; None in state NONE."""
    announced_at: float = 0.0
    """When `push` was announced last."""
    tokens: int = 0
    """Tokens of the steps that no push has taken yet."""
    steps: int = 0
    """The number of those steps."""
    losses_before: Losses = NO_LOSSES
    """All losses of this learner until the newest snapshot."""
    merged_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of steps whose work an adoption overwrote, or that ended in a lost history."""
    arriving: dict[Key, Transfer] = field(default_factory=dict[Key, Transfer])
    assembling: Key | None = None
    """The host makes this copy now. One at a time: a publication builds on the copy before it."""
    again_at: float = 0.0
    """No copy is made or asked for before this time: the last one failed."""
    pause_s: float = 0.0
    """The pause after the last failure."""
    trouble: str = ""
    """The kind of error with which making a copy failed last; "" once one is made."""
    failed_codings: int = 0
    """Pushes that could not be coded since the last one that was."""
    copy_digests: dict[int, int] = field(default_factory=dict[int, int])
    """Digests of the newest published copies that were made here, by version."""
    told: msg.CopyDigest = NO_COPY
    """The published copy of the head, as a Beat of this epoch told last."""

    @property
    def index(self) -> int:
        """The fragment's number."""
        return self.fragment.index

    @property
    def push_id(self) -> int:
        """Number of the push on its way; 0: there is none."""
        return self.push.push_id if self.push else 0

    @property
    def pushed_tokens(self) -> int:
        """Tokens of the steps that this push has taken."""
        return self.push.tokens if self.push else 0

    @property
    def newest_copy(self) -> msg.CopyDigest:
        """The copy at the tip, as Hello tells it."""
        return msg.CopyDigest(self.tip, self.copy_digests.get(self.tip, 0))

    @property
    def finished(self) -> bool:
        """Nothing of this learner is left that a version could take."""
        return self.steps == 0 and self.pushed in (Pushed.NONE, Pushed.MERGED)

    # Down: versions on their way.

    def chunk(self, header: msg.Header, now: float) -> bool:
        """Whether this chunk of a PUBLICATION or STATE is wanted; if so, it counts as here."""
        key = Key(header.kind, header.version)
        coming = self._coming_state
        near = max(self.tip, coming)
        if key.version <= self.tip:
            return False
        if key.kind is DataKind.PUBLICATION and not near < key.version <= near + AHEAD_MAX:
            return False
        # The broker may answer with a copy that it serves to others, and go on with a newer one.
        is_older = key.kind is DataKind.STATE and key.version < coming
        if is_older and self.arriving[Key(DataKind.STATE, coming)].here:
            return False
        self.head = max(self.head, key.version)
        return self._arrival(key, now).add(header.chunk, now)

    def next_assembly(self, now: float) -> Assemble | None:
        """The next copy that can be made: a complete state, or the complete next publication."""
        if self.assembling is not None or now < self.again_at:
            return None
        candidates = [Key(DataKind.STATE, self._coming_state)]
        if self.tip >= 0:  # Else there is no copy that a publication could be added to.
            candidates.append(Key(DataKind.PUBLICATION, self.tip + 1))
        for key in candidates:
            if key in self.arriving and self.arriving[key].complete:
                self.assembling = key
                return Assemble(key.kind, self.index, key.version)
        return None

    def assembled(self, header: msg.Header, incarnation: str) -> None:
        """The host has made the copy that it was asked for: it is the new tip. `header` is that of
        chunk 0, `incarnation` is this learner's."""
        self.assembling = None
        self.trouble = ""
        self.tip = header.version
        self.copy_digests[self.tip] = header.result_digest
        self.copy_digests = {
            version: digest
            for version, digest in self.copy_digests.items()
            if version > self.tip - AHEAD_MAX
        }
        self._drop_arriving_up_to(self.tip)
        # A state tells our newest push in it, a publication names all of its pushes.
        own = msg.Contributor(incarnation, self.push_id)
        is_held = header.push_id >= self.push_id or own in header.contributors
        if is_held and self.pushed is Pushed.ANNOUNCED:
            self.pushed = Pushed.MERGED

    def try_again(self, now: float) -> None:
        """A copy could not be made: the tip and the chunks stay, and the next try comes after a
        pause, which doubles if the last failure was not long ago."""
        is_repeated = now < self.again_at + timing.COPY_AGAIN_MAX_S
        pause_s = 2 * self.pause_s if is_repeated else timing.COPY_AGAIN_S
        self.pause_s = min(max(timing.COPY_AGAIN_S, pause_s), timing.COPY_AGAIN_MAX_S)
        self.again_at = now + self.pause_s
        self.assembling = None

    def drop_copy(self, now: float) -> None:
        """The newest copy, the one that it was built on, or a chunk is wrong: all that is dropped,
        and a state is fetched. The broker may serve one that is older than the base."""
        self.arriving.clear()
        self.copy_digests.clear()
        self.tip = -1
        if self.pushed is Pushed.MERGED:  # The next copy may be older than the one that has it.
            self.pushed = Pushed.ANNOUNCED
        self.try_again(now)

    @property
    def altered(self) -> bool:
        """The copy of the version that the Beat told is here, and it is another one."""
        return self.copy_digests.get(self.told.version, self.told.digest) != self.told.digest

    def expect(self, now: float, *, pull: bool) -> None:
        """Begins the transfers that lead from the tip to the head.

        `pull`: nothing of them is on its way; else a live publication gets its time to arrive.
        """
        if self.tip >= self.head or self._coming_state >= 0 or now < self.again_at:
            return
        if self.tip < 0 or self.head - self.tip > PUBLICATIONS_KEPT:
            # A state would take the place of publications that are here: they come first.
            if self.assembling is None:
                self._arrival(Key(DataKind.STATE, self.head), now)
            return
        for version in range(self.tip + 1, self.head + 1):
            self._arrival(Key(DataKind.PUBLICATION, version), now, pull=pull)

    @property
    def pulled(self) -> list[tuple[Key, Transfer]]:
        """The transfers to ask for: a state covers all publications that it could need."""
        state = Key(DataKind.STATE, self._coming_state)
        if state in self.arriving:
            return [(state, self.arriving[state])]
        return sorted(self.arriving.items())

    @property
    def _coming_state(self) -> int:
        """Version of the state that is on its way; -1: none is."""
        return max((key.version for key in self.arriving if key.kind is DataKind.STATE), default=-1)

    def _arrival(self, key: Key, now: float, *, pull: bool = False) -> Transfer:
        """The transfer that is on its way, or a new one."""
        if key in self.arriving:
            return self.arriving[key]
        size = self.settings.chunk_elements
        if key.kind is DataKind.STATE:
            size = self.settings.state_chunk_elements
            # A state comes only when this learner has asked: for it, for another one, or for a
            # publication that is no longer kept. So the rest of it must be asked for.
            pull = True
            # It replaces an older state, and every publication that it covers.
            self.arriving.pop(Key(DataKind.STATE, self._coming_state), None)
            self._drop_arriving_up_to(key.version)
        chunks = self.fragment.chunk_count(size)
        transfer = Transfer(chunks, now, unasked=not pull, streams=self.settings.streams)
        return self.arriving.setdefault(key, transfer)

    def _drop_arriving_up_to(self, version: int) -> None:
        self.arriving = {key: each for key, each in self.arriving.items() if key.version > version}

    # The training thread: adopt, then push.

    @property
    def can_adopt(self) -> bool:
        """A copy is here that the parameters should take. While a push is being encoded nobody
        knows how it is coded, and the rule needs that."""
        newer = self.tip > self.base or (self.standing is Standing.ADRIFT and self.tip >= 0)
        return newer and self.pushed is not Pushed.ENCODING

    @property
    def missed_versions(self) -> bool:
        """Several versions came out since the one that the parameters stand on."""
        return self.standing is Standing.BASED and self.tip - self.base > 1

    def adoption(self, keep: float, *, final: bool = False, warms_up: bool = False) -> Adopt:
        """How the parameters move to the tip; `final` makes them equal to it, whatever they were.
        An optimizer that `warms_up` takes no movement over. Nothing changes yet."""
        assert self.tip >= 0, self
        merged = self.pushed is Pushed.MERGED
        push_id = self.push_id
        base = -1 if warms_up else self.base
        if final or self.standing is Standing.ADRIFT:
            base = -1
            keep = 0.0
            push_id = self.push_id if merged else 0  # The work of another push is overwritten, too.
        return Adopt(self.index, self.tip, push_id, keep, merged, base)

    def adopt(self, keep: float, *, final: bool = False, warms_up: bool = False) -> Adopt:
        """Moves the parameters to the tip by `adoption`."""
        effect = self.adoption(keep, final=final, warms_up=warms_up)
        if effect.keep == 0:
            self.drop_unpushed()
        if effect.merged or not effect.push_id:
            self._settle()
        self.base = self.tip
        self.standing = Standing.FINAL if final else Standing.BASED
        return effect

    def drop_unpushed(self) -> None:
        """No push will take the steps that none has taken yet: their tokens are lost."""
        self.lost_tokens += self.tokens
        self.tokens = self.steps = 0

    def snapshot(self, push_id: int, losses: Losses) -> Snapshot:
        """Everything that no push has taken yet becomes one. `losses` are all of this learner."""
        assert self.standing is Standing.BASED and self.push is None and self.steps > 0, self
        loss = losses.mean_since(self.losses_before)
        self.push = msg.Push(self.index, push_id, self.base, self.tokens, self.steps, loss)
        self.pushed = Pushed.ENCODING
        self.losses_before = losses
        self.tokens = self.steps = 0
        return Snapshot(self.index, push_id, self.base)

    def give_up(self, push_id: int, *, finite: bool = True) -> None:
        """No version will hold this push: refused, or it could not be encoded.

        Parameters that are not finite can never be pushed: they are set back to the base.
        """
        if self.push is None or push_id != self.push_id or self.pushed is Pushed.MERGED:
            return
        self.tokens += self.push.tokens
        self.steps += self.push.steps
        self.push, self.pushed = None, Pushed.NONE
        if not finite:
            self.standing = Standing.ADRIFT

    def cast_adrift(self, logged_tokens: int) -> None:
        """The parameters are not worth pushing, or half moved: the next adoption overwrites them.

        `logged_tokens` are those of all steps: what no version holds of them is lost. It is counted
        so because an exception may have come between any two lines of this class.
        """
        self._settle()
        self.lost_tokens = logged_tokens - self.merged_tokens
        self.tokens = self.steps = 0
        self.standing = Standing.ADRIFT

    def _settle(self) -> None:
        """The push, if there is one, is over: a version holds it, or its work is overwritten."""
        tokens = self.pushed_tokens
        merged = self.pushed is Pushed.MERGED
        # First: an exception that came behind the count would have it counted twice.
        self.push, self.pushed = None, Pushed.NONE
        if merged:
            self.merged_tokens += tokens
        else:
            self.lost_tokens += tokens

    def new_epoch(self, settings: msg.RunSettings, *, go_back: bool) -> None:
        """Another life of the broker: forgets what was on its way, because chunks may be cut anew.

        `go_back`: the copy here is not of the broker's history; its head replaces everything.
        """
        self.settings = settings
        self.assembling = None
        self.arriving.clear()
        self.told = NO_COPY
        if go_back:
            self.copy_digests.clear()
            self._settle()
            self.standing = Standing.ADRIFT
            self.base = self.tip = -1
        self.head = self.tip

    def check(self) -> None:
        """Asserts what always holds."""
        assert -1 <= min(self.base, self.tip) <= max(self.base, self.tip) <= self.head, self
        assert (self.push is None) == (self.pushed is Pushed.NONE), self
        assert self.push is None or self.standing is Standing.BASED, self
        assert (self.steps > 0) or self.tokens == 0, self
        assert all(key.version > self.tip for key in self.arriving), self
        assert sum(key.kind is DataKind.STATE for key in self.arriving) <= 1, self
