"""The life of a round: launch, collect, merge, commit, publish."""

from __future__ import annotations

import pytest
from desk import CHUNKS, RUN, Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg


def to_launch(desk: Desk, *names: str, fragment: int = 0) -> None:
    """Lets time pass until a fragment collects; everybody reports."""
    for _ in range(100):
        if any(each["fragment"] == fragment for each in desk.status["rounds"]):
            return
        desk.pass_(0.05, *names, steps_per_s=0.5)
    raise AssertionError(desk.status)


def merges(desk: Desk) -> list[tuple[int, list[str], str]]:
    return [(m.fragment, [p.learner for p in m.pushes], m.reason) for m in desk.take(ev.Merge)]


def test_a_version_exists_when_it_is_durable_and_not_before() -> None:
    desk = running("a")
    desk.commits = False
    to_launch(desk, "a")
    desk.push("a", 0, 1, tokens=4000)
    assert [m[:2] for m in desk.take(ev.Merge)] == [(0, 1)]

    def seen() -> tuple[object, ...]:
        desk.pass_(1.0, "a", steps_per_s=10)
        beat = desk.told(msg.Beat, "a")[-1]
        return beat.heads[0], beat.run_tokens, desk.syncer.run_tokens

    assert seen() == (0, 0, 0)
    assert desk.do(desk.syncer.merged, 0)[0] == ev.Commit(0)
    assert seen() == (0, 0, 0)
    assert desk.status["rounds"][0]["stage"] == "committing"
    assert desk.do(desk.syncer.durable, 0)[0] == ev.Publish(0, 1)
    assert seen() == (1, 1000, 1000)
    assert desk.status["learners"]["a"]["merged_tokens"] == 1000


def test_two_fragments_at_most_are_on_their_way_in_turn() -> None:
    desk = running("a")
    desk.commits = False
    launched = []
    for round_ in range(4):
        desk.pass_(2.0, "a", steps_per_s=10)
        open_ = [each["fragment"] for each in desk.status["rounds"]]
        launched.append(open_)
        desk.push("a", round_, round_ + 1)
        desk.do(desk.syncer.merged, round_)
        desk.do(desk.syncer.durable, round_)
    assert launched == [[0, 1], [1, 2], [2, 3], [0, 3]]


def test_a_launch_waits_for_its_spacing_and_for_somebody() -> None:
    desk = running("a")  # Period 1 s, spacing 0.25 s.
    to_launch(desk, "a")
    started = desk.now
    to_launch(desk, fragment=1)
    assert 0.25 <= desk.now - started < 0.35
    desk = Desk(resumed=resumed())
    desk.pass_(9.0)
    assert not desk.status["rounds"], "nobody is here who could push"


def test_what_a_leaving_learner_has_pushed_is_merged_though_nobody_trains_any_more() -> None:
    desk = running("a")
    to_launch(desk, "a", fragment=1)
    assert len(desk.status["rounds"]) == 2, "open and empty, in the way of all others"
    desk.report("a", 50, paused="leaving")
    desk.push("a", 2, 1)
    desk.push("a", 3, 2)
    desk.pass_(2.0, "a", paused="leaving")
    assert [m[:2] for m in merges(desk)] == [(2, ["a"]), (3, ["a"])]


def test_the_first_pushes_of_a_learner_that_leaves_before_its_pace_is_known_are_merged() -> None:
    desk = Desk(resumed=resumed())
    desk.hello("a")
    desk.report("a", 3, paused="leaving")
    desk.push("a", 0, 1)
    desk.pass_(2.0, "a", paused="leaving")
    assert [m[:2] for m in merges(desk)] == [(0, ["a"])]


def test_a_learner_whose_push_is_announced_or_being_decoded_is_waited_for() -> None:
    desk = running("a", "b", "c")
    to_launch(desk, "a", "b", "c")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1)
    desk.announce("c", 0, 1)
    for chunk in range(CHUNKS):
        assert not desk.take(ev.Merge)
        desk.chunk("c", 0, 1, chunk)
    desk.pass_(0.5)
    assert not desk.take(ev.Merge), "the window is over, but only decoding is missing"
    for chunk in range(CHUNKS):
        desk.checked("c", 0, 1, chunk)
    assert merges(desk) == [(0, ["a", "b", "c"], "everybody")]


