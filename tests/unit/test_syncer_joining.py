"""Hello and Welcome: who may join, and whose history is not ours."""

from __future__ import annotations

from typing import Any

import pytest
from desk import EPOCH, LAYOUT, RUN, Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.wire import unpack_layout

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol": 99}, "protocol_version", "same version"),
    ({"site": "site-b"}, "key_name", "its key's site"),
    ({"incarnation": incarnation("b")}, "bad_name", "own name"),
    ({"life": 2}, "name_in_use", "--name"),
    ({"run_id": "run-0"}, "wrong_run", "start the learner again"),
    ({"held": (msg.Held(0, 1),)}, "wrong_run", "number of fragments"),
    ({"fingerprint": "0" * 32}, "layout_differs", "same model code"),
]


@pytest.mark.parametrize(("fields", "code", "remedy"), REFUSALS)
def test_a_hello_is_refused_with_what_to_do(fields: dict[str, Any], code: str, remedy: str) -> None:
    desk = running("site-a")
    refusal = desk.hello("site-a", **({"peer": "another"} | fields))
    assert isinstance(refusal, msg.Refuse)
    assert (refusal.code, refusal.push_id) == (code, 0)
    assert refusal.expected and refusal.got and remedy in refusal.remedy
    # The learner that is here has lost nothing.
    desk.take(ev.Send)
    desk.report("site-a", 20)
    assert not desk.told(msg.Bye, "site-a")


def test_a_full_run_asks_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    desk = running("a", "b")
    refusal = desk.hello("c")
    assert isinstance(refusal, msg.Refuse) and refusal.code == "over_capacity"
    assert isinstance(desk.hello("b", 1, peer="again"), msg.Welcome)


def test_a_refused_layout_comes_with_the_runs() -> None:
    refusal = running("a").hello("b", fingerprint="f" * 32)
    assert isinstance(refusal, msg.Refuse)
    assert unpack_layout(refusal.layout) == LAYOUT


def test_a_key_speaks_for_its_sites_learners() -> None:
    desk = running("a")
    assert isinstance(desk.hello("site-a/0", site="site-a"), msg.Welcome)
    assert isinstance(desk.hello("site-ab", site="site-a"), msg.Refuse)


def test_a_name_is_free_after_three_silent_seconds() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.announce("a", 1, 2)
    desk.pass_(2.9, "b")
    assert isinstance(desk.hello("a", 2), msg.Refuse)
    desk.pass_(0.1, "b")
    assert isinstance(desk.hello("a", 2), msg.Welcome)
    # What the old process pushed completely counts, what it had only announced is gone.
    assert desk.take(ev.Drop) == [ev.Drop(1, incarnation("a"), 2)]
    assert desk.status["learners"]["a"]["incarnation"] == incarnation("a", 2)


def test_the_same_incarnation_moves_to_its_new_connection() -> None:
    desk = running("a")
    old = desk.peer("a")
    assert isinstance(desk.hello("a", peer="a:new"), msg.Welcome)
    desk.take(ev.Send)
    desk.do(desk.syncer.control, old, None, msg.Report(1, 1, None, (0, 0, 0, 0)))
    assert [each.peer for each in desk.take(ev.Send)] == [old]


def test_who_is_unknown_is_told_to_say_hello_and_may_ask_for_the_status() -> None:
    desk = running("a")
    desk.take(ev.Send)
    effects = desk.do(desk.syncer.control, "x", None, msg.Push(0, 1, 0, 1, 1))
    assert isinstance(effects[0], ev.Send) and isinstance(effects[0].message, msg.Bye)
    effects = desk.do(desk.syncer.control, "x", None, msg.AskStatus())
    assert isinstance(effects[0], ev.Send) and isinstance(effects[0].message, msg.Status)
    assert not desk.do(desk.syncer.control, "x", None, msg.Bye("gone"))


def test_what_only_a_broker_sends_or_nobody_can_read_is_refused() -> None:
    desk = running("a")
    for event, wrong in ((desk.syncer.control, msg.Bye), (desk.syncer.refused, None)):
        desk.take(ev.Send)
        if wrong:
            desk.send("a", msg.Status({}))
        else:
            error = RemoteProtocolError(ErrorCode.BAD_MESSAGE, "body", expected="a", got="b")
            desk.do(event, desk.peer("a"), error)
        assert [each.code for each in desk.told(msg.Refuse, "a")] == ["bad_message"]


