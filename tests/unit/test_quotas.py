"""Quotas of keys: never more than the quota in any stretch of time, and nobody honest refused."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.syncer.quotas import REST_S, Bucket, Quotas
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.quotas import (
    BYTES_BURST_S,
    CONTROL,
    CONTROL_UNIT_BYTES,
    ENROLMENTS,
    JOINS,
    REFUSED,
    STATES,
    STATUS,
    TOLD_S,
    Ask,
    Quota,
)

HOLDER = KeyHolder("a")
RELAY = KeyHolder("r", KeyRole.RELAY, carries=("a", "b", "c"))


def four() -> Quotas:
    """Quotas of a run of four fragments of ten chunks each."""
    made = Quotas(4)
    made.cut([10] * 4)
    return made


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3), st.floats(0, 1)), max_size=60),
    st.floats(1, 20),
    st.floats(0, 5),
    st.floats(0, 5),
    st.integers(1, 3),
)
def test_no_stretch_of_time_has_more_than_the_quota(
    steps: list[tuple[float, int, float]],
    burst: float,
    per_s: float,
    per_version: float,
    times: int,
) -> None:
    quota, now, versions = Quota(burst, per_s, per_version), 5.0, 0
    bucket = Bucket(times * burst, now, versions)
    taken = [(now, versions, 0.0)]
    for pause_s, published, amount in steps:
        now, versions = now + pause_s, versions + published
        bucket.fill(quota, times, now, versions)
        taken.append((now, versions, amount if bucket.take(amount) else 0.0))
    for first, (since, before, _) in enumerate(taken):
        allowed = burst + per_s * (now - since) + per_version * (versions - before)
        accepted = sum(amount for _, _, amount in taken[first:])
        assert accepted <= times * allowed + 1e-6


@given(st.floats(0.01, 100), st.floats(0, 10), st.integers(1, 200))
def test_who_stays_below_the_rate_is_never_refused(per_s: float, late_s: float, count: int) -> None:
    quota = Quota(burst=1 + 2 * per_s * late_s, per_s=per_s)
    random = Random(count)
    bucket = Bucket(quota.burst, 0.0, 0)
    arrivals = sorted(number / per_s + random.uniform(0, late_s) for number in range(count))
    for now in arrivals:
        bucket.fill(quota, 1, now, 0)
        assert bucket.take(1.0 - 1e-9)


def test_time_does_not_run_backwards() -> None:
    bucket = Bucket(1.0, 5.0, 0)
    with pytest.raises(AssertionError, match="backwards"):
        bucket.fill(STATUS, 1, 4.0, 0)


@pytest.mark.parametrize(
    ("kind", "quota", "per_minute"),
    [
        (Ask.JOINS, JOINS, 6),
        (Ask.CONTROL, CONTROL, 200 * 60),
        (Ask.STATUS, STATUS, 60),
        (Ask.REFUSED, REFUSED, 20),
        (Ask.STATES, STATES, 0.2),
        (Ask.ENROLMENTS, ENROLMENTS, 4 / 1440),
    ],
)
def test_a_flood_gets_the_burst_and_then_the_rate(
    kind: Ask, quota: Quota, per_minute: float
) -> None:
    quotas = four()
    burst = sum(quotas.take(HOLDER, kind, 1.0, 0.0) is None for _ in range(5000))
    assert burst == quota.burst + (4 * 4 if kind is Ask.CONTROL else 0)
    minutes = 1 if kind is Ask.CONTROL else 10
    later = sum(
        quotas.take(HOLDER, kind, 1.0, 60 * minutes * turn / 24_000) is None
        for turn in range(1, 24_001)
    )
    assert later == pytest.approx(per_minute * minutes, abs=1)


def test_a_holder_has_its_own_room_and_a_relay_the_sum() -> None:
    quotas = four()
    assert sum(quotas.take(HOLDER, Ask.JOINS, 1.0, 0.0) is None for _ in range(99)) == 6
    assert sum(quotas.take(RELAY, Ask.JOINS, 1.0, 0.0) is None for _ in range(99)) == 18
    assert sum(quotas.take(RELAY, Ask.JOINS, 1.0, 60.0) is None for _ in range(99)) == 18


def test_an_invitation_has_an_account_of_its_own() -> None:
    quotas = four()
    invited = KeyHolder(HOLDER.name, KeyRole.ENROL)
    for _ in range(99):
        quotas.charge(invited, Ask.REFUSED, 1.0, 0.0)
    assert quotas.control(invited, 100, 0.0) is not None
    assert quotas.control(HOLDER, 100, 0.0) is None


def test_no_account_begins_anew_while_it_is_used() -> None:
    quotas = four()
    assert sum(quotas.take(RELAY, Ask.STATUS, 1.0, 0.0) is None for _ in range(99)) == 30
    # Its invitation speaks, and then its operator takes a learner away from it.
    assert quotas.take(KeyHolder(RELAY.name, KeyRole.ENROL), Ask.STATUS, 1.0, 0.0) is None
    assert quotas.take(RELAY, Ask.STATUS, 1.0, 0.0) is not None
    smaller = KeyHolder(RELAY.name, KeyRole.RELAY, carries=("a", "b"))
    assert quotas.take(smaller, Ask.STATUS, 1.0, 0.0) is not None


def test_a_long_control_message_counts_by_its_length() -> None:
    quotas = four()
    long, count = CONTROL_UNIT_BYTES * 8, 0
    while quotas.control(HOLDER, long, 0.0) is None:
        count += 1
    assert count == 1016 / 8
    # A founder's layout leaves a debt, and time pays it.
    quotas = four()
    assert quotas.control(HOLDER, 4 << 20, 0.0) is None
    for _ in range(1016 - 512):
        assert quotas.control(HOLDER, 100, 0.0) is None
    assert quotas.control(HOLDER, 100, 0.0) is not None
    assert quotas.control(HOLDER, 100, 0.01) is None


def test_too_many_refusals_pause_everything_until_there_is_room() -> None:
    quotas = four()
    for _ in range(20):
        assert quotas.control(HOLDER, 100, 0.0) is None
        quotas.charge(HOLDER, Ask.REFUSED, 1.0, 0.0)
    excess = quotas.control(HOLDER, 100, 0.0)
    assert excess is not None and excess.kind is Ask.REFUSED
    assert quotas.data(HOLDER, 100, 0.0, 0.0) is not None
    assert quotas.data(HOLDER, 100, 0.0, 3.1) is None
    assert quotas.control(KeyHolder("b"), 100, 0.0) is None


def test_a_debt_ends_within_the_time_of_two_bursts() -> None:
    quotas = four()
    quotas.charge(HOLDER, Ask.REFUSED, 1e6, 0.0)
    seconds = (REFUSED.burst + 1) / REFUSED.per_s
    assert quotas.look(HOLDER, Ask.REFUSED, 1.0, seconds - 1.0) is not None
    assert quotas.look(HOLDER, Ask.REFUSED, 1.0, seconds + 0.1) is None


def test_an_excess_is_told_once_per_minute_with_its_count() -> None:
    quotas = four()
    told = [
        excess.dropped
        for turn in range(1300)
        if (excess := quotas.take(HOLDER, Ask.STATUS, 1.0, turn / 10)) and excess.dropped
    ]
    assert len(told) == 3  # At the first, after one minute, after two.
    assert told[0] == 1 and all(
        count == pytest.approx(0.9 * 10 * TOLD_S, abs=2) for count in told[1:]
    )
    assert quotas.dropped >= sum(told)


def test_bytes_are_counted_against_the_rate_that_was_told() -> None:
    quotas, rate, chunk = four(), 8e6, 100_000
    now, accepted = 0.0, 0
    while now < 60.0:
        # Ten times the rate.
        now += chunk / 1e7
        accepted += chunk if quotas.data(HOLDER, chunk, rate, now) is None else 0
        quotas.versions += 1
    assert accepted <= 60 * 1e6 + BYTES_BURST_S * 1e6 + (5 << 20)
    assert accepted >= 60 * 1e6


def test_bytes_that_left_at_a_higher_rate_are_not_charged_to_the_lower_one() -> None:
    quotas = four()
    assert quotas.data(HOLDER, 1000, 8e8, 0.0) is None
    # The rate falls a hundredfold while 20 s of the old one are under way.
    for number in range(2000):
        quotas.versions += 1
        assert quotas.data(HOLDER, 1_000_000, 8e6, 0.1 + number / 100) is None


def test_without_a_limit_bytes_are_not_counted() -> None:
    quotas = four()
    for _ in range(1000):
        quotas.versions += 1
        assert quotas.data(HOLDER, 4 << 20, 0.0, 0.0) is None


def test_accounts_of_holders_that_rest_are_dropped() -> None:
    quotas = four()
    for number in range(50_000):
        assert quotas.take(KeyHolder(f"n{number}"), Ask.JOINS, 1.0, 10.0 * number) is None
    assert len(quotas) <= REST_S / 10 + 2


@pytest.mark.parametrize("fragments", [1, 4, 64, 4096])
@pytest.mark.parametrize("step_s", [0.001, 0.1, 10.0])
def test_a_learner_at_full_speed_meets_no_quota(fragments: int, step_s: float) -> None:
    """As many versions as a sync period of one step brings, with a learner that answers each."""
    chunks = [16 + 4 * 10] * fragments
    quotas, now = Quotas(fragments), 0.0
    quotas.cut(chunks)

    def control(count: int) -> None:
        assert all(quotas.control(HOLDER, 700, now) is None for _ in range(count))

    for _ in range(2):  # It joins, and returns at once.
        assert quotas.take(HOLDER, Ask.JOINS, 1.0, now) is None
        control(2 + 2 * fragments)
        for _ in range(fragments):
            assert quotas.take(HOLDER, Ask.STATES, 1 / fragments, now) is None
    assert all(quotas.data(HOLDER, 1000, 0.0, now) is None for _ in range(10 * fragments))
    versions_per_s = min(fragments / step_s, 1000)
    for turn in range(2000):
        now += 1 / versions_per_s
        quotas.versions += 1
        control(4)  # Push, Adopted, and repair.
        if turn % max(1, int(versions_per_s / 10)) == 0:
            control(1)  # A Report ten times a second.
        assert all(quotas.data(HOLDER, 1000, 0.0, now) is None for _ in range(2 * 10))
        quotas.charge(HOLDER, Ask.REFUSED, 1.0, now)  # It is always late.


def test_a_learner_that_is_cut_off_again_and_again_gets_its_states() -> None:
    fragments = 4
    quotas, now = Quotas(fragments), 0.0
    for _ in range(500):
        # It misses as many versions of each fragment as make a state necessary.
        now += 7.0
        quotas.versions += fragments * PUBLICATIONS_KEPT
        assert quotas.take(HOLDER, Ask.JOINS, 0.25, now) is None
        for _ in range(fragments):
            assert quotas.take(HOLDER, Ask.STATES, 1 / fragments, now) is None
