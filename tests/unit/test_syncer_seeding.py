"""Version 0: one learner sends it, the next one if it dies."""

from __future__ import annotations

from desk import CHUNKS, LAYOUT, Desk, configure, incarnation
from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError


def asked(desk: Desk, kind: msg.DataKind) -> list[msg.Fetch]:
    return [fetch for fetch in desk.told(msg.Fetch) if fetch.kind is kind]


def seed_chunk(desk: Desk, name: str, fragment: int, chunk: int) -> bool:
    header = structs.replace(desk.header(name, fragment, 0, chunk), kind=msg.DataKind.SEED)
    desk.do(desk.syncer.seed_chunk, header)
    return bool(desk.last)


def test_the_first_learner_seeds_and_the_others_wait() -> None:
    desk = Desk()
    first, second = desk.hello("b"), desk.hello("a")
    assert isinstance(first, msg.Welcome) and isinstance(second, msg.Welcome)
    assert (first.role, second.role) == (msg.Role.SEED, msg.Role.WAIT)
    assert first.beat.heads == () and first.beat.phase is msg.Phase.SEEDING
    desk.seed("b")
    assert [(seed.incarnation, seed.layout) for seed in desk.log if isinstance(seed, ev.Seed)] == [
        (incarnation("b"), LAYOUT)
    ]
    welcomes = desk.told(msg.Welcome)
    assert [each.role for each in welcomes[-2:]] == [msg.Role.ADOPT] * 2
    assert welcomes[-1].beat.heads == (0, 0, 0, 0)


def test_the_named_learner_seeds() -> None:
    desk = Desk(configure(run={"seeder": "b"}))
    first = desk.hello("a")
    assert desk.status["waiting_for"] == ["b to join and send version 0"]
    second = desk.hello("b")
    assert isinstance(first, msg.Welcome) and first.role is msg.Role.WAIT
    assert isinstance(second, msg.Welcome) and second.role is msg.Role.SEED


def test_what_is_missing_is_asked_for() -> None:
    desk = Desk()
    desk.hello("a")
    assert not seed_chunk(desk, "a", 0, 0), "nothing can be checked before the layout"
    desk.pass_(2.0, "a")
    assert len(asked(desk, msg.DataKind.LAYOUT)) >= 1
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert seed_chunk(desk, "a", 0, 1)
    assert not seed_chunk(desk, "a", 0, 1)
    assert desk.status["waiting_for"] == ["version 0 from a: 6% is here"]
    desk.pass_(2.0, "a")
    fetches = asked(desk, msg.DataKind.SEED)
    assert [(each.fragment, each.chunks) for each in fetches[:2]] == [
        (0, ((0, 1), (2, CHUNKS - 2))),
        (1, ((0, CHUNKS),)),
    ]


def test_the_next_learner_seeds_if_the_first_one_dies() -> None:
    desk = Desk()
    desk.hello("a")
    desk.hello("b")
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert seed_chunk(desk, "a", 2, 0)
    desk.take(ev.Send)
    desk.pass_(3.0, "b")
    assert ev.Drop(2, incarnation("a"), 0) in desk.log
    assert [each.role for each in desk.told(msg.Welcome, "b")] == [msg.Role.SEED]
    assert not seed_chunk(desk, "a", 2, 1)
    desk.seed("b")
    assert desk.status["phase"] == "running"


def test_a_lone_seeding_learner_goes_on_after_a_silence() -> None:
    desk = Desk()
    desk.hello("a")
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert seed_chunk(desk, "a", 0, 0)
    desk.pass_(10.0)
    welcome = desk.hello("a", peer="again")
    assert isinstance(welcome, msg.Welcome) and welcome.role is msg.Role.SEED
    assert not seed_chunk(desk, "a", 0, 0), "what came before is kept"


def test_a_new_process_with_another_model_takes_the_place_of_a_dead_one() -> None:
    desk = Desk()
    desk.hello("a")
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    desk.pass_(3.0)
    welcome = desk.hello("a", 2, fingerprint="e" * 32)
    assert isinstance(welcome, msg.Welcome) and welcome.role is msg.Role.SEED


def test_a_layout_that_is_not_the_one_of_hello_is_refused() -> None:
    desk = Desk()
    desk.hello("a", fingerprint="e" * 32)
    desk.hello("b")
    desk.take(ev.Send)
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    sent = desk.take(ev.Send)
    (refusal,) = [each.message for each in sent if each.peer == "a:1"]
    assert isinstance(refusal, msg.Refuse) and "do not change it" in refusal.remedy
    (welcome,) = [each.message for each in sent if each.peer == "b:1"]
    assert isinstance(welcome, msg.Welcome) and welcome.role is msg.Role.SEED


def test_learners_that_wait_with_another_model_are_refused() -> None:
    desk = Desk()
    desk.hello("a")
    desk.hello("b", fingerprint="e" * 32)
    desk.take(ev.Send)
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert [each.code for each in desk.told(msg.Refuse, "b")] == ["layout_differs"]


def test_too_many_fragments_for_the_model_are_told_to_its_learner() -> None:
    desk = Desk(configure(fragments={"count": 4000}))
    desk.hello("a")
    desk.take(ev.Send)
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert "fragments.count" in desk.told(msg.Refuse, "a")[0].remedy


def test_parameters_that_are_not_finite_are_refused() -> None:
    desk = Desk()
    desk.hello("a")
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    for fragment in range(4):
        for chunk in range(CHUNKS):
            seed_chunk(desk, "a", fragment, chunk)
    assert desk.status["waiting_for"] == ["the disk: version 0 is being written"]
    error = RemoteProtocolError(ErrorCode.NOT_FINITE_SEED, "w0", expected="finite", got="nan")
    desk.take(ev.Send)
    desk.do(desk.syncer.seed_failed, error)
    assert [each.code for each in desk.told(msg.Refuse, "a")] == ["not_finite_seed"]
    welcome = desk.hello("b", fingerprint="e" * 32)
    assert isinstance(welcome, msg.Welcome) and welcome.role is msg.Role.SEED


def test_with_an_initial_file_only_the_layout_is_asked_for() -> None:
    desk = Desk(configure(broker={"init": "model.safetensors"}))
    welcome = desk.hello("a")
    assert isinstance(welcome, msg.Welcome) and welcome.role is msg.Role.WAIT
    assert len(asked(desk, msg.DataKind.LAYOUT)) == 1
    desk.do(desk.syncer.layout, incarnation("a"), LAYOUT)
    assert len(desk.take(ev.Seed)) == 1
    desk.heads = [0] * 4
    desk.do(desk.syncer.seeded)
    assert [each.role for each in desk.told(msg.Welcome, "a")] == [msg.Role.ADOPT]
