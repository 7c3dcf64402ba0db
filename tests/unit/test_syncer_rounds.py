"""The life of a round: launch, collect, merge, commit, publish; and pushes on their way to it."""

from collections import Counter
from collections.abc import Iterable

import pytest
from desk import CHUNKS, Desk, configure, incarnation, resumed, running
from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.broker.syncer import pushes
from narrows.broker.syncer.members import STALLED_S, TOLD_AT_ONCE
from narrows.broker.syncer.state import Clock
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.messages import DataKind, Fetch

EVERYBODY = configure(run={"mode": msg.Mode.STREAMING}, merge={"quorum": 0})


def test_a_launch_waits_for_its_spacing_and_for_somebody() -> None:
    desk = running("a")  # Period 1 s, spacing 0.25 s.
    desk.to_launch("a")
    started = desk.now
    assert started < desk.syncer.wake_at <= started + 0.25
    desk.to_launch(fragment=1)
    assert 0.25 <= desk.now - started < 0.35
    desk = Desk(recovered=resumed())
    desk.pass_(9.0)
    assert not desk.open_rounds, "nobody is here who could push"


def push_all(desk: Desk, names: Iterable[str]) -> None:
    """A push of every fragment for the next round; what waits is displaced."""
    for name in names:
        for fragment in range(4):
            desk.push(name, fragment, int(1000 * desk.now))


@pytest.mark.parametrize("contribute", [False, True])
def test_the_pace_is_the_harmonic_mean(contribute: bool) -> None:
    """All together make n * H steps in a period, whatever their speeds; one that hangs stretches it
    by n / (n - 1) at most."""
    desk = running("a", "b", "c")
    for _ in range(20):
        desk.now += 1.0
        for name, steps in {"a": 100.0, "b": 1.0, "c": 0.2}.items():
            desk.steps[name] += steps
            desk.report(name, int(desk.steps[name] + 1e-9))
        if contribute:
            push_all(desk, "abc")
    assert desk.status.period_s * (100 + 1 + 0.2) == pytest.approx(3 * 10, rel=0.01)
    desk.leave("b", "c")
    period_s = desk.status.period_s
    desk.report("a", 2100, paused="evaluating")
    desk.pass_(10.0)
    assert desk.status.period_s == period_s, "it stands while nobody trains"


