"""A bad line costs no bit; a line carries its budget and no more, counted outside the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from acceptance.kit import LOSSLESS, Site, wait_until
from acceptance.proxy import CONTROL, PUBLICATIONS, PUSHES, Direction, Passage, Proxy

CUTS: Final[list[tuple[int, Direction, int]]] = [
    (PUSHES, "up", 5_000),
    (PUBLICATIONS, "down", 5_000),
    (CONTROL, "up", 500),
    (CONTROL, "down", 500),
]
"""Port, direction, and bytes until the reset: half a fragment, or some reports or beats."""

RATE_BYTES_S: Final = 4e6 / 8
LATE_S: Final = 0.5
"""Seconds of its rate that may pass at once: a sender that was late makes up for 0.1 s, and the
proxy may stand still on a busy machine and then find what has gathered meanwhile."""

MEAN_MAX: Final = 1.03
"""Largest mean of some six seconds, as a share of the rate: a proxy that stood still at their
begin counts a little too much. Data may use 0.985 of a budget, so 10 % too much would be 1.08."""

SEGMENT_BYTES: Final = 1448
HEADER_BYTES: Final = 66
"""Ethernet, IPv4 and TCP with time stamps, for each full segment and for each acknowledgement."""

ROUNDS: Final = 55
"""Each carries 58 kB in both directions, for 0.12 s: six and a half seconds."""


def test_resets_and_a_black_hole_cost_no_bit(site: Site) -> None:
    broker = site.broker(*LOSSLESS)
    with Proxy(site.ports.first) as proxy:
        a = site.learner("a", seed=1, width=96)
        b = site.learner("b", seed=2, width=96, broker=proxy.address)

        def b_takes_part() -> None:
            site.contribute("b", count=2)  # The second builds on what it has adopted meanwhile.
            site.adopt("b")

        b_takes_part()
        for number, cut in enumerate(CUTS, 1):
            proxy.cut_after(*cut)
            wait_until(lambda: proxy.cuts >= number, f"the reset {cut}", broker, a, b)  # noqa: B023
            b_takes_part()
        assert proxy.cuts == len(CUTS)
        proxy.cut()
        b_takes_part()

        proxy.hold()
        before = len(site.merged())
        wait_until(
            lambda: any(len(event["live"]) == 1 for event in site.merged()[before:]),
            "the run to go on without b", broker, a, b,
        )  # fmt: skip
        site.contribute("a", count=2)
        proxy.release()
        b_takes_part()
        for learner in (a, b):
            learner.kill()
        broker.stop()
    site.check_run("a", "b")


def wire_bytes(passage: Passage, direction: Direction) -> float:
    """Bytes of this direction on an Ethernet: data with headers, or TCP's acknowledgement of data
    that passed the other way, one for two segments."""
    segments = passage.size / SEGMENT_BYTES
    if passage.direction == direction:
        return passage.size + HEADER_BYTES * segments
    return HEADER_BYTES * segments / 2


def check_rate(passed: Sequence[Passage], direction: Direction) -> None:
    """No stretch of time, of whatever length T, has more than RATE_BYTES_S * (T + LATE_S)."""
    surplus = highest = 0.0
    last_s = passed[0].at_s
    for one in passed:
        surplus = max(0.0, surplus - (one.at_s - last_s) * RATE_BYTES_S)
        surplus, last_s = surplus + wire_bytes(one, direction), one.at_s
        highest = max(highest, surplus)
    assert highest <= LATE_S * RATE_BYTES_S, f"{direction}: {highest:,.0f} bytes too many"


def test_a_line_carries_its_budget_and_no_more(site: Site) -> None:
    broker = site.broker("wan.up=4Mbit/s", "wan.down=4Mbit/s", *LOSSLESS)
    with Proxy(site.ports.first) as proxy:
        learner = site.learner("a", width=240, broker=proxy.address)
        site.merge(1)
        busy = len(proxy.passed)
        site.merge(ROUNDS)
        learner.kill()
        broker.stop()
    passed, steady = proxy.passed, proxy.passed[busy:]
    for direction in get_args(Direction):
        check_rate(passed, direction)
        size = sum(wire_bytes(one, direction) for one in steady)
        mean = size / (steady[-1].at_s - steady[0].at_s)
        assert 0.7 <= mean / RATE_BYTES_S <= MEAN_MAX, f"{direction}: {mean:,.0f} bytes/s"