def test_a_learner_that_does_not_come_delays_a_merge_by_the_window() -> None:
    desk = running("a", "b")
    to_launch(desk, "a", "b")
    desk.push("a", 0, 1)
    # 0.9 * (2 * 0.1) - what it took, or one spacing of 0.25 s.
    desk.pass_(0.24)
    assert not desk.take(ev.Merge)
    assert desk.syncer.deadline(desk.now) < desk.now + 0.02
    desk.pass_(0.02)
    assert merges(desk) == [(0, ["a"], "window")]


@pytest.mark.parametrize("why", ["silent", "paused", "left", "slow", "joining"])
def test_who_cannot_come_is_not_waited_for(why: str) -> None:
    desk = running("a", "b")
    if why == "slow":  # Its step takes 5 s; the window stays below 1 s.
        for _ in range(12):
            desk.pass_(5.0, "a", steps_per_s=10)
            desk.steps["b"] += 1
            desk.report("b", int(desk.steps["b"]))
    elif why == "joining":
        desk.hello("c")
        desk.push("b", 0, 1)
    elif why == "silent":
        desk.pass_(3.0, "a", steps_per_s=10)
    elif why == "paused":
        desk.report("b", 20, paused="evaluating")
    else:
        desk.send("b", msg.Bye("done"))
    to_launch(desk, "a")
    desk.take(ev.Merge)
    desk.push("a", 0, 2)
    assert [reason for _, _, reason in merges(desk)] == ["everybody"]


def test_the_quorum_is_waited_for_and_never_more_than_who_is_ready() -> None:
    desk = running("a", "b", "c", config=configure(merge={"quorum": 3}))
    to_launch(desk, "a", "b", "c")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1)
    desk.pass_(20.0, "a", "b", "c", steps_per_s=10)
    assert not desk.take(ev.Merge)
    assert desk.status["waiting_for"][0] == "c to push fragment 0"
    desk.pass_(3.0, "a", "b", steps_per_s=10)
    assert merges(desk)[0] == (0, ["a", "b"], "everybody")


def test_streaming_takes_everybody_and_not_just_as_many() -> None:
    config = configure(run={"mode": msg.Mode.STREAMING}, merge={"quorum": 0})
    desk = running("a", "b", config=config)
    to_launch(desk, "a", "b")
    desk.push("a", 0, 1)
    desk.pass_(20.0, "a", "b", steps_per_s=10)
    assert not desk.take(ev.Merge)
    desk.push("b", 0, 1)
    assert merges(desk)[0] == (0, ["a", "b"], "everybody")


def test_the_first_round_takes_everybody_who_began_the_run_and_later_ones_no_newcomer() -> None:
    config = configure(run={"mode": msg.Mode.STREAMING}, merge={"quorum": 0})
    desk = running("a", config=config)
    desk.hello("b")  # Version 0 is on its way to it.
    to_launch(desk, "a")
    desk.push("a", 0, 1)
    desk.send("b", msg.Report(0, 0, None, (-1,) * 4))
    assert not desk.take(ev.Merge)
    assert desk.status["waiting_for"][0] == "b to push fragment 0"
    desk.report("b", 0)
    desk.push("b", 0, 1)
    assert merges(desk)[0] == (0, ["a", "b"], "everybody")

    later = Desk(config, resumed=resumed())
    for name in "ab":
        later.hello(name)
    later.report("a", 0)
    to_launch(later, "a")
    later.push("a", 0, 1)
    assert merges(later)[0] == (0, ["a"], "everybody")


def test_lockstep_launches_at_once_and_knows_no_pace() -> None:
    config = configure(
        run={"mode": msg.Mode.DILOCO},
        fragments={"count": 1, "overlap_steps": 0},
        merge={"quorum": 0, "weights": "equal"},
    )
    desk = Desk(config, resumed=resumed(heads=(5,), period_s=0.0))
    desk.hello("a")
    desk.report("a", 0, held=(5,))
    for version in range(6, 9):
        assert desk.status["rounds"][0]["stage"] == "collecting"
        desk.announce("a", 0, version)
        for chunk in range(4 * CHUNKS):
            if desk.chunk("a", 0, version, chunk):
                desk.checked("a", 0, version, chunk)
        assert desk.heads == [version]


