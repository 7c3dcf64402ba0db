"""The past of a run as a page shows it, fed with one Status after another.

The broker knows the present. This module keeps the past within bounds, whatever a run takes and
however many learners it has, and says what a viewer has to draw: everything at first, then what the
newest Status has changed. It is pure: the time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from statistics import quantiles
from typing import Any, Final

from narrows.broker.page.words import figures, lane_text, run_line
from narrows.broker.verdict import (
    Verdict,
    duration,
    kept_out,
    learner_text,
    named,
    refusal_text,
    verdict,
)
from narrows.proto.errors import BrokerUnreachable, NarrowsError
from narrows.proto.messages import LearnerState, LearnerStatus, LineStatus, Phase, Status

BIN_S: Final = 5.0
"""Seconds of one bar of a lane."""
BINS_MAX: Final = 120
"""Bars of a lane: ten minutes."""
POINTS_MAX: Final = 600
"""Points of a line in a chart."""
CURVES_MAX: Final = 12
"""Learners with a curve of their own; of more, a chart shows the median and a band."""
NOTICES_MAX: Final = 40
REFUSALS_MAX: Final = 5
"""Notices of refusals, beside the others: peers that the broker does not know push out no news."""

LETTERS: Final[Mapping[str, str]] = {
    LearnerState.JOINING: "j",
    LearnerState.TRAINING: "t",
    LearnerState.PAUSED: "p",
    LearnerState.STALLED: "n",
    LearnerState.SILENT: "s",
    LearnerState.LOST: "l",
    LearnerState.LEFT: "x",
    LearnerState.REVOKED: "k",
    "line up cut": "c",
    "line down cut": "c",
}
"""A state as a lane has it; "?" is one that only a newer broker knows."""

Point = tuple[float | None, ...]


class Line:
    """Points of a chart, never more than POINTS_MAX: when they are too many, every second one goes,
    and from then on only each second, fourth, ... new one is kept."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.fresh: list[Point] = []
        """Points that the newest Status has added."""
        self._stride = 1
        self._skipped = 0

    def add(self, *point: float | None) -> None:
        self.fresh = []
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append(point)
        self.fresh = [point]
        if len(self.points) > POINTS_MAX:
            del self.points[1::2]
            self._stride *= 2


@dataclass
class Lane:
    """A learner's past, bin by bin; the last one is now."""

    states: deque[str] = field(default_factory=lambda: deque(maxlen=BINS_MAX))
    merged: deque[int] = field(default_factory=lambda: deque(maxlen=BINS_MAX))
    """Pushes."""
    told: dict[str, Any] = field(default_factory=dict)
    """As viewers have it."""

    def begin_bin(self, state: str) -> None:
        self.states.append(state)
        self.merged.append(0)


