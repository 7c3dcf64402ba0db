"""The pace of the run is what the broker sees: no claim of one learner stops it or drives it."""

from __future__ import annotations

import pytest
from machines import Desk, hello, incarnation_of

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Copies, Member, Presence, Stepping, Uplink
from narrows.broker.syncer.pace import RunPace
from narrows.broker.syncer.participation import Participation
from narrows.proto import messages as msg
from narrows.proto.codec import STATE_CODEC


def report(desk: Desk, name: str, step: int, step_s: float) -> None:
    """As the learner says it; the broker's own view is left as it is."""
    desk.say(name, msg.Report(step, 100 * step, step_s, None, (), msg.TokenLedger(), 0.0))


def founded(*names: str) -> Desk:
    """Nobody has made a step yet."""
    desk = Desk()
    for name in names:
        desk.say(name, hello(name))
    for index in range(2):
        desk.chunk(names[0], index, kind=msg.DataKind.FOUND, codec=STATE_CODEC)
    desk.do(ev.Founded((0, 1)))
    desk.do(ev.CheckpointWritten(0))
    for name in names:
        for index in range(2):
            desk.say(name, msg.Adopted(index, 0))
    return desk


@pytest.mark.parametrize("claimed", [0.0, 5e-324, 1e9])
def test_a_claimed_step_time_decides_nothing(claimed: float) -> None:
    desk = founded("a")
    report(desk, "a", 1, claimed)
    assert desk.state.step_s() == 0.0, "one step says nothing: it may have held a compilation"
    desk.wait(5.0)
    report(desk, "a", 3, claimed)
    assert desk.state.step_s() == 2.5
    assert status_s(desk) == claimed, "it is shown all the same"


def status_s(desk: Desk) -> float:
    member = desk.state.roster.get("a")
    assert member is not None and member.report is not None
    return member.report.step_s


def member(name: str) -> Member:
    presence = Presence(name.encode(), "", heard_at=0.0, joined_at=0.0)
    made = Member(
        name, incarnation_of(name), presence, Copies([0], adopted_at=[0.0]), Uplink([0]),
        Participation([0], contributed_at=0.0),
    )  # fmt: skip
    made.stepping = Stepping(0, 0.0, 1, 1.0)
    return made


def push(pace: RunPace, members: list[Member], now: float, **steps: int) -> None:
    """Everybody adopts, and pushes so many steps after ten seconds."""
    for each in members:
        each.copies.adopted_at[0] = now
    for each in members:
        pace.pushed(each, 0, steps[each.name], now + 10.0)
        pace.settle(members)


@pytest.mark.parametrize("wild", [1, 1 << 40, (1 << 62) - 1])
@pytest.mark.parametrize("others", [("a",), ("a", "b")])
def test_claimed_steps_of_one_learner_move_the_pace_by_four_at_most(
    wild: int, others: tuple[str, ...]
) -> None:
    """It was there before with honest claims, or comes new."""
    for comes_new in (False, True):
        pace, honest, insider = RunPace(), [member(name) for name in others], member("x")
        for at in range(0, 200, 10):
            there = honest if comes_new else [*honest, insider]
            push(pace, there, float(at), **dict.fromkeys(others, 10), x=10)
        assert pace.step_s([*honest, insider]) == 1.0
        for at in range(200, 600, 10):
            push(pace, [*honest, insider], float(at), **dict.fromkeys(others, 10), x=wild)
            assert 0.25 <= pace.step_s([*honest, insider]) <= 4.0


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_learner_that_drifts_away_does_not_take_the_pace_along(factor: float) -> None:
    pace, members, claimed = RunPace(), [member("a"), member("x")], 1e6
    for at in range(0, 2000, 10):
        push(pace, members, float(at), a=10**6, x=max(1, int(claimed)))
        claimed = min(claimed * factor, 2.0**62)
        assert 0.25e-5 <= pace.step_s(members) <= 4e-5


def test_a_pause_and_a_compilation_are_no_step_time() -> None:
    pace, a = RunPace(), member("a")
    a.copies.adopted_at[0], a.stepping = 0.0, Stepping(1, 300.0, 11, 310.0)
    pace.pushed(a, 0, 11, 310.0)
    assert pace.step_s([a]) == 1.0, "the first step took five minutes"
    for at in range(310, 400, 10):
        push(pace, [a], float(at), a=10)
    a.copies.adopted_at[0] = 400.0
    pace.pushed(a, 0, 10, 4000.0)
    assert pace.step_s([a]) == 1.0


def test_what_a_process_adopted_in_an_earlier_session_says_nothing() -> None:
    pace, a = RunPace(), member("a")
    a.copies.adopted_at[0] = None
    pace.pushed(a, 0, 5000, 310.0)
    assert pace.of("a") == 0.0
