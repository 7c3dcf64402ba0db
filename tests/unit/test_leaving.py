"""The time at which a learner may go: at the end of the run, before it, and without a broker."""

from __future__ import annotations

import math

import pytest
from machines import EPOCH, Seat, one, only, open_round

from narrows.learner.session import events as ev
from narrows.proto import messages as msg
from narrows.proto.flow import patience
from narrows.proto.messages import Phase
from narrows.proto.timing import BROKER_GONE_S

FINAL_COPY = ev.Adopt(0, 1)


def stay(
    seat: Seat, seconds: float, *versions: int, rounds: tuple[msg.OpenRound, ...] = (),
    phase: Phase = Phase.RUNNING, received: tuple[int, ...] = (),
) -> list[ev.Effect]:  # fmt: skip
    """The broker speaks once a second, the training thread stands at a boundary."""
    effects: list[ev.Effect] = []
    for _ in range(round(seconds)):
        beat = msg.Beat(EPOCH, phase, versions, rounds, 0, 0.0, received, 0.0)
        effects += seat.hear(beat, after_s=1.0)
        effects += seat.do(ev.BoundaryReached())
    return effects


def alone(seat: Seat, seconds: float) -> list[ev.Effect]:
    """The broker is silent; the training thread looks around."""
    effects: list[ev.Effect] = []
    for _ in range(round(seconds)):
        effects += seat.wait(1.0)
        effects += seat.do(ev.BoundaryReached())
    return effects


def test_a_broker_that_speaks_is_waited_for_however_long_the_last_rounds_take() -> None:
    seat = Seat().joined()
    stay(seat, 1, 0, 0, phase=Phase.ENDING)
    seat.do(ev.LoopEnded())
    assert not only(stay(seat, 3600, 0, 0, phase=Phase.ENDING), ev.Left)
    assert not only(stay(seat, 1, 1, 0, phase=Phase.ENDED), ev.Left)
    seat.receive(0, 1)
    assert one(seat.do(ev.BoundaryReached()), ev.Adopt).fragment == 0
    assert one(seat.do(ev.BoundaryReached()), msg.Bye).reason == "the run has ended"
    assert seat.session.leaving.final
    assert not seat.session.leaving.lacks


@pytest.mark.parametrize(
    ("phase", "versions", "lacks"),
    [
        (Phase.ENDING, (0, 0), "the last rounds of the run"),
        (Phase.ENDED, (1, 0), "the final versions of fragment 0"),
    ],
)
def test_a_broker_that_is_gone_is_waited_for_and_what_is_lacking_is_said(
    phase: Phase, versions: tuple[int, int], lacks: str
) -> None:
    seat = Seat().joined()
    stay(seat, 1, *versions, phase=phase)
    seat.do(ev.LoopEnded())
    assert not only(alone(seat, BROKER_GONE_S - 2), ev.Left)
    effects = alone(seat, 4)
    assert only(effects, ev.Left)
    assert [note.text for note in only(effects, ev.Note)] == [f"leaves without {lacks}"]
    assert not seat.session.leaving.final
    assert seat.session.leaving.lacks == lacks


def test_a_broker_that_is_gone_is_waited_for_three_usual_rounds() -> None:
    seat = Seat().joined()
    stay(seat, 1, 0, 0, rounds=(open_round(0, 0),))
    seat.do(ev.StepTaken(100))
    stay(seat, 40, 0, 0, rounds=(open_round(0, 0),))
    seat.receive(0, 1, push_id=1)
    stay(seat, 1, 1, 0, phase=Phase.ENDING)
    seat.do(ev.LoopEnded())
    assert not only(alone(seat, 118), ev.Left)
    assert only(alone(seat, 5), ev.Left)


def test_a_broker_that_comes_back_is_waited_for_as_if_it_had_never_gone() -> None:
    seat = Seat().joined()
    stay(seat, 1, 0, 0, phase=Phase.ENDING)
    seat.do(ev.LoopEnded())
    for life in range(2, 5):
        alone(seat, BROKER_GONE_S - 2)
        assert not only(seat.welcome((0, 0), epoch=(0, life, 1), phase=Phase.ENDING), ev.Left)


