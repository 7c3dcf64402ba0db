"""The tape of faults: the rate it promises, one seed one tape, nobody fails twice at once."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest

from narrows.bench.chaos.tape import BROKER, DOWN_S, Fault, Kind, draw, quotas

NAMES = [f"learner-{index:02d}" for index in range(32)]


def tape(seed: int = 0, names: list[str] = NAMES, **changes: float) -> tuple[Fault, ...]:
    settings: dict[str, float] = {"seconds": 1800.0, "every_s": 29.0, "down_max_s": 60.0}
    return draw(seed, names, **{**settings, **changes})  # type: ignore[arg-type]


def test_half_an_hour_has_the_published_faults() -> None:
    faults = tape()
    assert len(faults) == 62
    assert Counter(fault.kind for fault in faults)[Kind.KILL] == 27


def test_a_seed_is_a_tape() -> None:
    assert tape(3) == tape(3)
    assert tape(3) != tape(4)


def test_one_learner_fails_in_each_slot() -> None:
    assert [int(fault.at_s / 29.0) for fault in tape()] == list(range(62))


@pytest.mark.parametrize("seed", range(5))
def test_nobody_fails_who_is_down(seed: int) -> None:
    faults = tape(seed, NAMES[:4])
    assert faults
    for one, other in combinations(faults, 2):
        if one.victim == other.victim:
            assert one.ends_s <= other.at_s


def test_a_slot_in_which_all_are_down_has_no_fault() -> None:
    faults = tape(names=NAMES[:1], every_s=1.0, seconds=100.0)
    assert 0 < len(faults) < 100


def test_faults_end_within_their_bounds() -> None:
    for fault in tape():
        low, high = DOWN_S[fault.kind]
        assert low <= fault.down_s <= high
    assert max(fault.down_s for fault in tape(down_max_s=2.0)) == 2.0


def test_the_broker_s_kills_come_on_top() -> None:
    with_broker = tape(broker_kills=3)
    assert sum(fault.victim == BROKER for fault in with_broker) == 3
    assert tuple(fault for fault in with_broker if fault.victim != BROKER) == tape()


@pytest.mark.parametrize("seed", range(5))
def test_a_broker_that_is_down_is_not_killed(seed: int) -> None:
    faults = tape(seed, seconds=60.0, broker_kills=30)
    kills = [fault for fault in faults if fault.victim == BROKER]
    assert 5 < len(kills) < 30
    for one, other in pairwise(kills):
        assert one.ends_s <= other.at_s


@pytest.mark.parametrize("count", range(10))
def test_quotas_add_up(count: int) -> None:
    assert len(quotas(count)) == count
    assert Kind.BROKER not in quotas(count)
