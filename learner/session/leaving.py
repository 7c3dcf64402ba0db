"""When a learner may go, how long it waits for that, and what it lacks if it goes sooner. [pure]

In the phases ending and ended a broker that speaks decides: it waits for its learners by the rule
of `proto.patience`, and says Bye when it is done. What a learner itself waits for by that rule is
a broker that has gone, and the outcome of its last pushes when it leaves a run that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.learner.session import events as ev
from narrows.learner.session.fragment import Link
from narrows.learner.session.fragments import Links
from narrows.proto import messages as msg
from narrows.proto import timing
from narrows.proto.flow import Flow, Patience, Way, push_bytes_max
from narrows.proto.smoothing import Smoothed

LACKS_CHARACTERS_MAX: Final = 200
"""Of what is said in logs and in the Bye; there may be thousands of fragments."""


@dataclass
class Leaving:
    """The end as the learner sees it. Seconds on the caller's monotonic clock."""

    asked: bool = False
    """The training loop is over."""
    final: bool = False
    """The learner has left, and its parameters are the run's final model."""
    copying: bool = False
    """The training thread adopts copies now: it has not said yet whether one fails."""
    lacks: str = ""
    """What the learner has left without, "" for nothing."""
    _asked_at: float = 0.0
    _by: float = math.inf
    _codec: str = ""
    _bits_per_s: float = 0.0
    """What the learner may send; 0: no limit."""
    _round_s: Smoothed = field(default_factory=Smoothed)
    """From the snapshot of a push to its outcome."""
    _up: Flow = field(default_factory=Flow)
    _pushed_at: dict[int, float] = field(default_factory=dict[int, float])
    """When the pushes were snapshot whose outcome is open, by id."""
    _patience: Patience | None = None
    """With the broker, about the outcome of a push; each outcome begins it anew."""

    def ask(self, within_s: float, now: float) -> None:
        """The loop has ended; the learner is to be gone after `within_s` whatever happens."""
        self.asked, self.copying, self._asked_at, self._by = True, False, now, now + within_s

    def note(self, effects: Sequence[ev.Effect], now: float) -> None:
        """Learns what is usual from what the session does."""
        for effect in effects:
            match effect:
                case ev.Snapshot(push_id=push_id):
                    self._up.expect(now, anew=not self._pushed_at)
                    self._pushed_at[push_id] = now
                case ev.SettlePush(push_id):
                    if (pushed_at := self._pushed_at.pop(push_id, None)) is not None:
                        self._round_s.add(now - pushed_at)
                    self._patience = None
                case ev.Acknowledge(positions):
                    self._up.move(positions, now)
                case ev.OpenStreams(settings):
                    self._codec = settings.push_codec
                case ev.SetRate(bits_per_s):
                    self._bits_per_s = bits_per_s
                case _:
                    pass

    def may_go(self, phase: msg.Phase, links: Links, silent_s: float | None, now: float) -> bool:
        """Nothing is open any more, or it has been waited for long enough.

        `silent_s`: for how long a broker that is gone has been; None: it is here.
        """
        if not self.asked or self.copying:
            return False
        if phase is msg.Phase.ENDED and not links.unfinished:
            self.final = True
            return True
        if now >= self._by:
            return True
        if silent_s is not None:
            absence = self._patience_from(max(now - silent_s, self._asked_at))
            return not is_ending(phase) or now >= absence.until(now)
        if is_ending(phase) or not links.pushing:
            return not is_ending(phase)
        if self._patience is None:
            sizes = [push_bytes_max(self._codec, each.fragment.elements) for each in links.pushing]
            self._patience = self._patience_from(now, Way(self._up, sum(sizes)))
        for way in self._patience.ways:
            way.limit_bytes_per_s = self._bits_per_s / 8 or math.inf
        return now >= self._patience.until(now)

    def _patience_from(self, begun_at: float, *ways: Way) -> Patience:
        return Patience(begun_at, self._round_s.mean, timing.BROKER_GONE_S, ways)

    def waits_for(self, phase: msg.Phase, links: Links) -> str:
        """What keeps the learner, for its user."""
        if phase is msg.Phase.ENDING:
            return "the last rounds of the run"
        if phase is msg.Phase.ENDED:
            return f"the final versions of {_fragments(links.unfinished)}"
        return f"the outcome of its last pushes, of {_fragments(links.pushing)}"

    def go(self, phase: msg.Phase, links: Links) -> list[ev.Effect]:
        """The learner leaves now: what it leaves without is told."""
        if not self.final and (is_ending(phase) or links.pushing):
            self.lacks = self.waits_for(phase, links)[:LACKS_CHARACTERS_MAX]
        return [ev.Note("warning", f"leaves without {self.lacks}")] if self.lacks else []

    def reason(self, phase: msg.Phase) -> str:
        """Of the Bye."""
        what = f"the {'run' if phase is msg.Phase.ENDED else 'loop'} has ended"
        return f"{what}, it leaves without {self.lacks}" if self.lacks else what


def is_ending(phase: msg.Phase) -> bool:
    """The goal is reached: no further inner step counts."""
    return phase in (msg.Phase.ENDING, msg.Phase.ENDED)


def _fragments(links: Sequence[Link]) -> str:
    indices = ", ".join(str(link.index) for link in links)
    return f"fragment {indices}" if len(links) == 1 else f"fragments {indices}"
