"""Pushes on their way: what is refused, what is asked for, what counts."""

from __future__ import annotations

import pytest
from desk import Desk, configure, incarnation, resumed, running
from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.broker.syncer import pushes
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.messages import DataKind, Fetch

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
    desk = Desk(configure(run={"goal_tokens": 1000}), resumed=resumed())
    desk.commits = False
    desk.hello("a", held=(msg.Held(5, 99),) * 4)
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
    desk = Desk(resumed=resumed(), newest_push=lambda incarnation, fragment: 3)
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
        (msg.Status({}), "connect learners to the broker"),
    ],
)
def test_a_request_is_refused_with_what_to_do(request_: msg.ControlMessage, remedy: str) -> None:
    desk = Desk(resumed=resumed())
    desk.hello("a")
    desk.send("a", request_)
    assert not any(isinstance(each, ev.Serve) for each in desk.log)
    (refusal,) = desk.told(msg.Refuse, "a")
    assert refusal.expected and refusal.got and remedy in refusal.remedy


def test_before_version_0_and_after_the_end_there_is_less_to_do() -> None:
    fetch = Fetch(DataKind.PUBLICATION, 3, 5, 0, ((0, 2), (3, 1)))
    before, after = Desk(), Desk(resumed=resumed(phase=msg.Phase.ENDED))
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
    desk.now = desk.syncer.deadline(desk.now)
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
    (merge,) = desk.take(ev.Merge)
    assert [each.learner for each in merge.pushes] == ["a", "b"]
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
