"""Hello, Welcome and version 0: who may join, whose history is not ours, and who seeds."""

from __future__ import annotations

from typing import Any

import pytest
from desk import CHUNKS, EPOCH, LAYOUT, RUN, Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.layout import fingerprint
from narrows.proto.messages import Role
from narrows.proto.wire import unpack_layout

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol": 99}, "protocol_version", "same version"),
    ({"site": "site-b"}, "key_name", "its key's site"),
    ({"incarnation": incarnation("b")}, "bad_name", "own name"),
    ({"life": 2}, "name_in_use", "choose another name"),
    ({"run_id": "run-0"}, "wrong_run", "start the learner again"),
    ({"held": (msg.Held(0, 1),)}, "wrong_run", "number of fragments"),
    ({"fingerprint": "0" * 32}, "layout_differs", "same model code"),
]


@pytest.mark.parametrize(("fields", "code", "remedy"), REFUSALS)
def test_a_hello_is_refused_with_what_to_do(fields: dict[str, Any], code: str, remedy: str) -> None:
    desk = running("site-a")
    refusal = desk.hello("site-a", **({"peer": "another"} | fields))
    assert (refusal.code, refusal.push_id) == (code, 0)
    assert refusal.expected and refusal.got and remedy in refusal.remedy
    if code == "layout_differs":
        assert unpack_layout(refusal.layout) == LAYOUT
    # The learner that is here has lost nothing.
    desk.take(ev.Send)
    desk.report("site-a", 20)
    assert not desk.told(msg.Bye, "site-a")


def test_a_full_run_asks_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    desk = running("a", "b")
    assert desk.hello("c").code == "over_capacity"
    assert isinstance(desk.hello("b", 1, peer="again"), msg.Welcome)


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


def test_a_connection_belongs_to_who_said_hello_last_and_a_learner_to_its_newest_one() -> None:
    desk = running("a", "b")
    desk.announce("b", 1, 2)
    old = desk.peer("a")
    assert isinstance(desk.hello("a", peer=desk.peer("b")), msg.Welcome)
    assert ev.Drop(1, incarnation("b"), 2) in desk.take(ev.Drop), "b has no connection any more"
    desk.do(desk.syncer.control, old, None, msg.Report(1, 1, None, (0, 0, 0, 0)))
    assert [each.peer for each in desk.take(ev.Send)] == [old], "it is told to say Hello"


def test_who_is_unknown_is_told_to_say_hello_and_may_ask_for_the_status() -> None:
    desk = running("a")
    for message, kind in ((msg.Push(0, 1, 0, 1, 1), msg.Bye), (msg.AskStatus(), msg.Status)):
        (effect,) = desk.do(desk.syncer.control, "x", None, message)
        assert isinstance(effect, ev.Send) and isinstance(effect.message, kind)
    assert not desk.do(desk.syncer.control, "x", None, msg.Bye("gone"))


def test_what_only_a_broker_sends_or_nobody_can_read_is_refused() -> None:
    desk = running("a")
    desk.take(ev.Send)
    desk.send("a", msg.Status({}))
    error = RemoteProtocolError(ErrorCode.BAD_MESSAGE, "body", expected="a", got="b")
    desk.do(desk.syncer.refused, desk.peer("a"), error)
    desk.report("a", 20, held=(0,))
    told = desk.told(msg.Refuse, "a")
    assert [each.code for each in told] == ["bad_message"] * 3
    assert told[2].expected.startswith("4 fragments")
    assert desk.status["learners"]["a"]["steps"] == 10


HELD = tuple(msg.Held(version, digest) for version, digest in ((5, 50), (4, 41), (3, 30), (-1, 0)))


@pytest.mark.parametrize(("head", "go_back", "ahead"), [(5, (1,), 0), (3, (0, 1), 3)])
def test_a_learner_of_another_epoch_goes_back_where_its_copy_is_not_ours(
    head: int, go_back: tuple[int, ...], ahead: int
) -> None:
    desk = Desk(resumed=resumed(heads=(head,) * 4), published_digest=lambda f, v: 10 * v)
    welcome = desk.hello("a", run_id=RUN, epoch="6-0123abcd", held=HELD)
    assert (welcome.go_back, welcome.role) == (go_back, Role.ADOPT)
    noted = [(note.warning, note.fields["versions"]) for note in desk.noted("history_lost")]
    assert noted == [(True, ahead)] * (ahead > 0)


def test_within_an_epoch_nobody_goes_back() -> None:
    """A publication may overtake a Welcome."""
    desk = Desk(resumed=resumed(), published_digest=lambda f, v: None)
    assert desk.hello("a", run_id=RUN, epoch=EPOCH, held=(msg.Held(6, 1),) * 4).go_back == ()


def test_a_lost_learner_keeps_its_name_and_what_it_pushed() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.announce("a", 1, 2)
    desk.pass_(30.0, "b")
    (note,) = desk.noted("lost")
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
        desk.leave(f"n{i}")
        desk.now += 1.0
    assert list(desk.status["learners"]) == ["keeper", "n4", "n5"]


