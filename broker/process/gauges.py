"""Gauges of the host, for its Status: rates of the line, and who was refused. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.process.downlink import Downlink
from narrows.broker.syncer.status import REFUSED_MAX, REFUSED_S
from narrows.broker.verdict import SESSION_CODES
from narrows.proto.messages import (
    TEXT_CHARACTERS_MAX,
    LearnerStatus,
    LineStatus,
    RefusalStatus,
)

SAMPLE_S: Final = 5.0
"""Seconds between two readings of the counters of bytes. Rates are told over three of them."""

FULL_SHARE: Final = 0.8
"""Share of a limit from which on it counts as used up: repairs, bursts and, of a small limit, beats
need the rest. Two learners with 200 kbit/s and far more to push were measured at 0.85."""


class _Reading(NamedTuple):
    """The counters of bytes at one time."""

    at: float
    line_up: int
    line_down: int
    up: dict[str, int]
    asked: dict[str, int]
    live: int


class Meter:
    """Counts what passes the line, and how fast, in all and by learner."""

    def __init__(self, config: BrokerConfig, downlink: Downlink, now: float) -> None:
        self._wan = config.wan
        self._downlink = downlink
        self.up_bytes: Counter[str] = Counter()
        """Payloads of this life, by learner."""
        self._readings = deque([self._read(now)], maxlen=4)
        self._up_spare_at = self._down_spare_at = now
        """When a limit of the line was not used up last."""

    def turn(self, learners: int, now: float) -> None:
        """Reads the counters if it is time to; called often."""
        if now < self._readings[-1].at + SAMPLE_S:
            return
        before = self._readings[-1]
        newest = self._read(now)
        self._readings.append(newest)
        bits_per_s_bytes = 8 / (newest.at - before.at)
        wan = self._wan
        up_limit = _limit(wan.up * learners, wan.total_up)
        down_limit = _limit(wan.down * learners, wan.total_down)
        if bits_per_s_bytes * (newest.line_up - before.line_up) < FULL_SHARE * up_limit:
            self._up_spare_at = now
        if bits_per_s_bytes * (newest.line_down - before.line_down) < FULL_SHARE * down_limit:
            self._down_spare_at = now

    def _read(self, now: float) -> _Reading:
        down = self._downlink
        sender = down.sender
        up = dict(self.up_bytes)
        asked = dict(down.asked_bytes)
        return _Reading(now, sender.received_bytes, sender.sent_bytes, up, asked, down.live_bytes)

    def line(self, line: LineStatus, now: float) -> LineStatus:
        """The line, with its limits known already."""
        oldest = self._readings[0]
        sender = self._downlink.sender
        scale = 8 / max(now - oldest.at, SAMPLE_S)
        return structs.replace(
            line,
            up_bits_per_s=scale * (sender.received_bytes - oldest.line_up),
            down_bits_per_s=scale * (sender.sent_bytes - oldest.line_down),
            up_bytes=sender.received_bytes,
            down_bytes=sender.sent_bytes,
            up_full_s=max(0.0, self._readings[-1].at - self._up_spare_at),
            down_full_s=max(0.0, self._readings[-1].at - self._down_spare_at),
        )

    def describe(self, learners: Mapping[str, LearnerStatus], now: float) -> None:
        """Adds the bytes and rates of each learner, in place."""
        oldest = self._readings[0]
        down = self._downlink
        scale = 8 / max(now - oldest.at, SAMPLE_S)
        live_before = oldest.live
        for name, learner in learners.items():
            up = self.up_bytes[name]
            asked = down.asked_bytes[name]
            learner.up_bytes = up
            learner.down_bytes = asked + down.live_bytes
            learner.up_bits_per_s = scale * (up - oldest.up.get(name, 0))
            asked_since = asked - oldest.asked.get(name, 0)
            learner.down_bits_per_s = scale * (asked_since + down.live_bytes - live_before)


class Refusals:
    """Remembers who was refused lately, and counts the refusals by code."""

    def __init__(self) -> None:
        self.by_code: Counter[str] = Counter()
        self._newest: dict[tuple[str, str], tuple[str, float, int]] = {}
        """(learner, code) -> words, time and number; the newest last, REFUSED_MAX at most."""

    def count(self, learner: str, code: str, text: str, now: float) -> None:
        self.by_code[code] += 1
        _, _, times = self._newest.pop((learner, code), ("", now, 0))
        self._newest[learner, code] = (text[:TEXT_CHARACTERS_MAX], now, times + 1)
        if len(self._newest) > REFUSED_MAX:
            del self._newest[next(iter(self._newest))]

    def admitted(self, learner: str) -> None:
        """Forgets what kept a learner out that has joined now."""
        for code in SESSION_CODES:
            self._newest.pop((learner, code), None)

    def newest(self, now: float) -> list[RefusalStatus]:
        """Those of the last REFUSED_S, the newest last."""
        return [
            RefusalStatus(learner, code, text, now - at, times)
            for (learner, code), (text, at, times) in self._newest.items()
            if now < at + REFUSED_S
        ]


def _limit(*limits: float) -> float:
    """The lowest of some limits; in the settings 0 is none."""
    return min((limit for limit in limits if limit), default=math.inf)