def test_who_contributes_counts_in_the_pace_for_a_minute_after_each_merged_push() -> None:
    """Four names of one site make a step in 10 s, and push nothing."""
    site = [f"b/{number}" for number in range(4)]
    desk = running("a", "c", *site)
    periods_s = []
    for second in range(170):
        desk.pass_(1.0, "a", "c", steps_per_s=10.0)
        for name in site:
            desk.report(name, 10 + second // 10)
        if second >= 60:
            push_all(desk, ["a", "c", "b/0"] if second == 80 else ["a", "c"])
        periods_s.append(desk.status.period_s)
    expected = [60 / 20.4, 1.0, 30 / 20.1, 30 / 20.1, 1.0]
    assert [periods_s[at] for at in (58, 75, 83, 138, 150)] == pytest.approx(expected, rel=0.1)


def test_a_speed_is_believed_as_far_as_pushes_come() -> None:
    """A learner that makes v steps a second is merged every n * H / v seconds at the latest."""
    desk = running("a", "b", "liar")
    push_all(desk, ["liar"])
    for _ in range(20):
        desk.pass_(1.0, "a", "b", steps_per_s=10.0)
        desk.report("liar", int(1e6 * desk.now))
        push_all(desk, "ab")
    merged_at = desk.syncer.state.members.by_name["liar"].merged_at
    believed = 4 * 3 * 10 / (desk.now - merged_at)
    assert desk.status.learners["liar"].steps_per_s > 1e5 and believed < 8
    assert desk.status.period_s == pytest.approx(30 / (20 + believed), rel=0.1)


def test_after_a_start_the_run_has_a_pace_at_once() -> None:
    who = incarnation("a")
    desk = Desk(recovered=resumed(merged={(who, 0): 1}, merged_tokens={who: 4000}))
    assert desk.hello("a").beat.period_s == 1.0
    assert desk.status.learners["a"].merged_tokens == 1000
    desk.push("a", 0, 1)  # It does not know yet that version 5 holds it.
    desk.report("a", 0)
    desk.pass_(1.0, "a")
    assert desk.open_rounds, "a round is launched though no step time is known"
    desk.push("a", 0, 2)
    assert [
        [push.push_id for push in each.round_.contributions] for each in desk.take(ev.MergeRound)
    ] == [[2]]


# Collect.


@pytest.mark.parametrize("has_pace", [True, False])
def test_what_a_leaving_learner_has_pushed_is_merged_though_nobody_trains(has_pace: bool) -> None:
    if has_pace:
        desk = running("a")
        desk.to_launch("a", fragment=1)
        assert len(desk.open_rounds) == 2, "open and empty, in the way of all others"
    else:
        desk = Desk(recovered=resumed())
        desk.hello("a")
    desk.report("a", 50, paused="leaving")
    desk.push("a", 2, 1)
    desk.push("a", 3, 2)
    desk.pass_(2.0, "a", paused="leaving")
    assert [m[:2] for m in desk.merges()] == [(2, ["a"]), (3, ["a"])]


def test_a_learner_whose_push_is_announced_or_being_decoded_is_waited_for() -> None:
    desk = running("a", "b", "c")
    desk.to_launch("a", "b", "c")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1)
    desk.announce("c", 0, 1)
    for chunk in range(CHUNKS):
        assert not desk.take(ev.MergeRound)
        desk.chunk("c", 0, 1, chunk)
    desk.pass_(0.5)
    assert not desk.take(ev.MergeRound), "the window is over, but only decoding is missing"
    for chunk in range(CHUNKS):
        desk.checked("c", 0, 1, chunk)
    assert desk.merges() == [(0, ["a", "b", "c"], "everybody")]


@pytest.mark.parametrize(
    ("overlap_steps", "window_s", "stood_still_s"),
    [(2, 0.25, 0.0), (8, 0.9 * 8 * 0.1, 0.0), (8, 0.9 * 8 * 0.1, 60.0)],
)
def test_who_does_not_come_delays_a_merge_by_the_window(
    overlap_steps: int, window_s: float, stood_still_s: float
) -> None:
    """0.9 of what the overlap hides, or one spacing of 0.25 s. While the broker stands still
    nothing of what is hidden passes."""
    desk = running("a", "b", config=configure(fragments={"overlap_steps": overlap_steps}))
    desk.to_launch("a", "b")
    desk.now += stood_still_s
    desk.do(desk.syncer.advance)
    desk.push("a", 0, 1)
    desk.pass_(window_s - 0.01)
    assert not desk.take(ev.MergeRound)
    assert desk.syncer.wake_at < desk.now + 0.02
    desk.pass_(0.02)
    assert desk.merges() == [(0, ["a"], "window")]


def test_each_round_has_a_window_of_its_own() -> None:
    desk = running("a", "b")
    for turn in range(8):
        fragment, push_id = turn % 4, 1 + turn // 4
        desk.to_launch("a", "b", fragment=fragment)
        desk.push("a", fragment, push_id)
        desk.pass_(0.2)
        assert not desk.take(ev.MergeRound)
        desk.push("b", fragment, push_id)
        assert desk.merges() == [(fragment, ["a", "b"], "everybody")]


def test_lockstep_launches_at_once_and_knows_no_pace() -> None:
    config = configure(
        run={"mode": msg.Mode.DILOCO},
        fragments={"count": 1, "overlap_steps": 0},
        merge={"quorum": 0, "weights": "equal"},
    )
    desk = Desk(config, recovered=resumed(heads=(5,), period_s=0.0))
    desk.hello("a")
    desk.report("a", 0, bases=(5,))
    for version in range(6, 9):
        assert desk.status.fragments[0].stage == "collecting"
        desk.push("a", 0, version)
        assert desk.heads == [version]


