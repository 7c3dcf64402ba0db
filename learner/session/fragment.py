"""Exchanges one fragment: fetches and applies versions, adopts them, pushes and declines. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.learner.session import events as ev
from narrows.learner.session.arriving import Arriving
from narrows.learner.session.ledger import FragmentAccount
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.fragments import Fragment
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.timing import LEARNER_REPAIR_S, REPAIR_MAX_S


@dataclass
class Pushed:
    """The newest push of ours, until the next adoption."""

    announced: msg.Push
    merged: bool | None = None
    """The outcome; None while it is open."""
    refused: bool = False
    """The broker said so, as opposed to a push that was lost or came too late."""

    @property
    def is_open(self) -> bool:
        """The outcome is not known yet."""
        return self.merged is None


@dataclass
class FragmentSession:
    """The exchange of one fragment, from its first version to the end of the session."""

    fragment: Fragment
    account: FragmentAccount
    held: int = -1
    """Version of the published copy on this host; -1: none, or not to be trusted."""
    held_digest: int = 0
    adopted: int = -1
    """Version in the parameters; -1 before the first adoption."""
    known: int = -1
    """Newest version that the broker has announced."""
    round: msg.OpenRound | None = None
    """The broker's open round; None: there is none."""
    answered: tuple[int, int] = (-1, -1)
    """(base version, attempt) of the round that was pushed to or declined; (-1, -1): none."""
    push: Pushed | None = None
    fallen_back: bool = False
    """The broker's history differs from ours since its restart; its State replaces our copy."""
    unproven: bool = False
    """The State that is on its way names our last push in the history of a restarted broker."""
    fresh: bool = False
    """The published copy is newer than (or other than) the parameters."""
    applying: tuple[int, int] | None = None
    """(version, digest) of the published copy that a worker is making."""
    check_at: float = 0.0
    """Time at which a gap is looked for again."""
    delay_s: float = LEARNER_REPAIR_S
    progressed: bool = False
    """A useful chunk has come since the last look."""

    def __post_init__(self) -> None:
        self._arriving = Arriving(self.fragment)

    @property
    def index(self) -> int:
        return self.fragment.index

    @property
    def behind(self) -> bool:
        """The broker has a newer version than this host."""
        return self.known > self.held

    @property
    def unanswered(self) -> bool:
        """An open round has been neither answered with a push nor declined."""
        round_ = self.round
        return round_ is not None and self.answered != (round_.base_version, round_.attempt)

    # Downlink.

    def note_newest(self, version: int, now: float) -> None:
        """The broker says that `version` is its newest."""
        if version > self.known:
            if self.held >= 0 and not self.behind:
                # It is on its way; only what stays away for a while is asked for.
                self.check_at, self.progressed = now + self.delay_s, False
            self.known = version
        assert self.known >= version, "an older message never hides a newer version"

    def take(self, header: msg.Header, handle: int) -> list[ev.Effect]:
        """A decoded chunk of a publication or state."""
        # A version far beyond all that was announced cannot be the broker's.
        newest = max(self.held, self.known) + PUBLICATIONS_KEPT
        is_applying = self.applying is not None and self.applying[0] == header.version
        if not self.held < header.version <= newest or (
            is_applying and (header.kind, header.version) in self._arriving
        ):
            return [ev.Drop((handle,))]
        effects, is_new = self._arriving.add(header, handle)
        if not is_new:
            return effects
        # Publications beyond a gap are no progress: they come whether or not it is filled.
        next_one = self.held >= 0 and header.version == self.held + 1
        self.progressed |= next_one or header.kind is msg.DataKind.STATE
        return effects + self.apply_next()

    def apply_next(self) -> list[ev.Effect]:
        """Applies the next complete publication, or a complete newer state."""
        # One at a time: a publication builds on the copy that is being made.
        if self.applying is not None:
            return []
        key = self._arriving.next_complete(self.held)
        if key is None:
            return []
        kind, version = key
        assert version > self.held, (version, self.held)
        handles, digest = self._arriving.content(key)
        self.applying = (version, digest)
        return [ev.Apply(self.index, version, kind, handles, digest)]

    def applied(self, version: int, digest: int) -> list[ev.Effect]:
        """The published copy is `version` now; settles the push that it answers."""
        if self.applying != (version, digest):
            return []  # From before a broker restart.
        assert version > self.held, "the published copy only moves on within an epoch"
        self.applying = None
        merged_id = self._arriving.merged_push(version)
        if self.unproven:  # Pushes that were merged after that one are lost.
            self.account.roll_back(merged_id)
            push = self.push
            if push is not None and push.merged and push.announced.push_id > merged_id:
                self.push = None
            self.unproven = False
        self.held, self.held_digest, self.fresh = version, digest, True
        self.known = max(self.known, version)
        self.delay_s, self.progressed = LEARNER_REPAIR_S, False
        effects: list[ev.Effect] = [ev.Install(self.index, version)]
        # A state may have overtaken publications that were on their way.
        effects += self._arriving.forget(lambda _, other: other <= version)
        if self.push is not None and version > self.push.announced.base_version:
            effects += self.settle(merged=merged_id == self.push.announced.push_id)
        return effects + self.apply_next()

    def apply_failed(self, version: int, digest: int, reason: str) -> list[ev.Effect]:
        """The result is not the broker's copy: starts over from its state.

        With a `reason` there is no result: the chunks stay, and are applied later (see `ask`).
        """
        if self.applying != (version, digest):
            return []
        self.applying, self.progressed = None, False
        if reason:
            self.known = max(self.known, version)
            return []
        self.check_at = 0.0
        # A fresh copy that was not adopted yet is given up as well: the state is newer.
        self.held, self.fresh = -1, False
        note = f"fragment {self.index}: version {version} has another digest, fetching the state"
        return [*self.forget_all(), ev.Note("warning", note)]

    def ask(self, now: float, jitter: float) -> list[ev.Effect]:
        """Asks for the gap if nothing useful has arrived since the last look."""
        if not self.behind or self.applying is not None or now < self.check_at:
            return []
        self.check_at = now + self.delay_s * (1 + jitter)
        if self.progressed:
            self.progressed = False
            return []
        # The broker may be slow because it is busy: asking ever more often would keep it so.
        self.delay_s = min(self.delay_s * 2, REPAIR_MAX_S)
        if again := self.apply_next():
            return again
        if begun := self._arriving.missing(self.held):
            (kind, version), ranges = begun
            return [ev.Send(msg.Missing(kind, self.index, version, 0, ranges))]
        return [ev.Send(msg.Fetch(self.index, self.held))]

    # Uplink.

    def settle(self, *, merged: bool, refused: bool = False) -> list[ev.Effect]:
        """The outcome of the push is known."""
        assert not (merged and refused), "a push has one outcome"
        if self.push is None or not self.push.is_open:
            return []
        self.push.merged, self.push.refused = merged, refused
        return [ev.SettlePush(self.push.announced.push_id, merged)]

    def adopt(self) -> list[ev.Effect]:
        """The parameters take the published copy; every token since then gets its fate."""
        assert self.fresh and self.held >= 0, (self.fresh, self.held)
        push_id, merged, refused = self._outcome()
        # Its steps are replaced now: nothing can answer a push that is still open.
        effects = self.settle(merged=False)
        self.account.adopt(push_id, merged=merged, refused=refused, rolled_back=self.fallen_back)
        self.adopted, self.fresh, self.fallen_back, self.push = self.held, False, False, None
        if self.answered[0] == self.held:
            self.answered = (-1, -1)  # Declined after the first attempt to adopt it.
        assert self.account.tokens == self.account.steps == 0, self.account
        adopted = ev.Send(msg.Adopted(self.index, self.held))
        return [*effects, ev.Adopt(self.index, self.held), adopted]

    def _outcome(self) -> tuple[int, int, int]:
        """The id of the push, its tokens merged and its tokens refused; 0 without a push."""
        if self.push is None:
            return 0, 0, 0
        announced, tokens = self.push.announced, self.push.announced.tokens
        merged = tokens if self.push.merged else 0
        return announced.push_id, merged, tokens if self.push.refused else 0

    def adopt_failed(self, reason: str) -> list[ev.Effect]:
        """The parameters may hold half a copy: it is due again, and nothing is pushed before."""
        # Without a copy that can be trusted its state is on the way: that will be fresh.
        self.fresh = self.held >= 0
        return self.decline(reason)

    def close(self) -> list[ev.Effect]:
        """The learner leaves: drops what has arrived, accounts for the last push."""
        push_id, merged, refused = self._outcome()
        self.account.close(push_id, merged=merged, refused=refused)
        effects = [*self.settle(merged=False), *self.forget_all()]
        self.push = None
        assert not self.held_handles(), "a payload that nobody drops would leak"
        return effects

    def decline(self, reason: str) -> list[ev.Effect]:
        """Says that no contribution to the open round will come; once per round."""
        if self.round is None:
            return []
        answered = (self.round.base_version, self.round.attempt)
        # A round against another version is answered once that version is adopted.
        if self.answered == answered or self.round.base_version != self.adopted:
            return []
        self.answered = answered
        return [ev.Send(msg.Decline(self.index, *answered, reason))]

    def wants_snapshot(self, step: int, *, any_step: bool) -> bool:
        """True if the open round can be answered with a push at this boundary."""
        round_ = self.round
        return (
            round_ is not None
            and not self.fresh
            and round_.base_version == self.adopted == self.held
            and self.answered != (round_.base_version, round_.attempt)
            and self.account.steps > 0
            and self.account.tokens > 0
            and (any_step or step >= round_.at_step)
        )

    def snapshot(self, push_id: int) -> list[ev.Effect]:
        """Copies the fragment and announces the push."""
        round_ = self.round
        assert round_ is not None and round_.base_version == self.adopted, (round_, self.adopted)
        assert self.account.tokens > 0 and self.account.steps > 0, self.account
        assert self.push is None or push_id > self.push.announced.push_id, push_id
        effects = self.settle(merged=False)
        assert self.push is None or not self.push.is_open, "one open push per fragment"
        self.answered = (round_.base_version, round_.attempt)
        counts = (self.fragment.elements, self.account.tokens, self.account.steps)
        push = msg.Push(self.index, *self.answered, push_id, *counts)
        self.push = Pushed(push)
        return [*effects, ev.Snapshot(self.index, self.adopted, push_id), ev.Send(push)]

    def refused(self, refuse: msg.Refuse) -> list[ev.Effect]:
        """The broker does not take the push; often only because the round was over sooner."""
        if self.push is None or not self.push.is_open:
            return []
        assert refuse.push_id == self.push.announced.push_id, (refuse, self.push)
        text = f"push {refuse.push_id} of fragment {self.index} refused: {refuse.code}"
        late = refuse.code in (ErrorCode.STALE_BASE, ErrorCode.NO_ROUND)
        # A round that ends a moment before a push arrives is everyday life, no warning.
        note = ev.Note(
            "debug" if late else "warning", f"{text}: {refuse.message} {refuse.remedy}".rstrip()
        )
        return [*self.settle(merged=False, refused=True), note]

    def encode_failed(self, reason: str) -> list[ev.Effect]:
        """The push cannot be sent: declines instead."""
        # The push was the answer to the round; now it can only be declined.
        self.answered = (-1, -1)
        return [*self.settle(merged=False), *self.decline(reason)]

    # A new session.

    def welcomed(self, head: msg.FragmentHead, *, restarted: bool, now: float) -> list[ev.Effect]:
        """The broker admits this learner (again): compares versions, and repeats to the broker
        what a lost message may have told."""
        effects = self._new_epoch(head) if restarted else []
        # All that was on its way to the old connection is lost: a gap is asked for now.
        self.known, self.check_at = max(self.known, head.version), now
        if self.push is not None and self.push.is_open:
            effects.append(ev.Send(self.push.announced))
        else:
            self.answered = (-1, -1)  # A decline may have been lost with the old connection.
        if self.adopted >= 0 and self.adopted == self.held:
            effects.append(ev.Send(msg.Adopted(self.index, self.adopted)))
        return effects

    def _new_epoch(self, head: msg.FragmentHead) -> list[ev.Effect]:
        """Compares with the restarted broker: after another history its version replaces ours."""
        push = self.push
        # It may have been merged just before the end: the state of that version will say.
        may_be_merged = (
            push is not None and push.is_open
            and self.held < head.version and push.announced.base_version < head.version
        )  # fmt: skip
        effects = [] if may_be_merged else self.settle(merged=False)
        effects += self.forget_all()
        self.applying, self.round, self.answered = None, None, (-1, -1)
        self.known = head.version
        if self.held == head.version and self.held_digest == head.digest:
            if self.push is not None and not self.push.merged:
                self.push = None
            return effects
        if head.version < self.adopted or self.held >= head.version:
            self.fallen_back, self.push = True, None
        elif self.push is not None and not self.push.merged and not may_be_merged:
            self.push = None
        # Even a newer history may have left ours before our version: take the whole state.
        self.held, self.fresh, self.unproven = -1, False, True
        return effects

    def held_handles(self) -> list[int]:
        """Handles of the payloads that have arrived and are not applied."""
        return self._arriving.handles()

    def forget_all(self) -> list[ev.Effect]:
        """Drops everything that has arrived and is not applied."""
        return self._arriving.forget(lambda kind, version: True)

    def check(self) -> None:
        """Asserts the invariants that hold between any two events."""
        assert self.known >= self.held or self.held < 0, (self.known, self.held)
        assert not self.fresh or self.held >= 0
        if self.push is not None:
            assert self.push.announced.base_version == self.adopted >= 0
            assert self.push.announced.tokens <= self.account.tokens
            assert self.push.announced.steps <= self.account.steps
        assert not self.fallen_back or self.fresh or self.held < 0, "it holds a stale copy"
        assert self.applying is None or self.applying[0] > self.held, (self.applying, self.held)
        assert LEARNER_REPAIR_S <= self.delay_s <= REPAIR_MAX_S, self.delay_s
        assert not self.fallen_back or self.push is None, "its push is of a lost history"
