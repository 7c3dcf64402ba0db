"""Names that do not return are forgotten; a name that returns all the same is safe."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import Desk, Seat, hello, incarnation_of, one, only, open_round

from narrows.broker.merging.policy import Policy
from narrows.broker.process.subscriptions import TOPICS_MAX, Subscriptions
from narrows.broker.storage.audit import Audit
from narrows.broker.storage.records import ContributorRecord, FateRecord, RoundRecord, VectorRecord
from narrows.broker.syncer import events as ev
from narrows.broker.syncer import forgetting
from narrows.broker.syncer.forgetting import GONE_MAX
from narrows.broker.syncer.machine import Resumed
from narrows.broker.syncer.status import status_of
from narrows.learner.session import events as lev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.limits import TOPIC_BYTES_MAX

FORGET_S = 6 * 3600.0
QUIET: dict[str, Any] = {
    "liveness__lost": "10h",
    "liveness__late": "9h",
    "liveness__forget": "10h",
    "broker__beat": "3.9s",
}
"""For tests that do not want to say for hours that a learner lives."""


def merge(desk: Desk, fragment: int = 0) -> list[ev.Effect]:
    return desk.do(ev.Merged(fragment, desk.state.heads[fragment].version + 1, 7, 0))


def committed(version: int, *, tokens: int, merged_tokens: int) -> RoundRecord:
    """The record of a round of fragment 0 with one push of b."""
    who = ContributorRecord("b", "1" * 32, version, tokens, 1, 1.0, merged_tokens)
    policy = Policy("tokens", "layout", 3.0, 0.5, "sgd", 1.0, 0.0, is_rounded=False)
    vector = VectorRecord("int4-zstd", 0.5, ())
    return RoundRecord(
        (0, 1), 0, version, "", (who,), policy, msg.Phase.RUNNING, 0, vector, (), 0.0, (0, 0, 0),
        0.0,
    )  # fmt: skip


def contributed(desk: Desk, name: str) -> None:
    """The learner's push 1 is merged into fragment 0."""
    desk.contribute(name)
    merge(desk)


def gone() -> Desk:
    """A run in which b has contributed and left; a is there all the time."""
    desk = Desk(**QUIET).running("a", "b")
    desk.say("a", msg.Decline(0, 0, 1, "evaluating"))
    contributed(desk, "b")
    desk.say("b", msg.Bye("the loop has ended"))
    return desk


@pytest.mark.parametrize("end", [msg.Bye("the loop has ended"), None])
def test_a_learner_that_is_gone_is_forgotten_after_some_hours(end: msg.Bye | None) -> None:
    slow: dict[str, Any] = {
        **QUIET,
        "liveness__late": "4h",
        "liveness__lost": "5h",
        "liveness__forget": "6h",
    }
    desk = Desk(**slow).running("a", "b")
    desk.say("a", msg.Decline(0, 0, 1, "evaluating"))
    contributed(desk, "b")
    effects = desk.say("b", end) if end else desk.do(ev.PeerLost(b"b"))
    assert not only(effects, ev.Erase)
    assert not only(desk.wait(FORGET_S / 2), ev.Erase)
    desk.say("a", msg.Alive(0))
    assert not only(desk.wait(FORGET_S / 2 - 5.0), ev.Erase)
    assert {name for name, _, _ in desk.state.merged_pushes} == {"b"}
    effects = desk.wait(10.0)
    assert [erase.learner for erase in only(effects, ev.Erase)] == ["b"]
    assert one(effects, ev.LogFate) == ev.LogFate("forgotten", "b", incarnation_of("b"))
    assert desk.state.merged_pushes == {}
    assert desk.state.roster.get("b") is None
    told = status_of(desk.syncer, {}, desk.now)
    assert [learner.name for learner in told.learners] == ["a"]


def test_until_then_it_learns_whether_its_last_push_was_merged() -> None:
    desk = gone()
    desk.say("b", hello("b", run_id="run", versions=(0, 0)))
    assert one(desk.say("b", msg.Fetch(0, 0)), ev.Publish).push_id == 1


