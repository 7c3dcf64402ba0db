"""The budget: what is charged, and that no window has more than the rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import SETTINGS
from msgspec import structs

from narrows.proto.codec.codecs import codec, codec_names
from narrows.proto.flow.budget import (
    BACK_SHARE,
    BIN_S,
    CUT,
    MESSAGE_BYTES_MIN,
    SHARE_USED,
    WINDOW_SHARE,
    Budget,
    chunk_elements,
    least_chunk_elements,
    message_bytes,
    wire_bytes,
)
from narrows.proto.limits import PAYLOAD_BYTES_MAX
from narrows.proto.timing import MESSAGE_S, RATE_BURST_S, RATE_PAUSE_BURST_S, RATE_WINDOW_S

Sizes = st.lists(st.integers(100, 12_500), min_size=50, max_size=300)


def departures(budget: Budget, sizes: list[int], delays_s: list[float]) -> list[tuple[float, int]]:
    """A sender with work always waiting, which wakes up late by these times in turn."""
    now, left = 0.0, list[tuple[float, int]]()
    for i, size in enumerate(sizes):
        if not budget.is_open(now):
            now = budget.opens_at(now) + delays_s[i % len(delays_s)]
        assert budget.is_open(now)
        budget.charge(size, now)
        left.append((now, size))
    return left


@given(Sizes, st.lists(st.floats(0.0, 0.3), min_size=1, max_size=10))
def test_no_second_has_more_than_the_rate_and_one_message(
    sizes: list[int], delays_s: list[float]
) -> None:
    rate = 1e6
    left = departures(Budget(rate), sizes, delays_s)
    for start, _ in left:
        window = sum(size for at, size in left if start <= at < start + RATE_WINDOW_S)
        assert 8 * window <= rate * WINDOW_SHARE * RATE_WINDOW_S + 8 * max(sizes)


@given(Sizes, st.lists(st.floats(0.0, RATE_BURST_S / 2), min_size=1, max_size=10))
def test_a_sender_that_is_a_little_late_loses_next_to_nothing(
    sizes: list[int], delays_s: list[float]
) -> None:
    rate = 1e6
    left = departures(Budget(rate), sizes * 3, delays_s)
    needed_s = 8 * sum(sizes) * 3 / (rate * SHARE_USED)
    assert left[-1][0] <= 1.02 * needed_s + RATE_BURST_S + BIN_S


def test_what_a_late_sender_makes_up_for_is_bounded() -> None:
    budget = Budget(8e6)
    budget.charge(1, 0.0)
    sent = 0
    while budget.is_open(50.0):
        budget.charge(1000, 50.0)
        sent += 1000
    assert sent <= 1e6 * RATE_BURST_S + 1000


def test_after_a_pause_little_leaves_at_once() -> None:
    budget = Budget(8e6)
    budget.charge(1, 0.0)
    budget.pause()
    sent = 0
    while budget.is_open(50.0):
        budget.charge(1000, 50.0)
        sent += 1000
    assert sent <= 1e6 * RATE_PAUSE_BURST_S + 1000
    late, more = 50.1, 0
    while budget.is_open(late):
        budget.charge(1000, late)
        more += 1000
    assert more > 1e6 * RATE_PAUSE_BURST_S + 1000, "this time it was late and had not paused"


def test_control_never_waits_and_data_pays_for_it() -> None:
    budget = Budget(1e6)
    budget.charge(125_000, 10.0)
    assert not budget.is_open(10.9)
    budget.charge(125_000, 10.0)
    assert not budget.is_open(11.9)
    assert budget.is_open(12.1)


@pytest.mark.parametrize(("size_bytes", "acknowledgements"), [(40, 1), (4200, 2), (28_960, 10)])
def test_every_message_that_arrives_is_acknowledged(size_bytes: int, acknowledgements: int) -> None:
    budget, rate = Budget(1e6), 1e6
    budget.receive(size_bytes, 1.0)
    paid_at = 1.0 - RATE_BURST_S + 8 * 66 * acknowledgements / (rate * SHARE_USED)
    assert budget.opens_at(1.0) == pytest.approx(paid_at)


def test_acknowledgements_take_no_more_than_half_of_a_rate() -> None:
    budget = Budget(1e6)
    for bin_number in range(1, 201):
        budget.receive(10**9, bin_number / 100)
    assert budget.is_open(2.0)
    charged = budget._window_bytes
    assert charged == pytest.approx(BACK_SHARE * 1e6 / 8 * RATE_WINDOW_S, rel=0.02)


def test_a_debt_is_one_of_bytes() -> None:
    budget = Budget(1e6)
    budget.charge(125_000, 10.0)
    budget.set_rate(2e6, 10.0)
    assert 10.4 < budget.opens_at(10.0) < 10.6
    budget.set_rate(0.0, 10.0)
    assert budget.is_open(10.0)


@pytest.mark.parametrize("before", [0.0, 1e9])
def test_a_rate_that_is_lowered_lets_data_go_between_control_messages(before: float) -> None:
    """The data that left before was cut for another rate: no second of this rate has room for as
    much."""
    budget, rate = Budget(before), 1e6
    budget.send(1_000_000, 0.0)
    budget.set_rate(rate, 10.0)
    data = control = 0
    for hundredth in range(10_000):
        now = 100.0 + hundredth / 100
        if hundredth % 10 == 0:
            budget.charge(300, now)
            control += 300
        if budget.is_open(now):
            budget.send(4600, now)
            data += 4600
    assert 0.95 * rate * 100 <= 8 * (data + control) <= rate * 100


def test_a_message_larger_than_a_second_of_the_rate_leaves_between_control_messages() -> None:
    """A push keeps the cut that it was begun with."""
    budget, now, left = Budget(1e5), 0.0, 0
    while now < 100.0:
        budget.charge(300, now)
        if budget.is_open(now):
            budget.send(30_000, now)
            left += 1
        now += 0.5
    assert left >= 30


def test_without_a_rate_nothing_waits() -> None:
    budget = Budget()
    budget.charge(1 << 40, 1.0)
    assert budget.is_open(1.0)


def test_wire_bytes_of_a_full_and_a_begun_segment() -> None:
    assert wire_bytes(1448 - 9) == 1448 + 66
    assert wire_bytes(1448 - 8) == 1449 + 2 * 66
    assert wire_bytes(34, 200, 12_000) == 34 + 200 + 12_000 + 27 + 9 * 66


def test_a_message_takes_ten_milliseconds_of_the_slowest_rate() -> None:
    assert message_bytes(0.0, 10e6, 2e9) == 12_500
    assert message_bytes(1e6) == MESSAGE_BYTES_MIN
    assert message_bytes(0.0, 0.0) == message_bytes(1e12) == PAYLOAD_BYTES_MAX


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("rate", [1e6, 10e6, 50e6, 1e9])
def test_every_codec_keeps_to_the_message_size(name: str, rate: float) -> None:
    settings = structs.replace(SETTINGS, message_bytes=message_bytes(rate))
    count = chunk_elements(settings, name)
    size_bytes = codec(name).payload_bytes_max(count, 3)
    assert count % CUT == 0
    assert size_bytes + 300 <= max(MESSAGE_BYTES_MIN, rate * MESSAGE_S / 8)
    assert least_chunk_elements(settings) <= chunk_elements(settings, settings.push_codec)
