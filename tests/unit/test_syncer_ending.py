"""The end: the goal, one last round per fragment, and who is waited for."""

from __future__ import annotations

from desk import Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.timing import REDIAL_S

ALL, BEHIND = (0, 1, 2, 3), (0, 0, 0, 0)


def at_goal(*names: str) -> Desk:
    """The goal is reached by a push of fragment 0."""
    desk = running(*names, config=configure(run={"goal_tokens": 1000}))
    desk.take(ev.Send)
    for name in names:
        desk.push(name, 0, 1, tokens=4000 // len(names) + 1)
    assert len(desk.noted("goal")) == 1 and desk.status["phase"] == "ending"
    return desk


def events(desk: Desk) -> list[str]:
    return [type(e).__name__ for e in desk.log if isinstance(e, ev.CommitEnd | ev.Finish)]


def hang(desk: Desk, seconds: int) -> None:
    """Both report. a has nothing more to push; of b nothing moves, though it owes pushes."""
    for _ in range(seconds):
        desk.now += 1.0
        desk.report("a", 10, held=BEHIND, finished=ALL)
        desk.report("b", 10, held=BEHIND)


def test_every_fragment_gets_a_last_round_and_everybody_the_final_model() -> None:
    desk = at_goal("a", "b")
    desk.take(ev.Merge)
    for fragment in ALL:
        desk.push("a", fragment, 10 + fragment)
    desk.report("a", 30, held=BEHIND, finished=ALL)
    assert not desk.take(ev.Merge), "b has pushed nothing and has not said that it is done"
    for fragment in ALL:
        desk.push("b", fragment, 10 + fragment)
    desk.report("b", 30, held=BEHIND, finished=ALL)
    assert events(desk) == ["CommitEnd"]
    assert desk.merges() == [(fragment, ["a", "b"], "last") for fragment in ALL]
    desk.pass_(1.0, "a", "b")
    beat = desk.told(msg.Beat, "a")[-1]
    assert beat.phase is msg.Phase.ENDED and beat.heads == (2, 1, 1, 1)
    assert desk.status["waiting_for"] == ["a, b to adopt the final model"]
    desk.leave("a")
    desk.report("b", 30)
    assert not events(desk), "b holds the heads, and may not know yet that they are final"
    desk.leave("b")
    assert desk.take(ev.Finish) == [ev.Finish(())]
    desk.pass_(5.0, "b")
    assert not desk.take(ev.Finish), "it is told once"


def test_the_end_does_not_wait_for_a_learner_whose_key_was_revoked() -> None:
    desk = at_goal("a", "b")
    desk.report("a", 30, held=BEHIND, finished=ALL)
    assert events(desk) == [] and "b" in str(desk.status["waiting_for"])
    desk.do(desk.syncer.revoked, ["b"])
    assert events(desk) == ["CommitEnd"]
    desk.leave("a")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_a_learner_that_stands_still_costs_30_s_in_all_and_is_named() -> None:
    desk = at_goal("a", "b")
    hang(desk, 29)
    assert events(desk) == []
    assert desk.status["waiting_for"][0] == "b to push fragment 0"
    hang(desk, 1)
    assert events(desk) == ["CommitEnd"]
    hang(desk, 29)
    assert events(desk) == ["CommitEnd"], "a is waited for anew: it owes no push"
    assert desk.status["waiting_for"] == ["a to adopt the final model"]
    desk.leave("a")
    assert desk.take(ev.Finish) == [ev.Finish(("b (fragment 0)",))]


def test_who_waited_for_a_learner_that_stands_still_is_not_given_up_with_it() -> None:
    desk = at_goal("a", "b")
    desk.take(ev.Merge)
    for fragment in ALL:
        desk.push("a", fragment, 10 + fragment)
    desk.pass_(31.0, "a", "b", held=BEHIND)
    desk.report("a", 30, held=BEHIND, finished=(0, 1))
    assert [(fragment, names) for fragment, names, _ in desk.merges()] == [(f, ["a"]) for f in ALL]
    assert events(desk) == [], "a has not said yet whether it has more of fragments 2 and 3"
    desk.report("a", 30, held=BEHIND, finished=ALL)
    assert events(desk) == ["CommitEnd"], "a is waited for until it has adopted the final model"


def test_a_learner_that_was_given_up_and_moves_again_gets_the_final_model() -> None:
    desk = at_goal("a", "b")
    hang(desk, 31)
    desk.send("b", msg.Fetch(msg.DataKind.STATE, 0, 1, 0, ((0, 1),)))
    desk.leave("a")
    assert events(desk) == ["CommitEnd"]
    desk.leave("b")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_a_full_disk_at_the_end_takes_nobodys_time() -> None:
    desk = at_goal("a", "b", "c")
    desk.commits = False
    for second in range(80):
        if second == 35:
            desk.hello("b", peer="b:1")
        hang(desk, 1)
        desk.report("c", 10, held=BEHIND)
    assert events(desk) == ["CommitEnd"]
    desk.do(desk.syncer.ended)
    assert desk.status["waiting_for"] == ["a, b to adopt the final model"]


def test_a_learner_that_is_cut_off_at_the_end_may_come_back() -> None:
    desk = at_goal("a", "b")
    desk.pass_(20.0, "a", finished=ALL)
    assert events(desk) == []
    desk.hello("b", peer="b:1")
    for fragment in ALL:
        desk.push("b", fragment, 10 + fragment)
    desk.report("b", 30, finished=ALL)
    assert events(desk)[:1] == ["CommitEnd"]


def test_a_learner_that_moves_is_waited_for_ten_minutes_and_no_longer() -> None:
    desk = at_goal("a")
    for second in range(599):
        desk.now += 1.0
        desk.report("a", 100 + second)
    assert events(desk) == []
    desk.pass_(2.0, "a", steps_per_s=10)
    assert events(desk)[:1] == ["CommitEnd"]


# After a start of the broker.


def restarted() -> Desk:
    """A start at the goal. a and b have taught the run; a third one may have joined it."""
    merged = {(incarnation(name), 0): 3 for name in "ab"}
    desk = Desk(configure(run={"goal_tokens": 1000}), resumed=resumed(merged=merged))
    desk.hello("a")
    return desk


def test_the_end_waits_no_longer_than_until_all_who_taught_are_back() -> None:
    desk = restarted()
    desk.hello("b", 2)  # Started again meanwhile: another incarnation of the same name.
    desk.pass_(REDIAL_S - 0.5, "a", "b", finished=ALL)
    assert events(desk) == [], "one that has taught nothing yet may still be dialling"
    desk.pass_(1.0, "a", "b", finished=ALL)
    assert events(desk) == ["CommitEnd"]
    desk.leave("a", "b")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_an_ended_run_hands_out_its_final_model() -> None:
    merged = {(incarnation("b"), 0): 3}
    desk = Desk(resumed=resumed(phase=msg.Phase.ENDED, merged=merged))
    welcome = desk.hello("a")
    assert (welcome.role, welcome.beat.phase) == (msg.Role.ADOPT, msg.Phase.ENDED)
    desk.pass_(25.0, "a")
    assert events(desk) == [] and "for another 5 s" in desk.status["waiting_for"][0]
    desk.report("a", 0)
    desk.pass_(6.0, "a")
    assert events(desk) == ["Finish"]