def test_late_pushes_count_in_the_next_round_whatever_their_base() -> None:
    desk = running("a", "b")
    to_launch(desk, "a", "b")
    desk.push("a", 0, 1)
    desk.pass_(0.3)
    assert merges(desk) == [(0, ["a"], "window")]
    desk.push("b", 0, 1, base=0)
    for fragment in (1, 2, 3):
        to_launch(desk, "a", "b", fragment=fragment)
        desk.push("a", fragment, 1 + fragment)
        desk.push("b", fragment, 1 + fragment)
    desk.take(ev.Merge)
    to_launch(desk, "a", "b")
    desk.push("a", 0, 9)
    assert merges(desk) == [(0, ["a", "b"], "everybody")]


def test_a_failed_merge_changes_nothing_and_is_told_to_its_learners() -> None:
    desk = running("a", "b")
    desk.commits = False
    to_launch(desk, "a", "b")
    desk.push("a", 0, 1)
    desk.push("b", 0, 4)
    desk.take(ev.Merge)
    desk.do(desk.syncer.merge_failed, 0, FloatingPointError("overflow"))
    assert desk.heads[0] == 0 and desk.syncer.run_tokens == 0
    told = desk.told(msg.Refuse)
    assert [(each.code, each.push_id) for each in told] == [
        ("merge_failed", 1),
        ("merge_failed", 4),
    ]
    assert all("next push" in each.remedy for each in told)
    desk.pass_(1.0, "a", "b", steps_per_s=10)
    desk.push("a", 1, 2)
    assert desk.status["rounds"], "the run goes on"


def test_a_full_disk_holds_publishing_back_and_nothing_else() -> None:
    desk = running("a")
    desk.commits = False
    to_launch(desk, "a")
    desk.push("a", 0, 1)
    desk.do(desk.syncer.merged, 0)
    for _ in range(3):
        desk.do(desk.syncer.disk_failed, 0, OSError("no space left"))
        desk.pass_(2.0, "a", steps_per_s=10)
    assert desk.status["waiting_for"][0].startswith("the disk: fragment 0 cannot be written (no s")
    assert [n.event for n in desk.log if isinstance(n, ev.Note)].count("disk_failed") == 1
    desk.push("a", 1, 2)
    assert desk.status["rounds"][1]["stage"] == "merging"
    desk.do(desk.syncer.durable, 0)
    assert desk.heads[0] == 1 and "disk" not in str(desk.status["waiting_for"])


def test_a_beat_goes_out_each_second_at_each_launch_and_at_each_due() -> None:
    desk = running("a", "b", steps_per_s=0.1)  # Period 100 s.
    desk.take(ev.Send)
    desk.pass_(3.0, "a", "b", steps_per_s=0.1)
    assert len(desk.told(msg.Beat, "a")) == 3
    desk = running("a")
    desk.commits = False
    assert desk.told(msg.Beat, "a")[-1].collecting == (0,)
    desk.push("a", 0, 1)
    beat = desk.told(msg.Beat, "a")[-1]
    assert beat.collecting == () and beat.period_s == pytest.approx(1.0, rel=0.2)


def test_step_times_are_medians_on_the_brokers_clock_without_pauses() -> None:
    desk = running("a")
    for _ in range(4):
        desk.pass_(1.0, "a", steps_per_s=10)
    desk.report("a", int(desk.steps["a"]), paused="saving")
    desk.pass_(60.0)
    desk.report("a", int(desk.steps["a"]) + 1)
    desk.now += 1.0
    desk.report("a", int(desk.steps["a"]) + 11)
    assert desk.status["learners"]["a"]["steps_per_s"] == 10.0
    # A claim of a million steps in a second is one of eight intervals, not the pace.
    desk.report("a", 1_000_000)
    assert desk.status["learners"]["a"]["steps_per_s"] == 10.0


