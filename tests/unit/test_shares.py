"""The uplink's total: equal shares among those who send, and never more than it in sum."""

from __future__ import annotations

from collections.abc import Sized
from random import Random

import pytest
from machines import Desk, incarnation_of

from narrows.broker.syncer.member import Copies, Member, Presence, Uplink
from narrows.broker.syncer.participation import Participation
from narrows.broker.syncer.rates import IDLE_SHARE, TINY, Shares
from narrows.proto import messages as msg
from narrows.proto.timing import SHARE_IDLE_S

TOTAL = 1e9


def members(count: int) -> list[Member]:
    return [
        Member(
            name,
            incarnation_of(name),
            Presence(name.encode(), "", heard_at=0.0, joined_at=0.0),
            Copies([]),
            Uplink([]),
            Participation([], contributed_at=0.0),
        )
        for name in (f"site-{i}" for i in range(count))
    ]


def confirm(member: Member) -> None:
    """The learner reports that it keeps to its rate."""
    member.report = msg.Report(1, 1, 0.1, None, (), msg.TokenLedger(), member.up_bits_per_s)


def obey(all_members: list[Member]) -> None:
    for member in all_members:
        confirm(member)


def settle(shares: Shares, all_members: list[Member], active: set[str], now: float) -> float:
    for _ in range(4):
        now += 0.1
        shares.divide(all_members, active, now)
        obey(all_members)
    return now


def test_who_sends_shares_and_who_does_not_lends() -> None:
    shares, site = Shares(TOTAL, 0.0), members(4)
    now = settle(shares, site, {m.name for m in site}, 0.0)
    assert [m.up_bits_per_s for m in site] == [TOTAL / 4] * 4
    settle(shares, site, {"site-0", "site-1"}, now + SHARE_IDLE_S)
    little = TOTAL / 4 * IDLE_SHARE
    assert [m.up_bits_per_s for m in site] == [TOTAL / 2 - little] * 2 + [little] * 2


def test_the_rate_of_each_is_the_most() -> None:
    shares, site = Shares(TOTAL, 1e8), members(2)
    settle(shares, site, {"site-0"}, 0.0)
    assert site[0].up_bits_per_s == 1e8


def test_without_a_total_everybody_has_the_rate_of_each() -> None:
    shares, site = Shares(0.0, 5e8), members(3)
    assert len(shares.divide(site, set(), 1.0)) == 3
    assert {m.up_bits_per_s for m in site} == {5e8}
    assert shares.divide(site, set(), 2.0) == []


@pytest.mark.parametrize("seed", range(50))
def test_the_sum_never_exceeds_the_total_while_learners_obey_in_time(seed: int) -> None:
    random, now = Random(seed), 0.0
    shares, site = Shares(TOTAL, random.choice([0.0, TOTAL / 3])), members(random.randint(1, 9))
    connected, confirmed_at = site[:1], dict[str, float]()
    shares.admit(connected[0], connected, now)
    for _ in range(300):
        now += random.uniform(0.0, 0.5)
        if len(connected) < len(site) and random.random() < 0.1:
            connected = site[: len(connected) + 1]
            shares.admit(connected[-1], connected, now)
        active = {m.name for m in connected if random.random() < 0.5}
        shares.divide(connected, active, now)
        for member in connected:
            if random.random() < 0.3 or now > confirmed_at.get(member.name, 0.0) + 4.0:
                confirm(member)
                confirmed_at[member.name] = now
        # A newcomer may begin with a little before the others have made room.
        room = TOTAL * (1 + IDLE_SHARE) + len(site) * TINY
        assert sum(max(m.up_bits_per_s, m.kept_bits_per_s or 0.0) for m in connected) <= room
        assert all(m.up_bits_per_s > 0 for m in connected)


