"""Pushes on their way: what is refused, what is asked for, what counts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from desk import CHUNKS, Desk, configure, incarnation, resumed, running
from learner_cases import House, begun, values
from msgspec import structs

from narrows.broker.syncer import events as ev
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


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"codec": "int8-zstd"}, "bad_chunk"),
        ({"chunk": CHUNKS}, "bad_chunk"),
        ({"fragment": 4}, "bad_message"),
    ],
)
def test_a_chunk_is_refused_once(fields: dict[str, Any], code: str) -> None:
    desk = waiting()
    desk.announce("a", 0, 1)
    for _ in range(3):
        assert not desk.chunk("a", 0, 1, 0, **fields)
    (refusal,) = desk.told(msg.Refuse, "a")
    assert (refusal.code, refusal.push_id) == (code, 1)
    assert refusal.expected and refusal.got and refusal.remedy


def test_a_push_that_comes_while_the_end_is_being_written_is_ignored() -> None:
    """Its learner has been told nothing yet of the end, so it does nothing wrong."""
    desk = Desk(configure(run={"goal_tokens": 1000}), resumed=resumed())
    desk.commits = False
    desk.hello("a", held=(msg.Held(5, 99),) * 4)
    desk.pass_(35.0, "a", finished=(0, 1, 2, 3))
    assert desk.take(ev.CommitEnd)
    desk.push("a", 0, 1)
    assert not desk.told(msg.Refuse) and not desk.syncer.state.rounds[0].inbox


def test_chunks_of_another_epoch_or_of_nobody_are_not_wanted() -> None:
    desk = waiting()
    assert not desk.chunk("a", 0, 1, 0, epoch="6-0123abcd")
    assert not desk.chunk("a", 0, 1, 0, incarnation=incarnation("c"))
    assert not desk.told(msg.Refuse)


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


def test_a_newer_push_displaces_the_waiting_one() -> None:
    desk = waiting()
    desk.push("a", 0, 1)
    assert desk.chunk("a", 0, 2, 0)
    assert desk.take(ev.Drop) == [ev.Drop(0, incarnation("a"), 1)]
    assert not desk.chunk("a", 0, 1, 1), "an older one is not wanted any more"


def test_the_announcement_may_come_after_the_chunks() -> None:
    desk = running("a")
    for chunk in range(CHUNKS):
        assert desk.chunk("a", 0, 1, chunk)
        assert not desk.chunk("a", 0, 1, chunk), "it is here"
        desk.checked("a", 0, 1, chunk)
    assert not desk.take(ev.Merge)
    desk.announce("a", 0, 1)
    (merge,) = desk.take(ev.Merge)
    assert merge.pushes == (ev.PushFacts("a", incarnation("a"), 1, 0, 1000, 10),)


# What counts already.


def test_what_is_merged_or_taken_is_not_wanted_again_and_needs_no_answer() -> None:
    desk = running("a")
    desk.commits = False
    desk.push("a", 0, 3)
    assert len(desk.take(ev.Merge)) == 1
    for _ in range(2):  # First while the round is merging, then when it is durable.
        desk.announce("a", 0, 3)
        assert not desk.chunk("a", 0, 3, 0) and not desk.chunk("a", 0, 2, 0)
        assert not desk.told(msg.Refuse) and not desk.take(ev.Drop)
        if desk.heads[0] == 0:
            desk.durable(0)
    assert desk.heads[0] == 1


def test_a_push_that_only_the_rows_remember_is_refused_as_stale(tmp_path: Path) -> None:
    """Its learner was away while more others were merged than are remembered. The rows take each id
    once, so merging it again would end the broker; and no STATE tells the learner of its push."""
    house = House(tmp_path)
    (a,) = begun(house, "site-a")
    a.push(0, values(a, 0.01)[0])
    house.until(lambda: house.heads[0] == 1, "a version", a)
    house.kill()
    with closing(sqlite3.connect(tmp_path / "run.db")) as db, db:
        db.execute("DELETE FROM merged")  # As after the pushes of 1,024 newer incarnations.
    house.start()
    for _ in range(2):
        a.hello()
        a.say(msg.Push(0, 1, 0, 100, 1))
        for chunk in a.payloads:
            a.send_chunk(0, chunk)
        house.wait(2.0, a)
    refusals = a.heard(msg.Refuse)
    assert [each.push_id for each in refusals] == [1, 1] and house.heads == (1,)
    assert "newest version" in refusals[0].remedy
    a.push(0, values(a, 0.01)[0])
    house.until(lambda: house.heads[0] == 2, "its next push", a)


def test_as_many_are_remembered_as_a_state_can_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    desk = running("a")
    for life in (1, 2, 3):
        desk.hello("a", life)
        desk.push("a", 0, 1)
        desk.leave("a")
        desk.pass_(1.0)
    assert list(desk.syncer.state.rounds[0].merged) == [incarnation("a", 2), incarnation("a", 3)]


def test_two_lives_of_a_learner_count_both() -> None:
    """A learner that was started again does not displace what it pushed before."""
    desk = running("a", "b", config=configure(merge={"quorum": 3}))
    desk.push("a", 0, 9)
    desk.pass_(3.0, "b", steps_per_s=10)
    desk.hello("a", 2)
    desk.report("a", 0)
    desk.push("b", 0, 1)
    desk.push("a", 0, 1)
    (merge, *_) = desk.take(ev.Merge)
    assert [(each.incarnation, each.push_id) for each in merge.pushes] == [
        (incarnation("a"), 9),
        (incarnation("a", 2), 1),
        (incarnation("b"), 1),
    ]


# What is asked for, and what learners fetch.


def test_missing_chunks_are_asked_for_after_a_second_without_progress() -> None:
    desk = waiting()
    desk.announce("a", 0, 1)
    assert desk.chunk("a", 0, 1, 1)
    desk.pass_(0.9, "a", "b")
    assert not desk.told(msg.Fetch)
    desk.pass_(0.2, "a", "b")
    assert desk.told(msg.Fetch, "a") == [Fetch(DataKind.PUSH, 0, 0, 1, ((0, 1), (2, CHUNKS - 2)))]
    desk.pass_(3.0, "b")
    desk.log.clear()
    desk.pass_(20.0, "b")
    assert not desk.told(msg.Fetch), "nobody asks who is silent"
    desk.report("a", 20)
    desk.pass_(1.1, "a", "b")
    assert desk.told(msg.Fetch, "a")


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
