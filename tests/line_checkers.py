"""Rules for everything that simulated processes put on their lines.

It is measured where it leaves the sender. Nothing is taken from the sender's own books.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from narrows.bench.sim.line import Acknowledged, Crossing, LineRoute
from narrows.proto.timing import RATE_BURST_S, RATE_WINDOW_S, STANDSTILL_S

LineLog = Sequence[Crossing | Acknowledged]


def check_lines(log: LineLog, window_bytes: int) -> None:
    """Everything below."""
    check_rates(log)
    check_total_down(log)
    check_total_up(log)
    check_credit(log, window_bytes)


@dataclass
class _Window:
    """The crossings of the second that ends now."""

    crossings: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    size_bytes: int = 0

    def add(self, at_s: float, size_bytes: int) -> int:
        while self.crossings and self.crossings[0][0] <= at_s - RATE_WINDOW_S:
            self.size_bytes -= self.crossings.popleft()[1]
        self.crossings.append((at_s, size_bytes))
        self.size_bytes += size_bytes
        return self.size_bytes


def check_rates(log: LineLog) -> None:
    """No second that ends with a data message carries more than the rate and that message, neither
    from a learner process nor from a life of the broker to a learner.

    Control messages are counted. They never wait, so a second that ends with one is not judged.
    """
    windows = defaultdict[Hashable, _Window](_Window)
    for each in log:
        if isinstance(each, Crossing) and each.limit_bits_per_s:
            # A process that a broker admits again still has its budget; a new broker has another.
            route = each.route
            process = route.incarnation if route.up else route.broker
            second_bytes = windows[route.up, process, route.learner].add(each.at_s, each.wire_bytes)
            _check_second(each, second_bytes, each.limit_bits_per_s, "")


def check_total_down(log: LineLog) -> None:
    """The same of all that one life of the broker sends to all learners."""
    windows = defaultdict[Hashable, _Window](_Window)
    for each in log:
        if isinstance(each, Crossing) and each.total_bits_per_s and not each.route.up:
            second_bytes = windows[each.route.broker].add(each.at_s, each.wire_bytes)
            _check_second(each, second_bytes, each.total_bits_per_s, " and the others")


def check_total_up(log: LineLog) -> None:
    """The data of all learners: where one's share passes to another within a second, both may
    have a burst of theirs in it, and each learner a message. Control comes on top of it."""
    window = _Window()
    largest = defaultdict[str, int](int)
    for each in log:
        if isinstance(each, Crossing) and each.total_bits_per_s and each.route.up:
            if each.stream < 0:
                continue
            learner = each.route.learner
            largest[learner] = max(largest[learner], each.wire_bytes)
            second_bytes = window.add(each.at_s, each.wire_bytes)
            seconds = RATE_WINDOW_S + 2 * RATE_BURST_S
            allowed = each.total_bits_per_s / 8 * seconds + sum(largest.values())
            assert second_bytes <= allowed, (
                f"{second_bytes} bytes of data from all learners in the second before "
                f"{each.at_s:.3f} s, {allowed:.0f} are allowed"
            )


def _check_second(crossing: Crossing, second_bytes: int, bits_per_s: float, whose: str) -> None:
    allowed = bits_per_s / 8 * RATE_WINDOW_S + crossing.wire_bytes
    if crossing.stream < 0 or second_bytes <= allowed:
        return
    direction = "from" if crossing.route.up else "to"
    raise AssertionError(
        f"{second_bytes} bytes {direction} {crossing.route.learner}{whose} in the second before "
        f"{crossing.at_s:.3f} s, {allowed:.0f} are allowed"
    )


@dataclass
class _Stream:
    sent: int = 0
    told: int = 0
    moved_at: float = 0.0
    """Time of the last progress, or of the first message after a pause."""
    was_late: bool = False
    tried_at: float = -math.inf
    """Time of the last message beyond the window."""


def check_credit(log: LineLog, window_bytes: int) -> None:
    """Never more than the window is unacknowledged on a stream, but for a single larger message
    on an empty one, and for what is tried where nothing has moved for STANDSTILL_S: a message at a
    time, with as long between two. A stream that moves again after so long may have one message
    more, until all of it is acknowledged."""
    streams = defaultdict[tuple[LineRoute, int], _Stream](_Stream)
    for each in log:
        route = each.route
        # Uplink positions begin with the process, downlink positions also with the broker's.
        route = route._replace(broker=0) if route.up else route
        if isinstance(each, Acknowledged):
            for index, position in enumerate(each.positions):
                stream = streams[route, index]
                if stream.told < position <= stream.sent:
                    stream.was_late |= each.at_s - stream.moved_at >= STANDSTILL_S
                    stream.told, stream.moved_at = position, each.at_s
        elif each.stream >= 0:
            stream = streams[route, each.stream]
            if stream.sent == stream.told:
                stream.moved_at, stream.was_late = each.at_s, False
            stream.sent += each.payload_bytes
            unknown_bytes = stream.sent - stream.told
            more_bytes = each.payload_bytes if stream.was_late else 0
            if unknown_bytes > max(window_bytes + more_bytes, each.payload_bytes):
                what = (
                    f"{unknown_bytes} bytes are unacknowledged on stream {each.stream} of {route}"
                )
                still_s = each.at_s - max(stream.moved_at, stream.tried_at)
                assert still_s >= STANDSTILL_S, (
                    f"{what}, {still_s:.3f} s after it moved or was tried"
                )
                stream.tried_at = each.at_s