def test_a_forgotten_process_that_returns_is_new_and_its_push_is_not_merged_twice() -> None:
    desk = gone()
    for _ in range(11):
        desk.say("a", msg.Alive(0))
        desk.wait(3600.0)
    assert desk.state.roster.get("b") is None
    effects = desk.say("b", hello("b", run_id="run", versions=(0, 0), tokens=5000))
    assert one(effects, msg.Welcome).role is msg.Role.ADOPT
    # It does not know the outcome of push 1, and announces it again.
    assert one(desk.push("b", push_id=1, base_version=0), msg.Refuse).code == ErrorCode.STALE_BASE
    assert one(desk.say("b", msg.Fetch(0, 0)), ev.Publish).push_id == 0
    desk.say("b", msg.Adopted(0, 1))
    before = desk.state.clock.run_tokens
    desk.report("b", step=60, tokens=6000)
    assert desk.state.clock.run_tokens == before, "what was merged stays, reports count nothing"


def test_a_learner_that_was_forgotten_restores_the_remainder_of_its_open_push() -> None:
    """It was merged, but nobody knows that any more: rather too much is sent again than nothing."""
    seat = Seat().joined()
    seat.beat((0, 0), open_round(0, 0))
    one(seat.step(), msg.Push)
    seat.hear(msg.Bye("stopped"))
    assert one(seat.welcome((1, 0)), msg.Push).push_id == 1
    effects = seat.receive(0, 1, push_id=0)
    assert one(effects, lev.SettlePush) == lev.SettlePush(1, merged=False)


def test_a_push_that_is_still_open_after_a_return_is_merged_once() -> None:
    desk = Desk(merge__quorum=2, **QUIET).running("a", "b")
    desk.push("b")
    desk.say("b", msg.Bye(""))
    for _ in range(11):
        desk.say("a", msg.Alive(0))
        desk.wait(3600.0)
    assert desk.state.roster.get("b") is None
    desk.say("b", hello("b", run_id="run", versions=(0, 0)))
    desk.contribute("b")
    started = one(desk.contribute("a"), ev.StartMerge)
    assert [(done.learner, done.push_id) for done in started.contributions] == [("a", 1), ("b", 1)]


def test_a_contribution_outlives_its_name() -> None:
    """It waits for a second one for longer than a name is remembered."""
    desk = Desk(merge__quorum=2, **QUIET).running("a", "b")
    desk.contribute("b")
    desk.say("b", msg.Bye(""))
    for _ in range(11):
        desk.say("a", msg.Alive(0))
        desk.wait(3600.0)
    started = one(desk.contribute("a"), ev.StartMerge)
    assert [done.learner for done in started.contributions] == ["a", "b"]
    merge(desk)
    assert {name for name, _, _ in desk.state.merged_pushes} == {"a"}


def test_only_the_newest_process_of_a_name_is_remembered() -> None:
    """A learner that is restarted every hour must not make the checkpoint grow: an older process
    is refused as superseded, so nobody will ever ask for the outcome of its pushes."""
    desk = Desk(**QUIET).running("a")
    contributed(desk, "a")
    for life in range(2, 6):
        desk.do(ev.PeerLost(b"a"))
        desk.say("a", hello("a", incarnation=incarnation_of("a", life)))
        assert desk.state.merged_pushes == {}
        desk.adopt("a")
        while not desk.state.open_rounds():
            desk.wait(5.0)
        fragment, base = desk.round.fragment, desk.round.base_version
        desk.push("a", fragment, base_version=base, push_id=life)
        own = incarnation_of("a", life)
        desk.chunk("a", fragment, version=base, push_id=life, incarnation=own)
        merge(desk, fragment)
        assert desk.state.merged_pushes == {("a", own, fragment): (life, 100)}
    # The same process on a new connection is no other one.
    desk.do(ev.PeerLost(b"a"))
    desk.say("a", hello("a", incarnation=incarnation_of("a", 5), run_id="run"))
    assert len(desk.state.merged_pushes) == 1


def test_the_late_merge_of_a_replaced_process_leaves_nothing_behind() -> None:
    desk = Desk(merge__quorum=2).running("a", "b")
    desk.contribute("a")
    desk.contribute("b")
    merge(desk)
    while desk.state.rounds.get(0) is None:
        desk.wait(1.0)
        for name in "ab":
            desk.say(name, msg.Alive(0))
        desk.state.rounds.pop(1, None)
    desk.push("a", push_id=2)
    desk.chunk("a", 0, push_id=2)
    desk.do(ev.PeerLost(b"a"))
    effects = desk.say("new", hello("a", incarnation=incarnation_of("a", 2)))
    # The next record counts its tokens from 0 on.
    assert only(effects, ev.LogFate)[0] == ev.LogFate("forgotten", "a", incarnation_of("a"))
    desk.push("b", push_id=2)
    desk.chunk("b", 0, push_id=2)
    merge(desk)
    assert {key[:2] for key in desk.state.merged_pushes} == {("b", incarnation_of("b"))}


