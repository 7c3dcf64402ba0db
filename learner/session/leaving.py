"""Decides when a learner may leave, and tells what it lacks if it leaves too soon. [pure]

In the phases ending and ended a broker that speaks decides: it waits for its learners by the rule
of `proto.flow.Patience`, and says Bye when it is done. By the same rule a learner waits for a
broker that has gone, and for the outcome of its last pushes when it leaves a run that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.learner.session import events as ev
from narrows.learner.session.fragment import FragmentSession
from narrows.learner.session.fragments import FragmentSessions
from narrows.proto import messages as msg
from narrows.proto import timing
from narrows.proto.flow import Flow, Patience, Way, push_bytes_max
from narrows.proto.smoothing import Smoothed

LACKS_CHARACTERS_MAX: Final = 200
"""Limit for the list in logs and in the Bye; there may be thousands of fragments."""


@dataclass
class Leaving:
    """The end as the learner sees it. Times are seconds on the caller's monotonic clock."""

    asked: bool = False
    """The training loop is over."""
    final: bool = False
    """The learner has left, and its parameters are the run's final model."""
    copying: bool = False
    """The training thread makes copies now: it has not said yet whether one fails."""
    lacks: str = ""
    """For the user: what the learner has left without, "" for nothing."""
    _asked_at: float = 0.0
    _by: float = math.inf
    _codec: str = ""
    _bits_per_s: float = 0.0
    """Rate at which the learner may send; 0: no limit."""
    _round_s: Smoothed = field(default_factory=Smoothed)
    """Time from the snapshot of a push to its outcome."""
    _up: Flow = field(default_factory=Flow)
    _pushed_at: dict[int, float] = field(default_factory=dict[int, float])
    """Time of the snapshot by id of each push whose outcome is open."""
    _patience: Patience | None = None
    """With the broker, about the outcome of a push; each outcome begins it anew."""

    def ask(self, within_s: float, now: float) -> None:
        """The loop has ended; the learner is to be gone after `within_s` whatever happens."""
        self.asked, self.copying, self._asked_at, self._by = True, False, now, now + within_s

    def note(self, effects: Sequence[ev.Effect], now: float) -> None:
        """Learns from the session's effects how long a push usually takes."""
        for effect in effects:
            match effect:
                case ev.Snapshot(push_id=push_id):
                    assert push_id not in self._pushed_at, f"push {push_id} is made twice"
                    self._up.expect(now, anew=not self._pushed_at)
                    self._pushed_at[push_id] = now
                case ev.SettlePush(push_id):
                    if (pushed_at := self._pushed_at.pop(push_id, None)) is not None:
                        self._round_s.add(now - pushed_at)
                    # An outcome is progress: patience with the other pushes begins anew.
                    self._patience = None
                case ev.Acknowledge(positions):
                    self._up.move(positions, now)
                case ev.OpenStreams(settings):
                    self._codec = settings.push_codec
                case ev.SetRate(bits_per_s):
                    self._bits_per_s = bits_per_s
                case _:
                    pass

    def may_go(
        self, phase: msg.Phase, fragments: FragmentSessions, silent_s: float | None, now: float
    ) -> bool:
        """True if nothing is open any more, or was waited for long enough.

        `silent_s`: seconds since the broker was last heard; None while it is here.
        """
        if not self.asked or self.copying:
            return False
        if phase is msg.Phase.ENDED and not fragments.unfinished:
            self.final = True
            return True
        # The caller's own limit stands above everything: a user who set one wants to leave.
        if now >= self._by:
            return True
        if silent_s is not None:
            # Only the final model is worth waiting for a broker that is gone.
            absence = self._patience_from(max(now - silent_s, self._asked_at))
            return not is_ending(phase) or now >= absence.until(now)
        # In a run that ends, a broker that is here says when it is over.
        if is_ending(phase) or not fragments.pushing:
            return not is_ending(phase)
        if self._patience is None:
            sizes = [
                push_bytes_max(self._codec, each.fragment.elements) for each in fragments.pushing
            ]
            self._patience = self._patience_from(now, Way(self._up, sum(sizes)))
        # The rate may have changed since the push was made.
        for way in self._patience.ways:
            way.limit_bytes_per_s = self._bits_per_s / 8 or math.inf
        return now >= self._patience.until(now)

    def _patience_from(self, begun_at: float, *ways: Way) -> Patience:
        return Patience(begun_at, self._round_s.mean, timing.BROKER_GONE_S, ways)

    def waits_for(self, phase: msg.Phase, fragments: FragmentSessions) -> str:
        """For the user's log: the thing that keeps the learner from leaving."""
        if phase is msg.Phase.ENDING:
            return "the last rounds of the run"
        if phase is msg.Phase.ENDED:
            return f"the final versions of {_fragments(fragments.unfinished)}"
        return f"the outcome of its last pushes, of {_fragments(fragments.pushing)}"

    def go(self, phase: msg.Phase, fragments: FragmentSessions) -> list[ev.Effect]:
        """The learner leaves now; warns the user if it leaves without something."""
        if not self.final and (is_ending(phase) or fragments.pushing):
            self.lacks = self.waits_for(phase, fragments)[:LACKS_CHARACTERS_MAX]
        assert not (self.final and self.lacks), self.lacks
        return [ev.Note("warning", f"leaves without {self.lacks}")] if self.lacks else []

    def reason(self, phase: msg.Phase) -> str:
        """The reason that the Bye gives to the broker."""
        what = f"the {'run' if phase is msg.Phase.ENDED else 'loop'} has ended"
        return f"{what}, it leaves without {self.lacks}" if self.lacks else what


def is_ending(phase: msg.Phase) -> bool:
    """The goal is reached: no further inner step counts."""
    return phase in (msg.Phase.ENDING, msg.Phase.ENDED)


def _fragments(fragments: Sequence[FragmentSession]) -> str:
    indices = ", ".join(str(each.index) for each in fragments)
    return f"fragment {indices}" if len(fragments) == 1 else f"fragments {indices}"
