"""Rates: a share is lowered before another one is raised."""

from __future__ import annotations

import pytest
from desk import Desk, configure

from narrows.broker.syncer.shares import RATE_MIN
from narrows.proto import messages as msg
from narrows.proto.units import BitRate


def desk_with(**wan: float) -> Desk:
    return Desk(configure(wan={name: BitRate(rate) for name, rate in wan.items()}))


def rate_of(desk: Desk, name: str) -> float:
    return float(desk.status["learners"][name]["up_bits_per_s_granted"])


def told_at_welcome(desk: Desk, name: str) -> float:
    welcome = desk.hello(name)
    assert isinstance(welcome, msg.Welcome)
    return welcome.beat.up_bits_per_s


@pytest.mark.parametrize(
    ("wan", "rate"),
    [({}, 0.0), ({"up": 5e6}, 5e6), ({"total_up": 8e6}, 8e6), ({"up": 5e6, "total_up": 8e6}, 5e6)],
)
def test_the_rate_of_a_lone_learner(wan: dict[str, float], rate: float) -> None:
    assert told_at_welcome(desk_with(**wan), "a") == rate


def test_a_newcomer_gets_its_share_when_the_others_have_heard_of_theirs() -> None:
    desk = desk_with(total_up=8e6)
    assert told_at_welcome(desk, "a") == 8e6
    desk.log.clear()
    assert told_at_welcome(desk, "b") == RATE_MIN
    assert rate_of(desk, "a") == 4e6
    assert desk.told(msg.Beat, "a")[0].up_bits_per_s == 4e6
    desk.now += 0.1
    desk.report("a", 1)
    assert rate_of(desk, "b") == RATE_MIN, "that Report may have been on its way"
    desk.now += 1.0
    desk.report("a", 2)
    assert rate_of(desk, "b") == pytest.approx(4e6)
    assert desk.told(msg.Beat, "b")[-1].up_bits_per_s == pytest.approx(4e6)


def test_at_no_time_is_more_in_force_than_the_total() -> None:
    """Desk checks the sum after each event."""
    desk = desk_with(total_up=8e6)
    for second, name in enumerate("abcdefgh"):
        desk.hello(name)
        desk.pass_(1.0, *"abcdefgh"[: second + 1], steps_per_s=1)
    desk.pass_(3.0, *"abcdefgh", steps_per_s=1)
    assert [rate_of(desk, name) for name in "abcdefgh"] == pytest.approx([1e6] * 8)
    for name in "abcd":
        desk.send(name, msg.Bye("done"))
    assert [rate_of(desk, name) for name in "efgh"] == pytest.approx([2e6] * 4)


def test_a_lost_learner_gives_its_share_back() -> None:
    desk = desk_with(total_up=8e6)
    desk.hello("a")
    desk.hello("b")
    desk.pass_(3.0, "a", "b")
    assert rate_of(desk, "a") == 4e6
    desk.pass_(31.0, "a")
    assert rate_of(desk, "a") == 8e6


def test_a_lost_learner_that_comes_back_is_a_newcomer() -> None:
    desk = desk_with(total_up=8e6)
    desk.hello("a")
    desk.hello("b")
    desk.pass_(3.0, "a", "b")
    desk.pass_(31.0, "a")
    welcome = desk.hello("b", peer="b:1")
    assert isinstance(welcome, msg.Welcome) and welcome.beat.up_bits_per_s == RATE_MIN
    desk.pass_(2.0, "a", "b")
    assert rate_of(desk, "a") == rate_of(desk, "b") == pytest.approx(4e6)
