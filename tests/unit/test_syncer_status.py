"""The status: what people see, and who is waited for; and the rates of the uplink."""

from __future__ import annotations

import msgspec
import pytest
from desk import CHUNKS, Desk, configure, resumed, running

from narrows.broker.syncer.members import RATE_MIN
from narrows.proto import messages as msg
from narrows.proto.units import BitRate


def test_the_status_of_a_run() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1, tokens=3000)
    desk.report("b", 20, held=(0, 0, 0, -1))
    status = desk.status
    assert status["phase"] == "running" and status["versions"] == [1, 0, 0, 0]
    assert (status["run_tokens"], status["merges"], status["contributions"]) == (1000, 1, 2)
    learner = status["learners"]["a"]
    assert (learner["logged_tokens"], learner["merged_tokens"]) == (250, 250)
    assert (learner["state"], learner["steps_per_s"]) == ("training", 10.0)
    assert learner["versions_behind"] == 1
    assert status["learners"]["b"]["state"] == "joining"
    message = msg.Status(status)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=msg.Status) == message


def test_a_learner_is_paused_silent_lost_or_gone() -> None:
    desk = running("a", "b")
    desk.report("a", 20, paused="evaluating")
    states = [desk.status["learners"]["a"]["state"]]
    for seconds in (3.0, 27.0):
        desk.pass_(seconds, "b")
        states.append(desk.status["learners"]["a"]["state"])
    desk.leave("b")
    states.append(desk.status["learners"]["b"]["state"])
    assert states == ["paused: evaluating", "silent", "lost", "left"]
    assert desk.status["waiting_for"] == ["learners: none is here"]


def test_merged_tokens_go_on_after_a_start() -> None:
    desk = Desk(resumed=resumed(merged_tokens={"a.00000001": 4000}))
    desk.hello("a")
    assert desk.status["learners"]["a"]["merged_tokens"] == 1000


def test_a_firewall_in_the_way_is_named_once() -> None:
    desk = running("a", "b")
    desk.announce("a", 0, 1)
    desk.announce("b", 0, 1)
    for chunk in range(CHUNKS - 1):
        desk.pass_(4.0, "a", "b", steps_per_s=10)
        desk.chunk("b", 0, 1, chunk)
    (hint,) = desk.noted("no_data")
    assert "a firewall close port 7071" in hint.text
    assert desk.status["learners"]["a"]["hint"] and not desk.status["learners"]["b"]["hint"]


# Rates: a share is lowered before another one is raised.


def desk_with(**wan: float) -> Desk:
    return Desk(configure(wan={name: BitRate(rate) for name, rate in wan.items()}))


def rates(desk: Desk, names: str) -> list[float]:
    return [desk.status["learners"][name]["up_bits_per_s_granted"] for name in names]


@pytest.mark.parametrize(
    ("wan", "rate"),
    [({}, 0.0), ({"up": 5e6}, 5e6), ({"total_up": 8e6}, 8e6), ({"up": 5e6, "total_up": 8e6}, 5e6)],
)
def test_the_rate_of_a_lone_learner(wan: dict[str, float], rate: float) -> None:
    assert desk_with(**wan).hello("a").beat.up_bits_per_s == rate


def test_a_newcomer_gets_its_share_when_the_others_have_heard_of_theirs() -> None:
    desk = desk_with(total_up=8e6)
    assert desk.hello("a").beat.up_bits_per_s == 8e6
    desk.log.clear()
    assert desk.hello("b").beat.up_bits_per_s == RATE_MIN
    assert rates(desk, "a") == [4e6]
    assert desk.told(msg.Beat, "a")[0].up_bits_per_s == 4e6
    desk.now += 0.1
    desk.report("a", 1)
    assert rates(desk, "b") == [RATE_MIN], "that Report may have been on its way"
    desk.now += 1.0
    desk.report("a", 2)
    assert rates(desk, "b") == pytest.approx([4e6])
    assert desk.told(msg.Beat, "b")[-1].up_bits_per_s == pytest.approx(4e6)


def test_two_newcomers_do_not_both_get_what_one_of_the_others_has_given_back() -> None:
    desk = desk_with(total_up=8e6)
    desk.hello("a")
    desk.hello("b")
    desk.pass_(2.0, "a", "b")
    assert rates(desk, "ab") == [4e6] * 2
    desk.hello("c")
    desk.hello("d")
    desk.pass_(2.0, "a")  # b has not shown that it has heard of its new rate.
    assert sum(rates(desk, "cd")) == pytest.approx(2e6, rel=0.01)


def test_a_lost_learner_gives_its_share_back_and_comes_back_as_a_newcomer() -> None:
    desk = desk_with(total_up=8e6)
    desk.hello("a")
    desk.hello("b")
    desk.pass_(3.0, "a", "b")
    assert rates(desk, "a") == [4e6]
    desk.pass_(31.0, "a")
    assert rates(desk, "a") == [8e6]
    assert desk.hello("b", peer="b:1").beat.up_bits_per_s == RATE_MIN
    desk.pass_(2.0, "a", "b")
    assert rates(desk, "ab") == pytest.approx([4e6] * 2)