def test_an_operator_who_stops_the_broker_sends_everybody_away() -> None:
    desk = running("a", "b")
    desk.take(ev.Send)
    desk.do(desk.syncer.stop, "maintenance")
    assert [bye.reason for bye in desk.told(msg.Bye)] == ["maintenance"] * 2
    assert desk.status["waiting_for"] == ["nobody: the broker stops (maintenance)"]
    desk.pass_(5.0, "a", "b", steps_per_s=10)
    assert not desk.take(ev.Merge)


# Version 0.


def asked(desk: Desk, kind: msg.DataKind) -> list[msg.Fetch]:
    return [fetch for fetch in desk.told(msg.Fetch) if fetch.kind is kind]


def test_the_first_learner_seeds_and_the_others_wait() -> None:
    desk = Desk(configure(run={"learners_at_start": 3}))
    first, second = desk.hello("b"), desk.hello("a")
    assert (first.role, second.role) == (Role.SEED, Role.WAIT)
    assert first.beat.heads == () and first.beat.phase is msg.Phase.SEEDING
    desk.seed("b")
    assert [each for each in desk.log if isinstance(each, ev.Seed)] == [
        ev.Seed(incarnation("b"), LAYOUT)
    ]
    assert desk.status["waiting_for"] == ["learners: 2 of 3 have joined"]
    desk.take(ev.Send)
    desk.hello("c")
    welcomes = desk.told(msg.Welcome)
    assert [each.role for each in welcomes] == [Role.WAIT, Role.ADOPT, Role.ADOPT, Role.ADOPT]
    assert welcomes[-1].beat.heads == (0, 0, 0, 0)


def test_the_named_learner_seeds() -> None:
    desk = Desk(configure(run={"seeder": "b"}))
    assert desk.hello("a").role is Role.WAIT
    assert desk.status["waiting_for"] == ["b to join and send version 0"]
    assert desk.hello("b").role is Role.SEED


def test_what_is_missing_is_asked_for() -> None:
    desk = Desk()
    desk.hello("a")
    assert not desk.seed_chunk("a", 0, 0), "nothing can be checked before the layout"
    desk.pass_(2.0, "a")
    assert len(asked(desk, msg.DataKind.LAYOUT)) >= 1
    desk.layout("a")
    assert desk.seed_chunk("a", 0, 1)
    assert not desk.seed_chunk("a", 0, 1)
    assert desk.status["waiting_for"] == ["version 0 from a: 6% is here"]
    desk.pass_(2.0, "a")
    fetches = asked(desk, msg.DataKind.SEED)
    assert [(each.fragment, each.chunks) for each in fetches[:2]] == [
        (0, ((0, 1), (2, CHUNKS - 2))),
        (1, ((0, CHUNKS),)),
    ]


@pytest.mark.parametrize("noticed_by", ["the time", "the Hello of another one"])
def test_the_next_learner_seeds_if_the_first_one_dies(noticed_by: str) -> None:
    desk = Desk()
    desk.hello("a")
    desk.hello("b")
    desk.layout("a")
    assert desk.seed_chunk("a", 2, 0)
    desk.now += 2.0
    desk.report("b", 0)
    desk.take(ev.Send)
    desk.now += 1.0  # a is silent now, and no event has noticed it yet.
    if noticed_by == "the time":
        desk.do(desk.syncer.advance)
    else:
        assert desk.hello("c").role is Role.WAIT
    assert ev.Drop(2, incarnation("a"), 0) in desk.log
    assert [each.role for each in desk.told(msg.Welcome, "b")] == [Role.SEED]
    assert not desk.seed_chunk("a", 2, 1)
    desk.seed("b")
    assert desk.status["phase"] == "running"


def test_a_lone_seeding_learner_goes_on_after_a_silence() -> None:
    desk = Desk()
    desk.hello("a")
    desk.layout("a")
    assert desk.seed_chunk("a", 0, 0)
    desk.pass_(40.0)
    assert desk.hello("a", peer="again").role is Role.SEED
    assert not desk.seed_chunk("a", 0, 0), "what came before is kept"


def test_a_new_process_with_another_model_takes_the_place_of_a_dead_one() -> None:
    desk = Desk()
    desk.hello("a")
    desk.layout("a")
    desk.pass_(3.0)
    assert desk.hello("a", 2, fingerprint="e" * 32).role is Role.SEED


@pytest.mark.parametrize(
    ("fragments", "own", "refused", "remedy"),
    [
        (4, "e" * 32, "a", "do not change it"),
        (4000, fingerprint(LAYOUT), "a", "fragments.count"),
        (4, fingerprint(LAYOUT), "b", "same model code"),
    ],
)
def test_a_layout_that_cannot_be_or_that_others_do_not_have_is_refused(
    fragments: int, own: str, refused: str, remedy: str
) -> None:
    """It is not the one of its Hello, or too small for so many fragments, or b has another one."""
    desk = Desk(configure(fragments={"count": fragments}))
    desk.hello("a", fingerprint=own)
    desk.hello("b", fingerprint="f" * 32)
    desk.take(ev.Send)
    desk.layout("a")
    sent = {each.peer: each.message for each in desk.take(ev.Send)}
    refusal = sent[f"{refused}:1"]
    assert isinstance(refusal, msg.Refuse) and remedy in refusal.remedy
    if refused == "a":
        welcome = sent["b:1"]
        assert isinstance(welcome, msg.Welcome) and welcome.role is Role.SEED
