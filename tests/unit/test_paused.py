"""Below the quorum: a round waits for learners that declined, and is not opened again and again."""

from __future__ import annotations

from collections import Counter

import pytest
from machines import Desk, Seat, hello, one, only, open_round

from narrows.bench.sim.broker import SimulatedRound
from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import load_config
from narrows.broker.syncer import events as bev
from narrows.broker.syncer.status import status_of
from narrows.learner.session import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.timing import ANSWER_AGAIN_S


def wait(desk: Desk, seconds: int, *names: str) -> list[bev.Effect]:
    """Time passes; the learners named are heard from each second."""
    effects: list[bev.Effect] = []
    for _ in range(seconds):
        effects += desk.wait(1.0)
        for name in names:
            effects += desk.say(name, msg.Alive(0))
    return effects


def half(reason: str = "evaluating") -> Desk:
    """Two contributions are wanted: a has contributed, b evaluates."""
    desk = Desk(merge__quorum=2, merge__rounds_in_flight=1).running("a", "b")
    desk.contribute("a")
    desk.say("b", msg.Decline(0, 0, 1, reason))
    return desk


def test_a_round_that_lacks_a_paused_learner_stays_open_with_what_it_has() -> None:
    desk = half()
    effects = wait(desk, 600, "a", "b")
    assert {beat.rounds for beat in only(effects, msg.Beat)} == {(msg.OpenRound(0, 0, 1, -1),)}
    assert not only(effects, bev.Drop)
    assert sorted(desk.round.contributed) == ["a"]