def test_a_report_with_the_wrong_number_of_fragments_is_refused() -> None:
    desk = running("a")
    desk.take(ev.Send)
    desk.report("a", 20, held=(0,))
    assert desk.told(msg.Refuse, "a")[0].expected.startswith("4 fragments")
    assert desk.status["learners"]["a"]["steps"] == 10


HELD = tuple(msg.Held(version, digest) for version, digest in ((5, 50), (4, 41), (3, 30), (-1, 0)))


def test_a_learner_of_another_epoch_goes_back_where_its_copy_is_not_ours() -> None:
    desk = Desk(resumed=resumed(), published_digest=lambda f, v: 10 * v)
    welcome = desk.hello("a", run_id=RUN, epoch="6-0123abcd", held=HELD)
    assert isinstance(welcome, msg.Welcome)
    assert (welcome.go_back, welcome.role) == ((1,), msg.Role.ADOPT)
    assert not [n for n in desk.take(ev.Note) if n.event == "history_lost"]


def test_a_learner_ahead_is_named_in_a_note() -> None:
    desk = Desk(resumed=resumed(heads=(3, 3, 3, 3)), published_digest=lambda f, v: 10 * v)
    welcome = desk.hello("a", run_id=RUN, epoch="6-0123abcd", held=HELD)
    assert isinstance(welcome, msg.Welcome) and welcome.go_back == (0, 1)
    (note,) = [n for n in desk.take(ev.Note) if n.event == "history_lost"]
    assert note.warning and note.fields["versions"] == 3


def test_within_an_epoch_nobody_goes_back() -> None:
    """A publication may overtake a Welcome."""
    desk = Desk(resumed=resumed(), published_digest=lambda f, v: None)
    welcome = desk.hello("a", run_id=RUN, epoch=EPOCH, held=(msg.Held(6, 1),) * 4)
    assert isinstance(welcome, msg.Welcome) and welcome.go_back == ()


def test_a_lost_learner_keeps_its_name_and_what_it_pushed() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.announce("a", 1, 2)
    desk.pass_(30.0, "b")
    (note,) = [each for each in desk.log if isinstance(each, ev.Note) and each.event == "lost"]
    assert note.warning and "a was not heard for 30 s" in note.text and "process" in note.text
    assert desk.status["learners"]["a"]["state"] == "lost"
    assert desk.take(ev.Drop) == [ev.Drop(1, incarnation("a"), 2)]
    desk.report("a", 20)
    assert desk.told(msg.Bye, "a"), "its connection is gone: it says Hello again"


def test_only_the_newest_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.broker.syncer.members.NAMES_MAX", 3)
    desk = running("keeper")
    for i in range(6):
        desk.hello(f"n{i}")
        desk.send(f"n{i}", msg.Bye("done"))
        desk.now += 1.0
    assert list(desk.status["learners"]) == ["keeper", "n4", "n5"]


def test_the_run_waits_for_learners_at_start() -> None:
    desk = Desk(configure(run={"learners_at_start": 2}))
    desk.hello("a")
    desk.seed("a")
    assert desk.status["waiting_for"] == ["learners: 1 of 2 have joined"]
    desk.take(ev.Send)
    desk.hello("b")
    roles = [welcome.role for welcome in desk.told(msg.Welcome)]
    assert roles == [msg.Role.WAIT, msg.Role.ADOPT, msg.Role.ADOPT]


def test_an_operator_who_stops_the_broker_sends_everybody_away() -> None:
    desk = running("a", "b")
    desk.take(ev.Send)
    desk.do(desk.syncer.stop, "maintenance")
    assert [bye.reason for bye in desk.told(msg.Bye)] == ["maintenance"] * 2
    desk.do(desk.syncer.stop, "again")
    desk.pass_(5.0, "a", "b", steps_per_s=10)
    assert not desk.take(ev.Merge)