def test_a_learner_is_told_its_share_and_the_others_theirs_once_it_keeps_to_it() -> None:
    desk = Desk(wan__total_up="1Gbit/s").running("a", "b")
    told = {name: desk.state.roster.get(name) for name in ("a", "b")}
    for _ in range(3):
        for name, member in told.items():
            assert member is not None
            report = msg.Report(1, 1, 0.1, None, (), msg.TokenLedger(), member.up_bits_per_s)
            desk.say(name, report, after_s=0.2)
    rates = [member.up_bits_per_s for member in told.values() if member is not None]
    assert rates == [5e8, 5e8]


def test_a_crowd_of_newcomers_does_not_exceed_the_total() -> None:
    shares, site = Shares(TOTAL, 0.0), members(64)
    for count, member in enumerate(site, 1):
        shares.admit(member, site[:count], 0.0)
    assert sum(m.up_bits_per_s for m in site) <= TOTAL * (1 + IDLE_SHARE) + len(site) * TINY


def test_a_total_that_is_new_waits_for_those_without_limit() -> None:
    shares, site = Shares(0.0, 0.0), members(3)
    settle(shares, site, set(), 0.0)
    shares.set_rates(TOTAL, 0.0)
    shares.divide(site, {m.name for m in site}, 10.0)
    assert sum(m.up_bits_per_s for m in site) <= TOTAL * IDLE_SHARE + 3 * TINY
    settle(shares, site, {m.name for m in site}, 10.1)
    assert [round(m.up_bits_per_s) for m in site] == [round(TOTAL / 3)] * 3


def claim(member: Member, bits_per_s: float) -> None:
    """The learner reports that it keeps to another rate than it was told."""
    member.report = msg.Report(1, 1, 0.1, None, (), msg.TokenLedger(), bits_per_s)


@pytest.mark.parametrize("claimed", [0.0, 1.0, TOTAL, 1e18])
def test_a_claimed_rate_takes_nothing_from_the_others_for_long(claimed: float) -> None:
    shares, (liar, *others) = Shares(TOTAL, 0.0), members(4)
    site = [liar, *others]
    now, active = 0.0, {m.name for m in site}
    for count in range(1, 5):  # It came first, and had the whole total.
        shares.admit(site[count - 1], site[:count], now)
        obey(site[:count])
    for _ in range(60):
        now += 0.1
        shares.divide(site, active, now)
        obey(others)
        claim(liar, claimed)
        assert sum(m.up_bits_per_s for m in others) <= TOTAL * (3 / 4 + IDLE_SHARE) + 3 * TINY
    assert [m.up_bits_per_s for m in others] == [TOTAL / 4] * 3


def test_a_learner_that_does_not_obey_is_counted_by_what_arrives_from_it() -> None:
    shares, (liar, other) = Shares(TOTAL, 0.0), members(2)
    now, active = 0.0, {liar.name, other.name}
    shares.admit(liar, [liar], now)
    confirm(liar)
    shares.admit(other, [liar, other], now)
    for _ in range(200):
        now += 0.1
        shares.arrive(liar.name, int(0.7 * TOTAL / 8 * 0.1), now)
        shares.divide([liar, other], active, now)
        confirm(other)
        assert shares.counted(liar, now) >= 0.6 * TOTAL
        assert other.up_bits_per_s <= 0.4 * TOTAL
    # It obeys at last.
    confirm(liar)
    settle(shares, [liar, other], active, now)
    assert [liar.up_bits_per_s, other.up_bits_per_s] == [TOTAL / 2] * 2


def test_nothing_is_kept_of_learners_that_are_gone() -> None:
    shares = Shares(TOTAL, 0.0)
    stays = members(1)
    for number in range(1000):
        (passer,) = members(1)
        passer.name = f"name-{number}"
        shares.admit(passer, [*stays, passer], float(number))
        shares.divide([*stays, passer], {passer.name}, float(number))
        shares.divide(stays, set(), number + 0.5)
    kept = [value for value in vars(shares).values() if isinstance(value, Sized)]
    assert kept and all(len(table) <= 1 for table in kept)


def test_a_total_without_learners_is_divided_among_nobody() -> None:
    assert Shares(TOTAL, 0.0).divide([], set(), 1.0) == []