def test_names_that_only_the_life_before_has_met_are_forgotten_too() -> None:
    pushes = {(f"n{i}", incarnation_of(f"n{i}"), 0): (1, 100) for i in range(GONE_MAX + 50)}
    desk = Desk().running("a")
    heads = tuple(desk.state.heads)
    resumed = Resumed(desk.state.layout, 0, heads, 1, msg.Phase.RUNNING, pushes)
    desk = Desk(resumed=resumed)
    desk.say("n1", hello("n1", run_id="run"))
    assert len(desk.state.merged_pushes) == GONE_MAX + 1
    assert ("n1", incarnation_of("n1"), 0) in desk.state.merged_pushes
    effects = desk.wait(FORGET_S + 1.0)
    assert len(only(effects, ev.Erase)) >= GONE_MAX
    # n1 was silent: it was lost, and its hours began then.
    assert {name for name, _, _ in desk.state.merged_pushes} <= {"n1"}


def test_names_that_come_and_go_leave_a_bounded_number_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 40
    monkeypatch.setattr(forgetting, "GONE_MAX", most)
    desk = Desk(**QUIET).running("a")
    sizes: list[tuple[int, int, int]] = []
    for number in range(4 * most):
        name = f"job-{number:05d}"
        desk.say(name, hello(name))
        desk.state.merged_pushes[name, incarnation_of(name), 0] = (1, 100)
        desk.report(name, step=1, tokens=10)
        desk.say(name, msg.Bye("preempted"))
        told = len(msgspec.msgpack.encode(status_of(desk.syncer, {}, desk.now)))
        sizes.append((len(desk.state.roster), len(desk.state.merged_pushes), told))
    assert sizes[-1] == sizes[most] == (most + 1, most, sizes[most][2])
    assert desk.state.roster.get("job-00000") is None
    assert desk.state.roster.get(f"job-{4 * most - 1:05d}") is not None


def test_of_a_model_with_many_fragments_fewer_names_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forgetting, "MERGED_PUSHES_MAX", 4)
    desk = Desk(**QUIET).running("a")
    for number in range(20):
        name = f"job-{number:02d}"
        desk.say(name, hello(name))
        for fragment in range(len(desk.state.heads)):
            desk.state.merged_pushes[name, incarnation_of(name), fragment] = (1, 100)
        desk.say(name, msg.Bye("preempted"))
        assert len(desk.state.merged_pushes) <= 4
    assert {name for name, _, _ in desk.state.merged_pushes} == {"job-18", "job-19"}


def test_the_audit_counts_the_tokens_of_a_forgotten_process_anew() -> None:
    for forgotten, problems in ((False, 1), (True, 0)):
        audit = Audit()
        audit.take(1, committed(1, tokens=500, merged_tokens=500))
        if forgotten:
            audit.take(2, FateRecord((0, 1), "forgotten", "b", "1" * 32, -1, 0, "", 0.0))
        audit.take(3, committed(2, tokens=70, merged_tokens=70))
        audit.take(4, committed(3, tokens=30, merged_tokens=100))
        assert len(audit.problems) == problems
        audit.take(5, committed(4, tokens=30, merged_tokens=200))
        assert len(audit.problems) == problems + 1


# Subscriptions.


def test_a_flood_of_topics_keeps_no_learner_from_being_heard() -> None:
    topics = Subscriptions()
    topics.keep({b"learner"})
    for number in range(TOPICS_MAX + 10):
        topics.take(b"\1%d" % number)
    assert len(topics) == TOPICS_MAX
    topics.take(b"\1learner")
    assert topics.has({b"learner"})


def test_topics_of_strangers_go_with_their_connections() -> None:
    topics = Subscriptions()
    for frame in (b"\1one", b"\1one", b"\1two", b"\0one", b"\0two", b"\0three", b"", b"x"):
        topics.take(frame)
    assert b"one" in topics and len(topics) == 1
    topics.take(b"\1" + b"x" * 1000)
    assert b"x" * TOPIC_BYTES_MAX in topics


def test_an_unsubscription_cannot_silence_a_learner() -> None:
    topics = Subscriptions()
    topics.keep({b"learner"})
    topics.take(b"\1learner")
    for _ in range(5):
        topics.take(b"\0learner")
    assert topics.has({b"learner"})