def test_the_pace_stands_while_nobody_is_here() -> None:
    desk = running("a", "b")
    period_s = desk.status["period_s"]
    assert period_s == pytest.approx(1.0)
    desk.report("a", 20, paused="evaluating")
    desk.send("b", msg.Bye("done"))
    desk.pass_(10.0)
    assert desk.status["period_s"] == period_s
    assert desk.status["waiting_for"] == ["learners: a paused"]


def test_a_broker_that_stood_still_judges_nobody() -> None:
    desk = running("a", "b", config=configure(merge={"quorum": 2}))
    to_launch(desk, "a", "b")
    desk.push("a", 0, 1)
    desk.now += 60.0  # SIGSTOP; then the poll finds what has come meanwhile, in any order.
    desk.do(desk.syncer.advance)
    assert not desk.take(ev.Merge)
    assert isinstance(desk.hello("b", 2, peer="b:thief"), msg.Refuse)
    desk.push("b", 0, 1)
    assert merges(desk) == [(0, ["a", "b"], "everybody")]
    assert desk.status["learners"]["b"]["steps_per_s"] == pytest.approx(10.0, rel=0.2)


def test_after_a_start_the_run_has_a_pace_at_once() -> None:
    """Killed between commit and publish: the head is the new version, and its push is merged."""
    desk = Desk(resumed=resumed(merged={(incarnation("a"), 0): 1}))
    held = (msg.Held(4, 99),) + (msg.Held(5, 99),) * 3
    welcome = desk.hello("a", run_id=RUN, epoch="6-0123abcd", held=held)
    assert isinstance(welcome, msg.Welcome)
    assert (welcome.beat.heads, welcome.beat.period_s) == ((5, 5, 5, 5), 1.0)
    assert (welcome.beat.run_tokens, welcome.go_back) == (1000, ())
    desk.announce("a", 0, 1)  # It does not know yet that version 5 holds it.
    desk.send_chunks("a", 0, 1)
    desk.report("a", 50, held=(4, 5, 5, 5))
    desk.pass_(1.0, "a")
    assert desk.status["rounds"], "a round is launched though no step time is known"
    desk.report("a", 51)
    desk.push("a", 0, 2)
    assert [(m.version, [p.push_id for p in m.pushes]) for m in desk.take(ev.Merge)] == [(6, [2])]


def test_learners_away_half_of_the_time_hold_nobody_up_and_lose_nothing() -> None:
    """Each is gone for 20 s of 40 s, in turn; it answers what is open when it is here."""
    desk = running("a", "b")
    pushed = {"a": 0, "b": 0}
    tokens = 0
    for second in range(120):
        here = [name for name, phase in (("a", 0), ("b", 10)) if (second + phase) % 40 < 20]
        for name in here:
            open_ = [each["fragment"] for each in desk.status["rounds"]]
            for fragment in open_:
                pushed[name] += 1
                desk.push(name, fragment, pushed[name])
                tokens += 1000
        desk.pass_(1.0, *here, steps_per_s=10)
        if second % 40 == 39:
            for name in ("a", "b"):
                desk.hello(name, peer=f"{name}:1")
    waiting = sum(each["pushes"] for each in desk.status["rounds"])
    merged = sum(each["merged_tokens"] for each in desk.status["learners"].values())
    assert desk.status["merges"] > 60
    assert desk.syncer.run_tokens == merged
    assert tokens // 4 - merged <= (waiting + 8) * 250


def test_chunks_that_nobody_announced_hold_nobody_up() -> None:
    desk = running("a", "b")
    desk.send_chunks("b", 0, 1)
    assert desk.chunk("b", 1, 2, 0)
    desk.push("a", 0, 1)
    desk.pass_(0.3)
    assert merges(desk) == [(0, ["a"], "window")]
    for chunk in range(1, CHUNKS):  # All here, none of them decoded.
        assert desk.chunk("b", 1, 2, chunk)
    desk.push("a", 1, 2)
    desk.pass_(0.3)
    assert merges(desk) == [(1, ["a"], "window")]