def test_the_push_of_a_learner_that_goes_on_completes_the_quorum() -> None:
    desk = half()
    wait(desk, 600, "a", "b")
    merge = one(desk.contribute("b"), bev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a", "b"]


def test_the_time_that_nobody_waited_is_not_how_long_a_contribution_takes() -> None:
    """Rounds would not wait for b for a long time: it seems to come ten minutes late."""
    desk = half()
    wait(desk, 600, "a", "b")
    desk.contribute("b")
    b = desk.state.roster.get("b")
    assert b is not None and b.participation.arrival.mean < 30.0
    desk = Desk(merge__quorum=2, merge__rounds_in_flight=1).running("a")
    desk.contribute("a")
    wait(desk, 600, "a")
    desk.say("b", hello("b"))
    desk.adopt("b")
    desk.contribute("b")
    b = desk.state.roster.get("b")
    assert b is not None and b.participation.arrival.mean < 30.0


def test_status_names_who_is_waited_for() -> None:
    desk = half()
    told = status_of(desk.syncer, {}, desk.now).waiting_for
    assert told == "fragment 0: 1 of 2 contributions; b declined (evaluating)"


def test_the_reason_of_a_decline_does_nothing_to_a_terminal() -> None:
    desk = half("\x1b]0;mine\x07\x1b[2J\x1b[31m\u202e the run is fine")
    told = status_of(desk.syncer, {}, desk.now).waiting_for
    assert "b declined (" in told and told.isprintable()


def test_a_newcomer_takes_the_place_of_a_learner_that_is_dead() -> None:
    desk = half()
    desk.do(bev.PeerLost(b"b"))
    wait(desk, 600, "a")
    desk.say("c", hello("c"))
    desk.adopt("c")
    merge = one(desk.contribute("c"), bev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["a", "c"]


def test_when_both_pause_the_first_to_go_on_contributes() -> None:
    desk = Desk(merge__rounds_in_flight=1).running("a", "b")
    for name in "ab":
        desk.say(name, msg.Decline(0, 0, 1, "evaluating"))
    wait(desk, 600, "a", "b")
    assert desk.round.attempt == 1
    merge = one(desk.contribute("b"), bev.StartMerge)
    assert [done.learner for done in merge.contributions] == ["b"]


def test_an_end_without_a_quorum_closes_the_round() -> None:
    desk = Desk(merge__quorum=2, run__goal_tokens=1000).running("a", "b")
    desk.contribute("a")
    desk.say("b", msg.Decline(0, 0, 1, "evaluating"))
    desk.count(1000)
    desk.say("a", msg.Alive(0))
    effects = desk.wait(1.0)
    assert desk.state.phase.stored is msg.Phase.ENDING
    assert {r.attempt for beat in only(effects, msg.Beat) for r in beat.rounds} == {1, 2}


# The learner.


@pytest.mark.parametrize(
    "failure",
    [
        ev.EncodeFailed(1, "out of memory"),
        ev.Received(msg.Refuse(ErrorCode.NOT_FINITE, "no", fragment=0, push_id=1)),
        ev.Received(msg.Refuse(ErrorCode.NO_ROUND, "lost", fragment=0, push_id=1)),
    ],
)
def test_a_push_that_failed_is_made_anew_while_its_round_is_open(failure: ev.Event) -> None:
    """The broker does not ask again: the round may be open for long."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.do(failure)
    assert not only(seat.step(after_s=0.1), msg.Push)
    seat.hear(msg.Probe(0), after_s=ANSWER_AGAIN_S)
    again = one(seat.step(), msg.Push)
    assert (again.push_id, again.steps) == (2, 3)


def test_a_push_that_is_open_is_not_made_anew() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0), open_round(1, 0))
    seat.step()
    seat.do(ev.EncodeFailed(1, "out of memory"))
    seat.hear(msg.Probe(0), after_s=ANSWER_AGAIN_S)
    assert one(seat.step(), msg.Push).fragment == 0


def test_a_name_that_has_contributed_is_not_pushed_for_again() -> None:
    """By an older process: this refusal will be the same until there is a new version."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.hear(msg.Refuse(ErrorCode.PUSH_CONFLICT, "no", fragment=0, push_id=1))
    for _ in range(60):
        assert not only(seat.step(), msg.Push)


def test_after_a_pause_a_refused_push_is_made_anew() -> None:
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    seat.step()
    seat.hear(msg.Refuse(ErrorCode.NOT_FINITE, "no", fragment=0, push_id=1))
    seat.do(ev.Paused("evaluating"))
    seat.do(ev.Continued())
    assert one(seat.step(after_s=0.1), msg.Push).push_id == 2


def test_a_refusal_that_was_lost_is_told_again_when_the_push_is_announced_again() -> None:
    desk = Desk().running("a")
    desk.push("a")
    desk.do(bev.ChunkArrived(desk.header("a", 0), 5))
    desk.do(bev.ChunkDamaged(desk.header("a", 0), 5, ErrorCode.BAD_PAYLOAD, "no"))
    again = one(desk.push("a"), msg.Refuse)
    assert (again.code, again.push_id) == (ErrorCode.NO_ROUND, 1)
    assert desk.state.tally.refused == {ErrorCode.BAD_PAYLOAD: 1}


# Both.


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_long_pause_of_one_costs_no_pushes_and_both_go_on_afterwards(quorum: int) -> None:
    """Fifteen pushes in as many seconds came for one version, with a quorum of two."""
    config = load_config(None, {"run.learners_at_start": 2, "merge.quorum": quorum})
    pushes: Counter[str] = Counter()

    def count(at_s: float, sender: str, receiver: str, message: msg.ControlMessage) -> None:
        if isinstance(message, msg.Push):
            pushes[sender] += 1

    learners = [LearnerSpec(name, step_s=0.5) for name in "ab"]
    run = Simulation(config, 1, Faults(until_s=0.0), learners, on_message=count)
    run.run(100.0)
    assert run.broker is not None
    state = run.broker.syncer.state
    versions, pushed = state.version_sum, pushes["a"]
    run.learners["b"].pause(600.0)
    run.run(690.0)
    if quorum == 2:
        assert pushes["a"] - pushed <= 2 * config.merge.rounds_in_flight
        assert state.version_sum - versions <= config.merge.rounds_in_flight
    else:
        assert state.version_sum - versions > 200
    versions = state.version_sum
    run.run(800.0)
    assert state.version_sum - versions > 40
    late = [
        record for record in run.trace if isinstance(record, SimulatedRound) and record.at_s > 720.0
    ]
    assert all(len(record.contributors) == 2 for record in late)


def test_who_begins_with_the_run_answers_the_rounds_that_are_open_already() -> None:
    """Another learner may have contributed before this one joined; with an optimizer without state
    it would warm up in a run under way, but not in one at version 0."""
    seat = Seat(warm_up_steps=20)
    seat.do(ev.DeadlineReached())
    seat.welcome((0, 0), rounds=(open_round(0, 0), open_round(1, 0)))
    for index in range(2):
        seat.receive(index, 0, kind=msg.DataKind.STATE)
    effects = seat.do(ev.BoundaryReached())
    effects += seat.do(ev.StepTaken(10))
    assert not only(effects, msg.Decline)
    assert [push.fragment for push in only(effects, msg.Push)] == [0, 1]
