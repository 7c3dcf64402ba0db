"""The end of a run waits for hung learners, slow lines and absent ones; and its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from machines import LAYOUT, RUN, Desk, hello, incarnation_of, only

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.ending import LIVES_MAX
from narrows.broker.syncer.machine import Resumed
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.phases import RunPhase
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg
from narrows.proto.flow import patience
from narrows.proto.flow.patience import Flow
from narrows.proto.messages import Phase

GOAL = 10**6
LOST_S = 10.0
"""liveness.lost: no learner is given up sooner."""


def at_the_goal(
    *names: str, prepare: Callable[[Desk], None] = lambda desk: None, **settings: Any
) -> Desk:
    """The last rounds are open; everybody reports, nobody has contributed yet.

    `prepare` makes the time before. The machine knows of it only what it keeps.
    """
    desk = Desk(run__goal_tokens=GOAL, **settings).running(*names)
    prepare(desk)
    desk.count(GOAL)
    desk.say(names[0], msg.Alive(0))
    assert is_ending(desk)
    return desk


def is_ending(desk: Desk) -> bool:
    return desk.state.phase is RunPhase.ENDING


def pass_time(desk: Desk, seconds: float, *names: str) -> list[ev.Effect]:
    """Everybody's background thread reports once a second."""
    effects: list[ev.Effect] = []
    for _ in range(round(seconds)):
        effects += desk.wait(1.0)
        for name in names:
            effects += desk.say(name, msg.Alive(0))
    return effects


def notes(effects: list[ev.Effect], *words: str) -> list[str]:
    found = only(effects, ev.Note)
    return [note.text for note in found if all(word in note.text for word in words)]


def member(desk: Desk, name: str) -> Member:
    found = desk.state.roster.get(name)
    assert found is not None
    return found


def contribute(desk: Desk, name: str) -> list[ev.Effect]:
    """To every open round that waits for the learner; what is merged is written at once."""
    effects: list[ev.Effect] = []
    for index in sorted(desk.state.rounds):
        if index in desk.state.rounds and desk.state.rounds[index].awaits(name):
            effects += desk.contribute(
                name, index, push_id=member(desk, name).participation.last_merged[index] + 1
            )
    return effects


def merge(desk: Desk, effects: list[ev.Effect]) -> list[ev.Effect]:
    """The merges that were begun end."""
    done: list[ev.Effect] = []
    for begun in only(effects, ev.StartMerge):
        done += desk.do(ev.Merged(begun.fragment, begun.version, 7, 0))
    return effects + (merge(desk, done) if done else [])


def end_with(desk: Desk, *names: str) -> list[ev.Effect]:
    """These learners contribute to all last rounds; then the run has ended and is durable."""
    effects: list[ev.Effect] = []
    while is_ending(desk):
        for name in names:
            effects += merge(desk, contribute(desk, name))
        effects += merge(desk, pass_time(desk, 1, *names))
    return effects + desk.do(ev.CheckpointWritten(desk.state.version_sum))


def leave(desk: Desk, name: str) -> list[ev.Effect]:
    """The learner takes the final model and goes."""
    desk.adopt(name)
    return desk.say(name, msg.Bye("the run has ended"))


def slow_line(desk: Desk, name: str, bytes_per_s: float) -> None:
    """The history of a learner's lines."""
    slow = member(desk, name)
    for way in (slow.uplink, slow.copies):
        flow = Flow()
        flow.move((1,), desk.now - 30)
        flow.expect(desk.now - 30)
        for second in range(30):
            flow.move((2 + int(bytes_per_s * second),), desk.now - 30 + second)
        way.flow = flow


def test_a_learner_that_hangs_and_reports_does_not_hold_the_last_rounds() -> None:
    desk = at_the_goal("a", "hung")
    contribute(desk, "a")
    assert not only(pass_time(desk, LOST_S - 2, "a", "hung"), ev.StartMerge)
    assert not member(desk, "hung").given_up
    effects = pass_time(desk, 4, "a", "hung")
    assert [merge.fragment for merge in only(effects, ev.StartMerge)] == [0, 1]
    (note,) = notes(effects, "hung", "fragments 0, 1")
    assert "10 s" in note
    told = {
        learner.name: learner.state for learner in status_of(desk.syncer, {}, desk.now).learners
    }
    assert told == {"a": "live", "hung": "given up"}