def test_what_has_come_is_the_final_model_though_the_broker_has_gone() -> None:
    """The broker does not wait for ever for one in a long step: all that it sent is here."""
    seat = Seat().joined()
    stay(seat, 1, 1, 0, phase=Phase.ENDED)
    seat.receive(0, 1)
    seat.hear(msg.Bye("the run has ended, 1 of 2 learners have the final model"))
    seat.wait(3600)
    seat.do(ev.StepTaken(100))
    seat.do(ev.LoopEnded())
    seat.do(ev.BoundaryReached())
    assert only(seat.do(ev.BoundaryReached()), ev.Left)
    assert seat.session.leaving.final


def at_the_final_copy(within_s: float = math.inf) -> Seat:
    """The training thread is told to adopt the last version that it lacks."""
    seat = Seat().joined()
    stay(seat, 1, 1, 0, phase=Phase.ENDED)
    seat.receive(0, 1)
    seat.do(ev.LoopEnded(within_s))
    assert one(seat.do(ev.BoundaryReached()), ev.Adopt) == FINAL_COPY
    return seat


def test_nobody_leaves_while_the_final_copy_is_being_made() -> None:
    """The background thread hears the broker and looks at the clock meanwhile."""
    seat = at_the_final_copy(within_s=5.0)
    beat = msg.Beat(EPOCH, Phase.ENDED, (1, 0), (), 0, 0.0, (), 0.0)
    assert not only(seat.hear(beat) + seat.wait(3600), ev.Left)
    assert not seat.session.leaving.final
    assert only(seat.do(ev.BoundaryReached()), ev.Left)
    assert seat.session.leaving.final


def test_a_final_copy_that_fails_for_want_of_memory_is_made_at_the_next_boundary() -> None:
    seat = at_the_final_copy()
    assert not only(seat.do(ev.CopyFailed(FINAL_COPY, "MemoryError: full")), ev.Left)
    assert one(seat.do(ev.BoundaryReached()), ev.Adopt) == FINAL_COPY
    assert only(seat.do(ev.BoundaryReached()), ev.Left)
    assert seat.session.leaving.final


def test_a_final_copy_that_cannot_be_made_is_lacking_when_the_time_is_over() -> None:
    seat = at_the_final_copy(within_s=5.0)
    effects = seat.do(ev.CopyFailed(FINAL_COPY, "MemoryError: full"), after_s=6.0)
    assert only(effects, ev.Left)
    assert not seat.session.leaving.final
    assert seat.session.leaving.lacks == "the final versions of fragment 0"


def test_the_users_limit_holds_whatever_the_broker_says() -> None:
    seat = Seat().joined()
    stay(seat, 1, 0, 0, phase=Phase.ENDING)
    seat.do(ev.LoopEnded(within_s=5.0))
    assert not only(stay(seat, 4, 0, 0, phase=Phase.ENDING), ev.Left)
    effects = stay(seat, 2, 0, 0, phase=Phase.ENDING)
    lacks = "leaves without the last rounds of the run"
    assert one(effects, msg.Bye).reason == f"the loop has ended, it {lacks}"
    assert one(effects, ev.Note).text == lacks


def pushed(seat: Seat) -> None:
    stay(seat, 1, 0, 0, rounds=(open_round(0, 0),))
    seat.do(ev.StepTaken(100))


def test_before_the_goal_the_outcome_of_a_push_is_not_waited_for_for_ever() -> None:
    seat = Seat().joined()
    pushed(seat)
    rounds = (open_round(0, 0),)
    seat.do(ev.LoopEnded())
    assert not only(stay(seat, BROKER_GONE_S - 2, 0, 0, rounds=rounds), ev.Left)
    effects = stay(seat, 4, 0, 0, rounds=rounds)
    lacks = "leaves without the outcome of its last pushes, of fragment 0"
    assert one(effects, msg.Bye).reason == f"the loop has ended, it {lacks}"
    assert one(effects, ev.Note).text == lacks


def test_a_push_is_waited_for_while_it_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    seat = Seat().joined()
    pushed(seat)
    rounds, position = (open_round(0, 0),), 1
    seat.do(ev.LoopEnded())
    for _ in range(100):
        position += 5
        told = stay(seat, 1, 0, 0, rounds=rounds, received=(position,))
        assert not only(told, ev.Left)


def test_without_a_broker_the_open_push_is_told() -> None:
    seat = Seat().joined()
    pushed(seat)
    alone(seat, 10)
    effects = seat.do(ev.LoopEnded())
    assert only(effects, ev.Left)
    assert one(effects, ev.Note).text.endswith("the outcome of its last pushes, of fragment 0")