def test_in_lockstep_nobody_is_taken_for_stalled_while_a_push_is_on_a_slow_line() -> None:
    config = configure(
        run={"mode": msg.Mode.DILOCO},
        fragments={"count": 1, "overlap_steps": 0},
        merge={"quorum": 0, "weights": "equal"},
    )
    desk = Desk(config, recovered=resumed(heads=(5,), period_s=0.0))
    for name in "ab":
        desk.hello(name)
    desk.pass_(20.0, "a", "b", steps_per_s=10.0, bases=(5,))
    desk.push("a", 0, 1)
    desk.announce("b", 0, 1)
    for _ in range(2):
        desk.pass_(STALLED_S, "a", "b", bases=(5,))
    desk.send_chunks("b", 0, 1)
    assert desk.merges() == [(0, ["a", "b"], "everybody")]
    assert {each.state for each in desk.status.learners.values()} == {"training"}


def test_what_the_quorum_took_and_a_merge_takes_is_hidden_no_more() -> None:
    desk = running(
        "a", "b", "c", config=configure(fragments={"overlap_steps": 9}, merge={"quorum": 2})
    )
    desk.commits = False
    desk.push("a", 0, 1)
    desk.pass_(0.3)
    desk.push("b", 0, 1)
    window_s = 0.9 * (9 * 0.1 - 0.3)
    desk.pass_(window_s - 0.01)
    assert not desk.take(ev.MergeRound)
    desk.pass_(0.02)
    (merge,) = desk.take(ev.MergeRound)
    assert len(merge.round_.contributions) == 2 and merge.round_.reason == "window"
    desk.pass_(0.8)
    desk.do(desk.syncer.done, merge)
    desk.do(desk.syncer.done, ev.Commit(0))
    assert desk.status.sync_s == pytest.approx(0.25 * 0.8)


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
        desk.leave("b")
    desk.to_launch("a")
    desk.take(ev.MergeRound)
    desk.push("a", 0, 2)
    assert [reason for _, _, reason in desk.merges()] == ["everybody"]


def test_the_quorum_is_waited_for_and_never_more_than_who_is_ready() -> None:
    desk = running("a", "b", "c", config=configure(merge={"quorum": 3}))
    desk.to_launch("a", "b", "c")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1)
    desk.pass_(20.0, "a", "b", "c", steps_per_s=10)
    assert not desk.take(ev.MergeRound)
    assert not desk.status.waiting_for, "a round that collects is no trouble"
    desk.pass_(11.0, "a", "b", "c", steps_per_s=10)
    assert desk.status.waiting_for[0] == "c to push fragment 0"
    desk.pass_(3.0, "a", "b", steps_per_s=10)
    assert desk.merges()[0] == (0, ["a", "b"], "everybody")


def test_the_first_round_takes_everybody_who_began_the_run_and_later_ones_no_newcomer() -> None:
    desk = running("a", config=EVERYBODY)
    desk.hello("b")  # Version 0 is on its way to it.
    desk.to_launch("a")
    desk.push("a", 0, 1)
    for _ in range(31):
        desk.send("b", msg.Report(0, 0, None, (-1,) * 4))
        desk.pass_(1.0, "a", steps_per_s=10)
    assert not [each for each in desk.take(ev.MergeRound) if each.round_.fragment == 0]
    assert desk.status.waiting_for[0] == "b to push fragment 0"
    desk.report("b", 0)
    desk.pass_(20.0, "a", "b", steps_per_s=10)
    assert not desk.take(ev.MergeRound), "everybody, and not just one"
    desk.push("b", 0, 1)
    assert desk.merges()[0] == (0, ["a", "b"], "everybody")

    later = Desk(EVERYBODY, recovered=resumed())
    for name in "ab":
        later.hello(name)
    later.report("a", 0)
    later.to_launch("a")
    later.push("a", 0, 1)
    assert later.merges()[0] == (0, ["a"], "everybody")