def test_whoever_is_given_up_is_not_waited_for_again_in_the_next_rounds() -> None:
    desk = at_the_goal("a", "hung", merge__rounds_in_flight=1)
    contribute(desk, "a")
    merge(desk, pass_time(desk, LOST_S + 2, "a", "hung"))
    assert desk.state.rounds
    for _ in range(3):
        if is_ending(desk):
            begun = contribute(desk, "a")
            assert only(begun, ev.StartMerge)
            merge(desk, begun)
    assert desk.state.phase.is_over


def test_three_usual_rounds_are_waited_for() -> None:
    def slow_rounds(desk: Desk) -> None:
        member(desk, "slow").participation.arrival.add(20.0)

    desk = at_the_goal("a", "slow", prepare=slow_rounds)
    contribute(desk, "a")
    assert not notes(pass_time(desk, 58, "a", "slow"), "goes on without")
    assert only(pass_time(desk, 4, "a", "slow"), ev.StartMerge)


def test_a_learner_without_history_has_three_of_its_own_steps() -> None:
    """Else the whole work of a run whose goal comes before its first round would be lost."""

    def long_steps(desk: Desk) -> None:
        pass_time(desk, 60, "a")
        desk.report("a", step=3, tokens=300, step_s=30.0)

    desk = at_the_goal("a", prepare=long_steps)
    assert not notes(pass_time(desk, 85, "a"), "goes on without")
    assert notes(pass_time(desk, 10, "a"), "goes on without")


def test_a_step_time_that_nobody_can_have_had_holds_nothing_up() -> None:
    def lie(desk: Desk) -> None:
        desk.report("liar", step=2, tokens=200, step_s=1e9)

    desk = at_the_goal("a", "liar", prepare=lie)
    contribute(desk, "a")
    assert only(pass_time(desk, 60, "a", "liar"), ev.StartMerge)


@pytest.mark.parametrize(("bytes_per_s", "is_waited_for"), [(10, True), (1, False)])
def test_a_push_is_waited_for_at_its_usual_rate_only(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, is_waited_for: bool
) -> None:
    """500 bytes at 10 bytes a second take far longer than three rounds."""
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = at_the_goal("a", "slow", prepare=lambda desk: slow_line(desk, "slow", 10.0))
    contribute(desk, "a")
    for index in sorted(desk.state.rounds):
        desk.push("slow", index, push_id=1 + index)
    effects: list[ev.Effect] = []
    for tenth in range(10):
        effects += pass_time(desk, 5, "a", "slow")
        place = {"offset": 100 * tenth, "count": 100}
        effects += desk.chunk("slow", 0, push_id=1, size_bytes=5 * bytes_per_s, **place)
    assert bool(notes(effects, "slow", "goes on without")) is not is_waited_for
    merge = only(effects, ev.StartMerge)[0]
    names = [done.learner for done in merge.contributions]
    assert names == (["a", "slow"] if is_waited_for else ["a"])


@pytest.mark.parametrize(("bytes_per_s", "is_waited_for"), [(10, True), (1, False)])
def test_the_final_model_is_waited_for_at_the_usual_rate_only(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, is_waited_for: bool
) -> None:
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = at_the_goal("a", "slow", prepare=lambda desk: slow_line(desk, "slow", 10.0))
    end_with(desk, "a", "slow")
    leave(desk, "a")
    position, effects = 1, list[ev.Effect]()
    for _ in range(40):
        position += bytes_per_s
        report = msg.Report(20, 4000, 1.0, None, (position,), msg.TokenLedger(), 0.0)
        effects += desk.say("slow", report, after_s=1.0, sent=(1000,))
        if not only(effects, ev.Finish):
            waits_for = status_of(desk.syncer, {}, desk.now).waiting_for
            assert waits_for == "slow to take the final model"
    assert bool(only(effects, ev.Finish)) is not is_waited_for
    if is_waited_for:
        assert only(leave(desk, "slow"), ev.Finish)


@pytest.mark.parametrize("sent", [(), (1,), (500,)])
def test_positions_that_were_never_sent_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch, sent: tuple[int, ...]
) -> None:
    """Nor do those that fall and rise again."""
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = at_the_goal("a", "liar", prepare=lambda desk: slow_line(desk, "liar", 10.0))
    end_with(desk, "a", "liar")
    leave(desk, "a")
    before, effects = member(desk, "liar").copies.flow.moved, list[ev.Effect]()
    for second in range(70):
        position = 10 * second if second % 2 else 1
        report = msg.Report(20, 4000, 1.0, None, (position,), msg.TokenLedger(), 0.0)
        effects += desk.say("liar", report, after_s=1.0, sent=sent)
    moved = member(desk, "liar").copies.flow.moved - before
    assert moved == (489 if sent == (500,) else 0)
    # What was sent may have arrived indeed: it buys the time that it usually takes.
    assert bool(only(effects, ev.Finish)) is (moved == 0)