class History:
    """All that viewers see of a run."""

    def __init__(self, past: Iterable[tuple[str, int, float]] = ()) -> None:
        """`past` are learner, run tokens and loss of each push that was merged before the page
        began, in the order of the rounds."""
        self.status: Status | None = None
        self.verdict = Verdict("warning", "The broker has not been asked yet", "")
        self.is_answering = False
        self.is_reshaped = False
        """The newest Status takes something away: viewers need everything again."""
        self._gone_at = 0.0
        self._bin = 0
        self._lanes: dict[str, Lane] = {}
        self._changed: dict[str, dict[str, Any]] = {}
        self._rates = Line()
        self._band = Line()
        """Shown in place of curves, once there are more than CURVES_MAX."""
        self._curves: dict[str, Line] = {}
        self._is_crowded = False
        """More than CURVES_MAX learners have told a loss so far: the band takes their place."""
        self._notices: deque[tuple[float, str]] = deque(maxlen=NOTICES_MAX)
        self._fresh_notices: list[tuple[float, str]] = []
        self._refusals: deque[tuple[float, str]] = deque(maxlen=REFUSALS_MAX)
        self._published_elements = 0.0
        """Elements of publications since the first Status, once for each learner that was here."""
        self._down_bytes = 0
        for tokens, pushes in groupby(past, key=itemgetter(1)):
            self._add_losses(tokens, {name: loss for name, _, loss in pushes})

    # What happens.

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, and nobody lacks its final model: the broker may go."""
        return (
            self.status is not None and self.status.phase == Phase.ENDED and not self.status.awaited
        )

    def failed(self, error: Exception, now: float) -> None:
        """The broker did not answer, or not with what it was asked for."""
        self._begin_change()
        was_answering = self.is_answering
        if was_answering or not self._gone_at:
            self._gone_at = now
        self.is_answering = False
        if self.has_ended:
            return  # The broker has ended with its run: the last sentence stays true.
        if was_answering:
            self._notice("the broker does not answer", now)
            for name, lane in self._lanes.items():
                lane.told["text"] = "not known while the broker is away"
                self._changed[name] = lane.told
        since = duration(now - self._gone_at)
        text = f"This page has had no answer from the broker for {since}: {error}"
        remedy = "It asks again and again"
        if isinstance(error, BrokerUnreachable):
            text = f"The broker has not answered for {since}"
            remedy = (
                f"{error.message}. It ends with its run. If the run goes on, start it again"
                " with its state directory: learners train on, and this page goes on by itself."
            )
        elif isinstance(error, NarrowsError):
            text = f"The broker does not answer this page: {error.message}"
            remedy = error.remedy
        self.verdict = Verdict("bad", text, remedy)

    def take(self, status: Status, now: float) -> None:
        """The broker's newest answer; `now` is in Unix seconds."""
        self._begin_change()
        before = self.status
        if before is not None:
            self._tell_broker(before, status, now)
        self._take_lanes(before, status, now)
        self._take_loss(status)
        self._rates.add(now, status.line.up_bits_per_s, status.line.down_bits_per_s)
        if before is not None and before.epoch == status.epoch:
            merges = status.merges - before.merges
            self._published_elements += merges * _mean_elements(status) * status.quorum.here
            self._down_bytes += status.line.down_bytes - before.line.down_bytes
        self.status = status
        self.is_answering = True
        self.verdict = verdict(status)

    def _begin_change(self) -> None:
        self.is_reshaped = False
        self._changed = {}
        self._fresh_notices = []
        for line in (self._rates, self._band, *self._curves.values()):
            line.fresh = []

    def _tell_broker(self, before: Status, status: Status, now: float) -> None:
        if not self.is_answering:
            away = duration(now - self._gone_at)
            self._notice(f"the broker is back after {away}", now)
        elif before.epoch != status.epoch:
            self._notice("the broker has started again", now)
        if before.phase != status.phase:
            self._notice(f"the run is {status.phase}", now)
        known = {(each.learner, each.code) for each in kept_out(before)}
        self._refusals.extend(
            (now, refusal_text(each))
            for each in kept_out(status)
            if (each.learner, each.code) not in known
        )
        if status.disk.error and not before.disk.error:
            self._notice(f"the disk refuses what is written: {status.disk.error}", now)
        if before.disk.error and not status.disk.error:
            self._notice("the disk takes what is written again", now)

    def _take_lanes(self, before: Status | None, status: Status, now: float) -> None:
        number = int(now / BIN_S)
        begun = number - self._bin if self._bin else 1
        self._bin = number
        for lane in self._lanes.values():
            for _ in range(min(begun, BINS_MAX)):
                # A bin that nobody has seen: the broker was away.
                lane.begin_bin(lane.states[-1] if self.is_answering else "?")
        # Viewers would draw an outage as the last state.
        self.is_reshaped = before is not None and not self.is_answering
        for name in self._lanes.keys() - status.learners.keys():
            del self._lanes[name]
            self.is_reshaped = True

        moved: dict[str, list[str]] = {}
        for name, learner in status.learners.items():
            if name not in self._lanes:
                self._lanes[name] = Lane()
                self._lanes[name].begin_bin("?")
            lane = self._lanes[name]
            word, _ = learner_text(learner)
            letter = LETTERS.get(word, "?")
            lane.states[-1] = letter
            lane.merged[-1] += _merged_pushes(name, before, learner)
            row = {"state": letter, "text": lane_text(learner), "merged": lane.merged[-1]}
            if row != lane.told or not self.is_answering:
                lane.told = self._changed[name] = row
            was = before.learners.get(name) if before else None
            if was is None or learner_text(was)[0] != word:
                moved.setdefault(word, []).append(name)
        if before is not None:
            for state, names in moved.items():
                self._notice(f"{named(names)}: {state}", now)

    def _take_loss(self, status: Status) -> None:
        losses = {
            name: each.loss
            for name, each in status.learners.items()
            if each.loss is not None and each.state == LearnerState.TRAINING
        }
        if losses:
            self._add_losses(status.run_tokens, losses)

    def _add_losses(self, run_tokens: int, losses: Mapping[str, float]) -> None:
        values = [*losses.values()] * (2 if len(losses) == 1 else 1)  # Of one are no quantiles.
        tenths = quantiles(values, n=10, method="inclusive")
        self._band.add(run_tokens, tenths[0], tenths[4], tenths[8])
        if self._is_crowded:
            return
        for name, loss in losses.items():
            self._curves.setdefault(name, Line()).add(run_tokens, loss)
        if len(self._curves) > CURVES_MAX:
            self._curves.clear()
            self._is_crowded = self.is_reshaped = True

    def _notice(self, text: str, now: float) -> None:
        self._fresh_notices.append((now, text))
        self._notices.append((now, text))

    # What viewers draw.

    def everything(self) -> dict[str, Any]:
        """For a viewer that knows nothing yet."""
        return self._head() | {
            "bin_s": BIN_S,
            "rates": self._rates.points,
            "band": self._band.points if self._is_crowded else [],
            "curves": {name: line.points for name, line in self._curves.items()},
            "notices": list(self._notices),
            "learners": {
                name: {
                    "text": lane.told.get("text", ""),
                    "states": "".join(lane.states),
                    "merged": list(lane.merged),
                }
                for name, lane in self._lanes.items()
            },
        }

    def change(self) -> dict[str, Any]:
        """For a viewer that has seen everything before the newest answer."""
        return self._head() | {
            "rates": self._rates.fresh,
            "band": self._band.fresh if self._is_crowded else [],
            "curves": {name: line.fresh for name, line in self._curves.items() if line.fresh},
            "notices": self._fresh_notices,
            "learners": self._changed,
        }

    def _head(self) -> dict[str, Any]:
        status = self.status
        head: dict[str, Any] = {
            "sentence": {
                "level": self.verdict.level,
                "text": self.verdict.text,
                "remedy": self.verdict.remedy,
            },
            "bin": self._bin,
            "refusals": list(self._refusals),
            "run": "",
            "figures": [],
            "fragments": [],
            "limits": [],
        }
        if status is None:
            return head
        wire_bits = None
        if self._published_elements:
            wire_bits = 8 * self._down_bytes / self._published_elements
        return head | {
            "run": run_line(status),
            "figures": figures(status, down_wire_bits_per_param=wire_bits),
            "limits": _limits(status.line),
            "fragments": [
                [f"{index}: version {each.version}", _round_text(each.stage, each.pushes)]
                for index, each in enumerate(status.fragments)
            ],
        }


def _mean_elements(status: Status) -> float:
    return sum(each.elements for each in status.fragments) / max(1, len(status.fragments))


def _merged_pushes(name: str, before: Status | None, learner: LearnerStatus) -> int:
    """Pushes of a learner that were merged since the Status before; none at its first one."""
    was = before.learners.get(name) if before else None
    if was is None or was.incarnation != learner.incarnation:
        return 0
    return max(0, learner.contributions - was.contributions)


def _round_text(stage: str, pushes: int) -> str:
    return "" if stage == "idle" else f"{stage} {pushes}"


def _limits(line: LineStatus) -> list[dict[str, Any]]:
    """The budget of the broker's line, to be drawn beside what crosses it."""
    limits = {"budget up": line.total_up_limit, "budget down": line.total_down_limit}
    if line.total_up_limit == line.total_down_limit:
        limits = {"budget, each way": line.total_up_limit}
    return [{"name": name, "bits_per_s": limit} for name, limit in limits.items() if limit]