def test_chunks_that_nobody_announced_hold_nobody_up() -> None:
    desk = running("a", "b")
    desk.send_chunks("b", 0, 1)
    assert desk.chunk("b", 1, 2, 0)
    desk.push("a", 0, 1)
    desk.pass_(0.3)
    assert desk.merges() == [(0, ["a"], "window")]
    for chunk in range(1, CHUNKS):  # All here, none of them decoded.
        assert desk.chunk("b", 1, 2, chunk)
    desk.push("a", 1, 2)
    desk.pass_(0.3)
    assert desk.merges() == [(1, ["a"], "window")]


# Merge, commit, publish.


def test_who_counts_hears_of_each_launch_and_due_and_idle_names_take_turns() -> None:
    """Each Beat is charged to what all others fetch. a contributes; 512 names push nothing."""
    desk = running("a", config=configure(run={"goal_tokens": 10_000}))
    for number in range(512):
        desk.hello(f"z/{number}")
    desk.take(ev.Send)
    for number in range(40):  # In 10 s, or a little more.
        desk.to_launch("a", fragment=number % 4)
        desk.push("a", number % 4, 1 + number)
    beats = [(e.peer, e.message) for e in desk.take(ev.Send) if isinstance(e.message, msg.Beat)]
    assert len({peer for peer, beat in beats if beat.phase is msg.Phase.ENDING}) == 513
    told = [beat.collecting for peer, beat in beats if peer == "a:1"]
    assert [told.count((f,)) >= 9 for f in range(4)] == [True] * 4 and told.count(()) >= 39
    heard = Counter(peer for peer, _ in beats if peer != "a:1")
    assert min(heard.values()) >= 10, "each second, and at once of a phase"
    assert sum(heard.values()) <= 512 * 13 + 2 * 40 * TOLD_AT_ONCE
    assert sum(count > 13 for count in heard.values()) >= 200, "they take turns"


def test_the_clock_counts_each_token_once() -> None:
    clock = Clock(fragments=4)
    for at in range(4):
        clock.count(1000, 10.0 + at)
    assert clock.run_tokens == 1000
    assert clock.tokens_per_s(13.0) == pytest.approx(250.0)
    assert clock.tokens_per_s(13.0 + 2 + 2 * 1.0) > 0
    assert clock.tokens_per_s(13.0 + 2 + 2 * 1.0 + 0.1) == 0.0
    clock.count(msg.TOKENS_MAX, 14.0)
    assert clock.run_tokens == msg.TOKENS_MAX // 4, "a clock that is full can still be told"


# Time.


def test_step_times_are_medians_on_the_brokers_clock_without_pauses() -> None:
    desk = running("a")
    for _ in range(4):
        desk.pass_(1.0, "a", steps_per_s=10)
    desk.report("a", int(desk.steps["a"]), paused="saving")
    desk.pass_(60.0, "a", paused="saving")
    desk.report("a", int(desk.steps["a"]) + 1)
    desk.now += 1.0
    desk.report("a", int(desk.steps["a"]) + 11)
    assert desk.status.learners["a"].steps_per_s == 10.0
    for steps in range(62, 182, 10):  # A dozen Reports come together after a stall.
        desk.report("a", steps)
    assert desk.status.learners["a"].steps_per_s == 10.0
    # A claim of a million steps in a second is one of eight intervals, not the pace.
    desk.now += 1.0
    desk.report("a", 1_000_000)
    assert desk.status.learners["a"].steps_per_s == 10.0


def test_a_broker_that_stood_still_judges_nobody_and_no_window_passes() -> None:
    desk = running("a", "b")
    desk.to_launch("a", "b")
    desk.push("a", 0, 1)
    desk.now += 60.0  # SIGSTOP; then the poll finds what has come meanwhile, in any order.
    desk.do(desk.syncer.advance)
    assert not desk.take(ev.MergeRound)
    assert isinstance(desk.hello("b", 2, peer="b:thief"), msg.Refuse)
    desk.push("b", 0, 1)
    assert desk.merges() == [(0, ["a", "b"], "everybody")]
    assert desk.status.learners["b"].steps_per_s == pytest.approx(10.0, rel=0.2)