def test_the_end_waits_for_a_slow_line_as_long_as_others_make_it_plausible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own rate may be anything: what counts is a multiple of what others need."""
    monkeypatch.setattr(patience, "RATE_MIN", 8)

    def lines(desk: Desk) -> None:
        slow_line(desk, "a", 400.0)
        slow_line(desk, "b", 400.0)
        slow_line(desk, "slow", 10.0)

    desk = at_the_goal("a", "b", "slow", prepare=lines)
    end_with(desk, "a", "b", "slow")
    leave(desk, "a")
    leave(desk, "b")
    position, effects = 1, list[ev.Effect]()
    for _ in range(100):
        position += 10
        report = msg.Report(20, 4000, 1.0, None, (position,), msg.TokenLedger(), 0.0)
        effects += desk.say("slow", report, after_s=1.0, sent=(10**6,))
    # 8000 bytes take the others 20 s and this one 800 s.
    (note,) = notes(effects, "goes on without slow")
    assert " in 80 s, " in note


def test_versions_that_are_adopted_one_by_one_are_no_progress() -> None:
    """A new process lacks all of them, and may claim any."""
    desk = at_the_goal("a", "liar", prepare=lambda desk: desk.count(GOAL))
    end_with(desk, "a", "liar")
    leave(desk, "a")
    desk.state.heads[:] = [msg.FragmentHead(10_000, 1)] * 2
    effects: list[ev.Effect] = []
    for version in range(2, 60):
        effects += desk.say("liar", msg.Adopted(0, version), after_s=1.0)
    assert notes(effects, "goes on without liar")


def at_the_end_not_yet_durable(**settings: Any) -> tuple[Desk, list[ev.Effect]]:
    """The last rounds are over; the final checkpoint is being written."""
    desk, effects = at_the_goal("a", "b", **settings), list[ev.Effect]()
    while is_ending(desk):
        for name in ("a", "b"):
            effects += merge(desk, contribute(desk, name))
        effects += merge(desk, pass_time(desk, 1, "a", "b"))
    return desk, effects


def visible_phase(desk: Desk) -> Phase:
    """The phase in status and Beats."""
    phase = status_of(desk.syncer, {}, desk.now).phase
    beats = only(desk.wait(desk.state.config.broker.beat), msg.Beat)
    assert {beat.phase for beat in beats} == {phase}
    return phase


def test_the_end_is_told_when_it_is_durable() -> None:
    """A broker that crashed before would open the last rounds again: some learners would have
    left with one model, the others would get another one."""
    desk, effects = at_the_end_not_yet_durable()
    assert only(effects, ev.WriteCheckpoint)
    assert not notes(effects, "the run has ended")
    assert visible_phase(desk) is Phase.ENDING
    assert status_of(desk.syncer, {}, desk.now).waiting_for == "the disk: the final checkpoint"
    effects = desk.do(ev.CheckpointWritten(desk.state.version_sum))
    assert notes(effects, "the run has ended")
    assert {beat.phase for beat in only(effects, msg.Beat)} == {Phase.ENDED}
    assert visible_phase(desk) is Phase.ENDED


def test_nobody_is_given_up_for_the_time_that_the_final_checkpoint_takes() -> None:
    desk, effects = at_the_end_not_yet_durable()
    effects += pass_time(desk, 5 * LOST_S, "a", "b")
    desk.do(ev.CheckpointWritten(desk.state.version_sum))
    effects += pass_time(desk, LOST_S - 2, "a", "b")
    assert not notes(effects, "goes on without")


def test_who_is_cut_off_during_the_final_checkpoint_is_waited_for() -> None:
    desk, _ = at_the_end_not_yet_durable()
    desk.do(ev.PeerLost(b"a"))
    desk.do(ev.PeerLost(b"b"))
    effects = desk.do(ev.CheckpointWritten(desk.state.version_sum))
    assert not only(effects, ev.Finish)
    desk.say("a", hello("a"))
    leave(desk, "a")
    (finish,) = only(desk.wait(LOST_S), ev.Finish)
    assert "1 of 2 learners" in finish.reason


@pytest.mark.parametrize(("errors", "told"), [("stop", Phase.ENDING), ("serve", Phase.ENDED)])
def test_a_final_checkpoint_that_fails_holds_the_end_up_unless_the_operator_says_otherwise(
    errors: str, told: Phase
) -> None:
    desk, _ = at_the_end_not_yet_durable(broker__journal_errors=errors)
    desk.do(ev.CheckpointFailed("the disk is full"))
    assert visible_phase(desk) is told


def test_a_learner_that_never_takes_the_final_model_is_named() -> None:
    desk = at_the_goal("a", "hung")
    for _ in range(round(LOST_S) + 5):
        merge(desk, contribute(desk, "a"))
        merge(desk, pass_time(desk, 1, "a", "hung"))
    desk.do(ev.CheckpointWritten(desk.state.version_sum))
    effects = leave(desk, "a") + pass_time(desk, LOST_S + 2, "hung")
    (finish,) = only(effects, ev.Finish)
    assert finish.reason == (
        "the run has ended, 1 of 2 learners have the final model;"
        " not adopted: hung (fragments 0, 1)"
    )
    assert only(effects, msg.Bye)
    assert desk.syncer.next_deadline() is None


def test_a_learner_that_comes_back_from_a_long_step_counts_again() -> None:
    """Given up at the first of its last rounds, it is there for the second one."""
    desk = at_the_goal("a", "slow", merge__rounds_in_flight=1)
    contribute(desk, "a")
    merge(desk, pass_time(desk, LOST_S + 2, "a", "slow"))
    assert member(desk, "slow").given_up
    contribute(desk, "slow")
    assert not member(desk, "slow").given_up
    assert only(contribute(desk, "a"), ev.StartMerge)


def test_the_last_rounds_wait_for_a_learner_that_is_cut_off_for_an_instant() -> None:
    desk = at_the_goal("a", "b")
    contribute(desk, "a")
    effects = desk.do(ev.PeerLost(b"b")) + pass_time(desk, 1, "a")
    assert not only(effects, ev.StartMerge) and len(desk.state.rounds) == 2
    desk.say("b", hello("b"))
    merges = only(contribute(desk, "b"), ev.StartMerge)
    assert [[c.learner for c in each.contributions] for each in merges] == [["a", "b"]] * 2


def test_alone_and_cut_off_for_an_instant_a_learner_keeps_its_last_rounds() -> None:
    desk = at_the_goal("a")
    desk.do(ev.PeerLost(b"a"))
    desk.wait(1.0)
    desk.say("a", hello("a"))
    assert [each.fragment for each in only(contribute(desk, "a"), ev.StartMerge)] == [0, 1]


def test_a_learner_that_was_cut_off_in_the_end_is_named() -> None:
    desk = at_the_goal("a", "b")
    desk.do(ev.PeerLost(b"b"))
    end_with(desk, "a")
    effects = leave(desk, "a") + pass_time(desk, LOST_S)
    (finish,) = only(effects, ev.Finish)
    assert "1 of 2 learners" in finish.reason
    assert "not adopted: b (fragments 0, 1)" in finish.reason


def test_a_learner_that_was_silent_when_the_goal_came_is_named() -> None:
    """It was connected still, as one that is stopped is until it counts as lost."""

    def stand_still(desk: Desk) -> None:
        pass_time(desk, LOST_S - 2, "a")

    desk = at_the_goal("a", "b", prepare=stand_still)
    end_with(desk, "a")
    effects = leave(desk, "a") + pass_time(desk, 2 * LOST_S)
    (finish,) = only(effects, ev.Finish)
    assert "not adopted: b (fragments 0, 1)" in finish.reason


def test_a_learner_that_died_long_before_does_not_belong_to_the_end() -> None:
    def die(desk: Desk) -> None:
        member(desk, "b").participation.arrival.add(1.0)
        desk.do(ev.PeerLost(b"b"))
        pass_time(desk, 20 * LOST_S, "a")

    desk = at_the_goal("a", "b", prepare=die)
    end_with(desk, "a")
    (finish,) = only(leave(desk, "a"), ev.Finish)
    assert finish.reason == "the run has ended, all learners have the final model"


def test_a_joiner_that_hangs_does_not_hold_the_end() -> None:
    """It has no work; a learner of before a restart, which looks the same, may have some."""
    desk = at_the_goal("a")
    desk.say("new", hello("new"))
    desk.say("a", msg.Bye("stopped"))
    pass_time(desk, LOST_S - 2, "new")
    assert is_ending(desk)
    pass_time(desk, 4, "new")
    assert desk.state.phase.is_over


def finished_run() -> Desk:
    """A broker that was started again after the end."""
    heads = (msg.FragmentHead(3, 1), msg.FragmentHead(3, 2))
    return Desk(resumed=Resumed(LAYOUT, 0, heads, 1000, Phase.ENDED))


def test_a_broker_started_on_a_finished_run_does_not_claim_that_anybody_came() -> None:
    desk = finished_run()
    assert not only(desk.wait(LOST_S - 1), ev.Finish)
    (finish,) = only(desk.wait(2.0), ev.Finish)
    assert finish.reason == "the run has ended, no learner has come for the final model"


def test_who_comes_back_to_a_finished_run_is_waited_for() -> None:
    desk = finished_run()
    desk.say("a", hello("a", run_id=RUN), after_s=5.0)
    assert not only(pass_time(desk, LOST_S - 2, "a"), ev.Finish)
    (finish,) = only(leave(desk, "a"), ev.Finish)
    assert finish.reason == "the run has ended, all learners that came back have the final model"


def test_a_learner_that_has_the_final_model_and_stays_does_not_hold_the_end() -> None:
    """It evaluates before it leaves, perhaps."""
    desk = at_the_goal("a")
    end_with(desk, "a")
    desk.adopt("a")
    effects = pass_time(desk, 4 * LOST_S, "a")
    assert notes(effects, "a: it has the final model and has not left")
    (finish,) = only(effects, ev.Finish)
    assert finish.reason == "the run has ended, all learners have the final model"


def test_work_that_the_last_round_drops_is_told() -> None:
    desk = at_the_goal("a", "hung", merge__quorum=2)
    effects: list[ev.Effect] = []
    while is_ending(desk):
        for index in sorted(desk.state.rounds):
            if desk.state.rounds[index].awaits("a"):
                effects += desk.contribute("a", index, push_id=desk.handle + 1)
        effects += pass_time(desk, 1, "a", "hung")
    for index in (0, 1):
        what = f"the last round of fragment {index} ends without a merge, the work of a is dropped"
        assert len(notes(effects, what)) == 1


def test_names_do_not_fill_the_log() -> None:
    names = [f"n{number:02}" for number in range(15)]
    desk = at_the_goal("a", *names)
    for name in names:
        desk.do(ev.PeerLost(name.encode()))
    end_with(desk, "a")
    effects = leave(desk, "a") + pass_time(desk, LOST_S)
    (finish,) = only(effects, ev.Finish)
    assert "1 of 16 learners" in finish.reason
    assert finish.reason.endswith("n09 (fragments 0, 1) and 5 more")


def test_the_restart_of_a_learner_begins_its_wait_anew() -> None:
    desk = at_the_goal("a", "b")
    end_with(desk, "a", "b")
    leave(desk, "a")
    pass_time(desk, LOST_S - 3, "b")
    desk.do(ev.PeerLost(b"b"))
    again = hello("b", incarnation=incarnation_of("b", 2))
    desk.do(ev.Received(b"b", again, "tcp://b"), after_s=2.0)
    assert not only(pass_time(desk, LOST_S - 2, "b"), ev.Finish)
    (finish,) = only(leave(desk, "b"), ev.Finish)
    assert finish.reason == "the run has ended, all learners have the final model"


def test_a_learner_that_crashes_again_and_again_does_not_hold_the_end() -> None:
    desk = at_the_goal("a", "b")
    end_with(desk, "a", "b")
    effects = leave(desk, "a")
    life = 1
    while not only(effects, ev.Finish):
        life += 1
        assert life < 10, "each life of the learner is waited for as if it were the first"
        effects = desk.do(ev.PeerLost(b"b"))
        again = hello("b", incarnation=incarnation_of("b", life))
        effects += desk.do(ev.Received(b"b", again, "tcp://b"), after_s=LOST_S / 2)
        effects += pass_time(desk, LOST_S / 2, "b")
    assert life == LIVES_MAX + 1
    assert len(notes(effects, "without b: it was started 4 times while the end waited for it")) == 1
    (finish,) = only(effects, ev.Finish)
    assert "not adopted: b (fragments 0, 1)" in finish.reason
