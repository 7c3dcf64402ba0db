"""A learner's line carries what its budget allows, and no more: counted outside the product."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from acceptance.kit import CODECS, Site, wait_until
from acceptance.proxy import Direction, Passage, Proxy

RATE_BYTES_S: Final = 4e6 / 8
LOWER_BYTES_S: Final = 2e6 / 8

LATE_S: Final = 0.5
"""Seconds of its rate that may pass at once: a sender that was late makes up for 0.1 s, and the
proxy may stand still on a busy machine and then find what has gathered meanwhile."""

MEAN_MAX: Final = 1.04
"""Largest mean of some six seconds, as a share of the rate: a proxy that stood still at their
begin counts a little too much. Data may use 0.985 of a budget, so 10 % too much would be 1.08."""

SEGMENT_BYTES: Final = 1448
HEADER_BYTES: Final = 66
"""Ethernet, IPv4 and TCP with time stamps, for each full segment and for each acknowledgement."""

ROUNDS: Final = 55
"""Each carries 58 kB in both directions, for 0.12 s: six and a half seconds."""

SETTLE_S: Final = 1.0
SAMPLE_S: Final = 1.0
"""A new rate holds after SETTLE_S, and is looked at for SAMPLE_S."""


def wire_bytes(passage: Passage, direction: Direction) -> float:
    """Bytes of this direction on an Ethernet: data with headers, or TCP's acknowledgement of data
    that passed the other way, one for two segments."""
    segments = passage.size / SEGMENT_BYTES
    if passage.direction == direction:
        return passage.size + HEADER_BYTES * segments
    return HEADER_BYTES * segments / 2


def check_rate(passed: Sequence[Passage], direction: Direction, rate_bytes_s: float) -> None:
    """No stretch of time, of whatever length T, has more than `rate_bytes_s` * (T + LATE_S)."""
    surplus = highest = 0.0
    last_s = passed[0].at_s
    for one in passed:
        surplus = max(0.0, surplus - (one.at_s - last_s) * rate_bytes_s)
        surplus, last_s = surplus + wire_bytes(one, direction), one.at_s
        highest = max(highest, surplus)
    assert highest <= LATE_S * rate_bytes_s, f"{direction}: {highest:,.0f} bytes too many"


def mean_bytes_s(passed: Sequence[Passage], direction: Direction) -> float:
    span_s = passed[-1].at_s - passed[0].at_s
    return sum(wire_bytes(one, direction) for one in passed) / span_s


def set_rate(config: Path, rate: str) -> None:
    config.write_text(f'[wan]\nup = "{rate}"\ndown = "{rate}"\n')


def test_a_line_carries_its_budget_and_no_more(site: Site) -> None:
    config = site.folder / "broker.toml"
    set_rate(config, "4Mbit/s")
    raw = {"push_codec": CODECS["lossless"], "publish_codec": CODECS["lossless"]}
    broker = site.broker("--config", str(config), **raw)
    with Proxy(site.ports.first) as proxy:
        a = site.learner("a", width=240, broker=proxy.address)
        wait_until(site.merged, "the first round", broker, a)
        busy = len(proxy.passed)
        wait_until(lambda: len(site.merged()) >= ROUNDS, "rounds", broker, a)
        change = len(proxy.passed)
        # A running broker keeps its budget: another one is a restart.
        broker.stop()
        set_rate(config, "2Mbit/s")
        broker = site.broker("--config", str(config), **raw)
        site.contribute("a")
        lower_s = time.monotonic() + SETTLE_S
        wait_until(lambda: proxy.passed[-1].at_s > lower_s + SAMPLE_S, "a sample", broker, a)
        a.kill()
        broker.stop()
    steady = proxy.passed[busy:change]
    lowered = [one for one in proxy.passed if one.at_s > lower_s]
    for direction in get_args(Direction):
        check_rate(proxy.passed[:change], direction, RATE_BYTES_S)
        check_rate(lowered, direction, LOWER_BYTES_S)
        assert 0.7 <= mean_bytes_s(steady, direction) / RATE_BYTES_S <= MEAN_MAX