# Pushes on their way: what is refused, what is asked for, what counts.

NAN = RemoteProtocolError(
    ErrorCode.NOT_FINITE, "scale", expected="finite", got="nan", remedy="look at the loss"
)


def waiting() -> Desk:
    """A run whose rounds wait for a quorum of two."""
    desk = running("a", "b", config=configure(merge={"quorum": 2}))
    desk.take(ev.Send)
    return desk


def test_a_push_that_comes_while_the_end_is_being_written_is_ignored() -> None:
    """Its learner has been told nothing yet of the end, so it does nothing wrong."""
    desk = Desk(configure(run={"goal_tokens": 1000}), recovered=resumed())
    desk.commits = False
    desk.hello("a", copies=(msg.CopyDigest(5, 99),) * 4)
    desk.pass_(35.0, "a", finished=(0, 1, 2, 3))
    assert desk.take(ev.CommitEnd)
    desk.push("a", 0, 1)
    assert not desk.told(msg.Refuse) and not desk.syncer.state.rounds[0].inbox


def test_a_damaged_chunk_drops_its_push_and_is_told_once() -> None:
    desk = waiting()
    desk.announce("a", 0, 1)
    assert desk.chunk("a", 0, 1, 0) and desk.chunk("a", 0, 1, 1)
    header = desk.header("a", 0, 1, 0)
    desk.do(desk.syncer.push_failed, header, NAN)
    desk.do(desk.syncer.push_failed, header, NAN)
    assert desk.log.count(ev.Drop(0, incarnation("a"), 1)) == 1
    (refusal,) = desk.told(msg.Refuse, "a")
    assert (refusal.code, refusal.push_id, refusal.remedy) == ("not_finite", 1, "look at the loss")
    desk.checked("a", 0, 1, 1)
    assert not desk.chunk("a", 0, 1, 2), "the rest of it is dropped silently"
    assert not desk.told(msg.Refuse)
    # It announces the same push after a new Welcome: it has not heard the refusal.
    desk.announce("a", 0, 1)
    assert len(desk.told(msg.Refuse, "a")) == 1
    desk.push("a", 0, 2)
    assert [each.push_id for each in desk.syncer.state.rounds[0].here()] == [2]


# What counts already.


def test_a_push_that_only_the_rows_remember_is_refused_as_stale() -> None:
    """Its learner was away while more others were merged than are remembered. The rows take each id
    once, so merging it again would end the broker; and no STATE tells the learner of its push."""
    desk = Desk(recovered=resumed(), newest_push=lambda incarnation, fragment: 3)
    desk.hello("a")
    desk.report("a", 0)
    desk.to_launch("a")
    for push_id in (3, 4):
        desk.push("a", 0, push_id)
    (refusal,) = desk.told(msg.Refuse, "a")
    assert refusal.push_id == 3 and "newest version" in refusal.remedy
    assert desk.heads[0] == 6, "its next push is merged"


def test_as_many_are_remembered_as_a_state_can_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    desk = running("a")
    for life in (1, 2, 3):
        desk.hello("a", life)
        desk.push("a", 0, 1)
        desk.leave("a")
        desk.pass_(1.0)
    assert list(desk.syncer.state.rounds[0].merged) == [incarnation("a", 2), incarnation("a", 3)]


# What is asked for, and what learners fetch.


