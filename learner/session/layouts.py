"""Tells this learner's layout in parts, and compares it with the run's after a refusal. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.learner.session import events as ev
from narrows.learner.session.identity import Identity
from narrows.proto.errors import ErrorCode, Refused, RemoteProtocolError
from narrows.proto.layout import JoinedLayout, check_layout, differences, split_layout
from narrows.proto.messages import AskLayout, LayoutPart, Refuse
from narrows.proto.refusal import error_of
from narrows.proto.timing import ASK_LAYOUT_S, LAYOUT_GONE_S
from narrows.proto.units import counted


@dataclass
class Layouts:
    """The layouts of one learner and of its run. Times are in seconds."""

    identity: Identity
    _refuse: Refuse | None = None
    """The refusal whose reason is looked for; None: there is none."""
    _run: JoinedLayout = field(default_factory=JoinedLayout)
    _ask_at: float = 0.0
    _came_at: float = 0.0

    @property
    def comparing(self) -> bool:
        """The broker has refused this layout, and its own is on its way."""
        return self._refuse is not None

    def heard(self, message: AskLayout | LayoutPart, now: float) -> list[ev.Effect]:
        """The broker asks for a part of this learner's layout, or tells one of the run's."""
        if isinstance(message, LayoutPart):
            self._take(message, now)
            return []
        parts = split_layout(self.identity.layout, self.identity.frozen_digest)
        return [ev.Send(parts[message.first])] if message.first < len(parts) else []

    def refused(self, refuse: Refuse, now: float) -> bool:
        """Begins to compare, if the broker has refused this very layout."""
        is_layout = refuse.code == ErrorCode.LAYOUT_MISMATCH
        if self.comparing or not is_layout or refuse.got != self.identity.fingerprint:
            return False
        self._refuse, self._run, self._ask_at, self._came_at = refuse, JoinedLayout(), now, now
        return True

    def _take(self, part: LayoutPart, now: float) -> None:
        try:
            if self.comparing and self._run.take(part):
                self._ask_at = self._came_at = now
        except RemoteProtocolError:
            # The broker contradicts itself: the refusal is all that is known.
            self._came_at = now - LAYOUT_GONE_S

    def advance(self, now: float) -> list[ev.Effect] | Refused:
        """Asks for the next part when it is time; returns the error once it is known, or nothing
        comes any more."""
        assert self._refuse is not None
        if self._run.complete:
            return self._compared(self._refuse)
        if now >= self._came_at + LAYOUT_GONE_S:
            return error_of(self._refuse)
        if now < self._ask_at:
            return []
        self._ask_at = now + ASK_LAYOUT_S
        return [ev.Send(AskLayout(self._run.next_part))]

    def next_deadline(self) -> float:
        """Time of the next question, or when no answer comes any more."""
        return min(self._ask_at, self._came_at + LAYOUT_GONE_S)

    def _compared(self, refuse: Refuse) -> Refused:
        """The refusal with the differences by name."""
        theirs, ours = tuple(self._run.entries), self.identity
        try:
            check_layout(theirs)
        except RemoteProtocolError:
            return error_of(refuse)
        different = differences(theirs, ours.layout)
        if not different and self._run.frozen_digest != ours.frozen_digest:
            different = ["the frozen (not trained) parameters differ"]
        return Refused(
            ErrorCode.LAYOUT_MISMATCH,
            refuse.message,
            expected=f"the run's layout of {counted(len(theirs), 'tensor')}",
            got="; ".join(different) or refuse.got,
            remedy=refuse.remedy,
        )
