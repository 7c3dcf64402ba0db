"""One fragment as a learner sees it: what it holds, what is arriving, what it has pushed. [pure]"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from narrows.learner import events as ev
from narrows.learner.ledger import FragmentAccount
from narrows.proto import messages as msg
from narrows.proto.assembly import Arrival, Assembly
from narrows.proto.errors import RemoteProtocolError
from narrows.proto.fragments import Fragment
from narrows.proto.limits import PUBLICATIONS_KEPT

REPAIR_S = 0.5
REPAIR_MAX_S = 8.0
"""What is missing is asked for after REPAIR_S without progress, then twice as late each time."""


@dataclass
class Pushed:
    """A push of ours whose outcome is open (None), or known until the next adoption."""

    announced: msg.Push
    merged: bool | None = None
    refused: bool = False


@dataclass
class _Incoming:
    assembly: Assembly
    digest: int
    push_id: int


@dataclass
class Link:
    """The exchange of one fragment."""

    fragment: Fragment
    account: FragmentAccount
    held: int = -1
    """Version of the published copy on this host; -1: none, or not to be trusted."""
    held_digest: int = 0
    adopted: int = -1
    """Version in the parameters; -1 before the first adoption."""
    known: int = -1
    """Newest version that the broker has told."""
    round: msg.OpenRound | None = None
    answered: tuple[int, int] = (-1, -1)
    """(base version, attempt) that was pushed to or declined."""
    push: Pushed | None = None
    fallen_back: bool = False
    """The broker's history differs from ours since its restart; its State replaces our copy."""
    fresh: bool = False
    """The published copy is newer than (or other than) the parameters."""
    applying: tuple[int, int] | None = None
    """(version, digest) of the published copy that a worker is making."""
    check_at: float = 0.0
    delay_s: float = REPAIR_S
    progressed: bool = False
    _incoming: dict[tuple[msg.DataKind, int], _Incoming] = field(
        default_factory=dict[tuple[msg.DataKind, int], _Incoming]
    )

    @property
    def index(self) -> int:
        return self.fragment.index

    @property
    def behind(self) -> bool:
        return self.known > self.held

    # Downlink.

    def take(self, header: msg.Header, handle: int) -> list[ev.Effect]:
        """A decoded chunk of a publication or state."""
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        newest = max(self.held, self.known) + PUBLICATIONS_KEPT
        if not self.held < header.version <= newest:
            return drop
        key = (header.kind, header.version)
        incoming = self._incoming.get(key)
        if incoming is None or incoming.digest != header.result_digest:
            drop = [ev.Drop(incoming.assembly.handles)] if incoming else []
            assembly = Assembly(self.fragment.elements)
            incoming = _Incoming(assembly, header.result_digest, header.push_id)
            self._incoming[key] = incoming
        else:
            drop = []
        incoming.push_id = max(incoming.push_id, header.push_id)
        try:
            arrival = incoming.assembly.add(
                header.offset, header.count, header.payload_digest, handle
            )
        except RemoteProtocolError as error:
            note = ev.Note("warning", f"fragment {self.index}: {error}")
            return [*drop, ev.Drop((handle,)), note]
        self.progressed = True
        if arrival is Arrival.DUPLICATE:
            drop.append(ev.Drop((handle,)))
        return drop + self.apply_next()

    def apply_next(self) -> list[ev.Effect]:
        """Applies the next complete publication, or a complete newer state."""
        if self.applying is not None:
            return []
        states = [
            version
            for (kind, version), incoming in self._incoming.items()
            if kind is msg.DataKind.STATE and incoming.assembly.complete and version > self.held
        ]
        key = (msg.DataKind.PUBLICATION, self.held + 1)
        following = self._incoming.get(key)
        if states:
            key = (msg.DataKind.STATE, max(states))
        elif self.held < 0 or following is None or not following.assembly.complete:
            return []
        incoming = self._incoming[key]
        self.applying = (key[1], incoming.digest)
        handles = incoming.assembly.handles
        return [ev.Apply(self.index, key[1], key[0], handles, incoming.digest)]

    def applied(self, version: int, digest: int) -> list[ev.Effect]:
        """The published copy is `version` now; settles the push that it answers."""
        if self.applying != (version, digest):
            return []  # From before a broker restart.
        self.applying = None
        told = max((i.push_id for (_, v), i in self._incoming.items() if v == version), default=0)
        self.held, self.held_digest, self.fresh = version, digest, True
        self.known = max(self.known, version)
        self.delay_s, self.progressed = REPAIR_S, False
        effects: list[ev.Effect] = [ev.Install(self.index, version)]
        effects += self._forget(lambda v: v <= version)
        if self.push is not None and version > self.push.announced.base_version:
            effects += self.settle(merged=told == self.push.announced.push_id)
        return effects + self.apply_next()

    def apply_failed(self, version: int, digest: int) -> list[ev.Effect]:
        """The result was not what the broker has: start over from its state."""
        if self.applying != (version, digest):
            return []
        self.applying = None
        self.held = -1
        self.check_at = 0.0
        note = f"fragment {self.index}: version {version} has another digest, fetching the state"
        return [*self._forget(lambda v: True), ev.Note("warning", note)]

    def ask(self, now: float, jitter: float) -> list[ev.Effect]:
        """Asks for what is missing if nothing has arrived since the last look."""
        if not self.behind or self.applying is not None or now < self.check_at:
            return []
        self.check_at = now + self.delay_s * (1 + jitter)
        if self.progressed:
            self.progressed = False
            return []
        self.delay_s = min(self.delay_s * 2, REPAIR_MAX_S)
        for (kind, version), incoming in sorted(self._incoming.items()):
            if kind is msg.DataKind.STATE or version == self.held + 1:
                ranges = incoming.assembly.missing()
                return [ev.Send(msg.Missing(kind, self.index, version, 0, ranges))]
        return [ev.Send(msg.Fetch(self.index, self.held))]

    # Uplink.

    def settle(self, *, merged: bool, refused: bool = False) -> list[ev.Effect]:
        """The outcome of the push is known."""
        if self.push is None or self.push.merged is not None:
            return []
        self.push.merged, self.push.refused = merged, refused
        return [ev.SettlePush(self.push.announced.push_id, merged)]

    def adopt(self) -> list[ev.Effect]:
        """The parameters take the published copy; every token since has its fate."""
        push, merged, refused = self.push, 0, 0
        if push is not None:
            merged = push.announced.tokens if push.merged else 0
            refused = push.announced.tokens if push.refused else 0
        effects = self.settle(merged=False)
        self.account.adopt(self.held, merged=merged, refused=refused, rolled_back=self.fallen_back)
        self.adopted, self.fresh, self.fallen_back, self.push = self.held, False, False, None
        adopted = ev.Send(msg.Adopted(self.index, self.held))
        return [*effects, ev.Adopt(self.index, self.held), adopted]

    def decline(self, reason: str) -> list[ev.Effect]:
        """Tells that no contribution to the open round will come; once per round."""
        if self.round is None:
            return []
        answered = (self.round.base_version, self.round.attempt)
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
            and not self.fallen_back
            and round_.base_version == self.adopted == self.held
            and self.answered != (round_.base_version, round_.attempt)
            and self.account.steps > 0
            and self.account.tokens > 0
            and (any_step or step >= round_.at_step)
        )

    def snapshot(self, push_id: int) -> list[ev.Effect]:
        """Copies the fragment and announces the push."""
        round_ = self.round
        assert round_ is not None
        effects = self.settle(merged=False)
        self.answered = (round_.base_version, round_.attempt)
        push = msg.Push(
            self.index,
            *self.answered,
            push_id,
            self.fragment.elements,
            self.account.tokens,
            self.account.steps,
        )
        self.push = Pushed(push)
        return [*effects, ev.Snapshot(self.index, self.adopted, push_id), ev.Send(push)]

    # A new epoch.

    def new_epoch(self, head: msg.FragmentHead) -> list[ev.Effect]:
        """Compares with the restarted broker: another history means going back to its version."""
        effects = self.settle(merged=False)
        self.push, self.answered, self.round = None, (-1, -1), None
        effects += self._forget(lambda version: True)
        self.applying = None
        older = head.version > self.held and not self.fallen_back
        same = head.version == self.held and head.digest == self.held_digest
        self.known = head.version
        if self.held >= 0 and not older and not same:
            self.account.roll_back(head.version)
            self.held, self.fallen_back = -1, True
            text = f"fragment {self.index}: back to the broker's version {head.version}"
            effects.append(ev.Note("warning", text))
        elif older and self.held >= 0:
            # Its history may have left ours before our version: take the whole state.
            self.held = -1
        self.check_at = 0.0
        return effects

    def _forget(self, unwanted: Callable[[int], bool]) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for key in sorted(self._incoming):
            if unwanted(key[1]):
                effects.append(ev.Drop(self._incoming.pop(key).assembly.handles))
        return effects