def test_arrivals_carry_a_repair_on() -> None:
    desk = waiting()
    desk.syncer.state.settings = structs.replace(desk.syncer.state.settings, window_messages=2)
    desk.announce("a", 0, 1)
    desk.pass_(1.0, "a", "b")
    assert desk.told(msg.Fetch, "a") == [Fetch(DataKind.PUSH, 0, 0, 1, ((0, 2),))]
    for chunk in range(2):
        assert desk.chunk("a", 0, 1, chunk)
        asked = Fetch(DataKind.PUSH, 0, 0, 1, ((chunk + 2, 1),))
        assert desk.told(msg.Fetch, "a") == [asked], "at once, not with the next Beat"


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        (Fetch(DataKind.PUSH, 0, 0, 1, ((0, 1),)), "last Beat names"),
        (Fetch(DataKind.STATE, 4, 5, 0, ((0, 1),)), "cut the model"),
        (Fetch(DataKind.STATE, 0, 6, 0, ((0, 1),)), "last Beat names"),
        (Fetch(DataKind.PUBLICATION, 0, 0, 0, ((0, 1),)), "last Beat names"),
        (Fetch(DataKind.STATE, 0, 5, 0, ((3, 2),)), "last Beat names"),
        (Fetch(DataKind.STATE, 0, 5, 0, ((0, 4),) * 65), "in parts"),
        (msg.Push(4, 1, 0, tokens=10, steps=1), "fragments that Welcome tells"),
        (msg.Push(0, 1, 6, tokens=10, steps=1), "adopt the newest version"),
        (msg.Report(20, 200, None, (0,)), "report -1"),
        (msg.Status(), "connect learners to the broker"),
    ],
)
def test_a_request_is_refused_with_what_to_do(request_: msg.ControlMessage, remedy: str) -> None:
    desk = Desk(recovered=resumed())
    desk.hello("a")
    desk.send("a", request_)
    assert not any(isinstance(each, ev.Serve) for each in desk.log)
    (refusal,) = desk.told(msg.Refuse, "a")
    assert refusal.expected and refusal.got and remedy in refusal.remedy


def test_before_version_0_and_after_the_end_there_is_less_to_do() -> None:
    fetch = Fetch(DataKind.PUBLICATION, 3, 5, 0, ((0, 2), (3, 1)))
    before, after = Desk(), Desk(recovered=resumed(phase=msg.Phase.ENDED))
    for desk in (before, after):
        desk.hello("a")
        desk.send("a", fetch)
        desk.send("a", msg.Push(0, 1, 0, 1, 1))
    assert ["role adopt" in each.remedy for each in before.told(msg.Refuse, "a")] == [True] * 2
    assert after.log.count(ev.Serve(incarnation("a"), fetch)) == 1
    assert ["final model" in each.remedy for each in after.told(msg.Refuse, "a")] == [True]


def test_a_chunk_alone_decides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = waiting()
    desk.announce("a", 0, 1)
    calls: list[float] = []
    monkeypatch.setattr(desk.syncer, "advance", calls.append)
    assert desk.chunk("a", 0, 1, 0)
    desk.checked("a", 0, 1, 0)
    assert not calls
    desk.now = desk.syncer.wake_at
    assert desk.chunk("a", 0, 1, 1)
    assert calls, "a flood of chunks must not keep what is due from being decided"


# Limits for somebody with an admitted key.


def test_a_round_takes_no_more_pushes_than_a_publication_can_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = running("a", "b", "c")
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    for name in ("a", "b", "c"):
        desk.push(name, 0, 1)
    (merge,) = desk.take(ev.MergeRound)
    assert [each.learner for each in merge.round_.contributions] == ["a", "b"]
    assert list(desk.syncer.state.rounds[0].inbox) == [incarnation("c")], "the third one waits"


def test_who_starts_again_and_again_fills_no_inbox() -> None:
    desk = running("a", "b", config=configure(merge={"quorum": 9}))
    desk.commits = False
    for life in range(1, pushes.LIVES_MAX + 2):
        if life > 1:
            desk.send("a", msg.Bye("again"))
            desk.hello("a", life)
        desk.take(ev.Send)
        desk.push("a", 3, 1)
    inbox = desk.syncer.state.rounds[3].inbox
    assert [each.learner for each in inbox.values()] == ["a"] * pushes.LIVES_MAX
    (refusal,) = desk.told(msg.Refuse, "a")
    assert refusal.code == ErrorCode.OVER_CAPACITY and refusal.push_id == 1
    desk.push("b", 3, 1)
    assert incarnation("b") in inbox, "others are not concerned"
