"""The broker's host with real syncer, merging and store, over ports of the test: rounds, crashes,
full disks, bad bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import learner_cases
import numpy as np
import pytest
from learner_cases import LAYOUT, HandLearner, House, begun, values
from safetensors.numpy import save_file

from narrows.broker.process import downlink, pipeline
from narrows.broker.store import Store
from narrows.proto import messages as msg
from narrows.proto.codec import encode_values
from narrows.proto.codec.payload import float_payload
from narrows.proto.wire import pack_layout


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "state")


def one_round(house: House, *learners: HandLearner, value: float = 0.01) -> None:
    """Each learner pushes fragment 0 once, and adopts what comes of it."""
    version = learners[0].versions[0]
    for each in learners:
        each.push(0, values(each, value)[0])
    house.until(lambda: house.heads[0] > version, "a version", *learners)
    for each in learners:
        each.listen()


def test_a_state_that_is_being_fetched_stays_while_the_head_moves_on(house: House) -> None:
    a, late = begun(house, "site-a")[0], HandLearner(house, "late")
    one_round(house, a)
    late.hello()
    late.fetch(msg.DataKind.STATE, 0, 1, 0)
    house.settle()
    one_round(house, a)
    late.fetch(msg.DataKind.STATE, 0, 1, 1)
    a.fetch(msg.DataKind.STATE, 0, 1, 0)
    house.settle()
    late.listen()
    assert late.versions == [1]
    header = [h for topic, h, _, _ in house.wires.datas if topic.startswith("r/site-a")][-1]
    assert (header.version, header.push_id) == (1, 1), "push 2 is in version 2 only"


def test_a_start_that_has_lost_versions_does_not_say_that_all_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_cases, "Store", partial(Store, journal=False))
    house = House(tmp_path)
    one_round(house, *begun(house, "site-a"))
    house.kill()
    house.start()
    (lost,), (resumed,) = house.noted("recovered"), house.noted("resumed")
    assert "goes back from version 1 to 0" in lost.text and house.heads == (0,)
    assert "at versions 0 to 0, 0 tokens" in resumed.text and "every" not in resumed.text
    house.kill()


def test_an_answer_waits_for_the_subscriptions_of_its_learner(house: House) -> None:
    begun(house, "site-a")
    late = HandLearner(house, "late")
    late.hello(listens=False)
    late.fetch(msg.DataKind.STATE, 0, 0, 0, 1)
    house.settle()
    late.listen()
    assert late.versions == [-1], "it would be lost"
    house.subscribe(late.incarnation)
    house.settle()
    late.listen()
    assert late.versions == [0]
    sent = len(house.wires.datas)
    house.host.downlink.keep_listeners(lambda _: False)
    late.fetch(msg.DataKind.STATE, 0, 0, 0)
    house.settle()
    assert len(house.wires.datas) == sent, "its new connections have said nothing yet"
    house.subscribe(late.incarnation)
    house.settle()
    assert len(house.wires.datas) == sent + 1


def test_who_never_listens_holds_no_memory(house: House) -> None:
    begun(house, "site-a")
    deaf = HandLearner(house, "deaf")
    deaf.hello(listens=False)
    for _ in range(2 * downlink.EARLY_MAX):
        deaf.fetch(msg.DataKind.STATE, 0, 0, 0, 1)
    house.settle()
    assert not [topic for topic, *_ in house.wires.datas if topic.startswith("r/deaf")]
    assert len(house.host.downlink._early[deaf.incarnation]) == downlink.EARLY_MAX
    deaf.say(msg.Bye("gone"))
    house.wait(1.0)
    assert not house.host.downlink._early


def test_a_state_is_encoded_once_for_all_who_ask(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def encode(*arguments: Any, **options: Any) -> Any:
        encoded.append(1)
        return encode_values(*arguments, **options)

    monkeypatch.setattr(downlink, "encode_values", encode)
    learners = begun(house, "site-a", "site-b")
    for each in learners:
        for chunk in range(2):
            each.fetch(msg.DataKind.STATE, 0, 0, chunk)
            house.settle()
    assert len(encoded) == 1
    house.now += downlink.IDLE_S
    house.settle()
    assert not house.host.downlink._copies[0], "nobody asks for it any more"


def test_a_failed_merge_is_refused_and_its_learner_may_push_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = begun(house, "site-a")

    def fail(*_: object) -> None:
        raise FloatingPointError("version 1 would not be finite")

    monkeypatch.setattr(pipeline, "merge", fail)
    a.push(0, values(a, 0.01)[0])
    house.until(lambda: a.heard(msg.Refuse), "a refusal", a)
    refusal = a.heard(msg.Refuse)[0]
    assert (refusal.code, refusal.push_id) == ("merge_failed", 1)
    monkeypatch.undo()
    one_round(house, a)
    assert a.versions == [1] and a.outcomes == [((a.incarnation, 2),)]


def test_a_chunk_that_was_damaged_on_its_way_is_asked_for_again(house: House) -> None:
    (a,) = begun(house, "site-a")
    a.push(0, values(a, 0.01)[0], announce=False)
    a.push_id += 1
    a.say(msg.Push(0, a.push_id, 0, 100, 1))
    codec, payload = house.config.codec.push, a.payloads[0]
    assert not a.send(msg.DataKind.PUSH, 0, 0, a.push_id, 0, codec, payload, payload_digest=7)
    assert "bad_digest" in house.noted("refused")[0].text
    for index in list(a.payloads)[1:]:
        a.send_chunk(0, index)
    house.until(lambda: a.heard(msg.Fetch), "a question", a)
    assert a.heard(msg.Fetch) == [msg.Fetch(msg.DataKind.PUSH, 0, 0, a.push_id, ((0, 1),))]
    a.send_chunk(0, 0)
    house.until(lambda: house.noted("merged"), "a version", a)
    a.listen()
    assert a.versions == [1] and not a.heard(msg.Refuse)


def test_what_was_decoded_of_a_push_that_is_dropped_does_not_count_for_the_next(
    house: House,
) -> None:
    (a,) = begun(house, "site-a")
    push_id = a.push(0, values(a, 0.01)[0])
    house.pool.work()  # The loop hears of it later.
    a.say(msg.Bye("gone"))
    a.hello()
    a.say(msg.Push(0, push_id, 0, 100, 1))
    house.settle()
    assert house.heads[0] == 0, "nothing of it is here"
    for index in a.payloads:
        a.send_chunk(0, index)
    house.until(lambda: house.heads[0] == 1, "a version", a)


def test_version_0_may_come_from_a_file(tmp_path: Path) -> None:
    tensors = {e.name: np.full(e.shape, 0.25, np.float32) for e in LAYOUT.entries}
    save_file(tensors, tmp_path / "init.safetensors")
    house = House(tmp_path / "state", {"broker.init": str(tmp_path / "init.safetensors")})
    a = HandLearner(house, "site-a")
    a.hello()
    assert a.heard(msg.Welcome)[0].role == "wait"
    assert [each.kind for each in a.heard(msg.Fetch)] == [msg.DataKind.LAYOUT]
    a.send(msg.DataKind.LAYOUT, 0, 0, 0, 0, msg.LOSSLESS, pack_layout(LAYOUT))
    house.settle()
    assert house.heads == (0,) and set(house.host.pipeline.head(0)[0].global_.tolist()) == {0.25}


@pytest.mark.parametrize("code", ["bad_payload", "not_finite_seed"])
def test_a_damaged_version_0_is_refused_and_the_next_learner_seeds(house: House, code: str) -> None:
    rest = np.full(520 * 512 + 700 - (1 << 18), np.nan, np.float32)
    nan = float_payload(rest, np.array([0, rest.size]))[0]
    payload = nan if code == "not_finite_seed" else b"no payload"
    a, b = HandLearner(house, "site-a"), HandLearner(house, "site-b")
    a.hello()
    b.hello()
    assert a.heard(msg.Welcome)[0].role == "seed"
    a.seed(values(a, 1.0), damaged=payload)
    house.settle()
    assert a.heard(msg.Refuse)[0].code == code
    house.until(lambda: b.heard(msg.Welcome)[-1].role == "seed", "another learner", b)
    b.seed(values(b, 1.0))
    house.settle()
    assert house.heads == (0,)


def test_a_full_pipe_makes_a_publication_wait_and_then_lossy(house: House) -> None:
    a, _ = begun(house, "site-a", "site-b")
    house.wires.is_full = True
    a.push(0, values(a, 0.01)[0])
    house.until(lambda: house.noted("merged"), "a version", a)
    began = house.now
    house.until(lambda: any(each[3] for each in house.wires.datas), "a lossy message", a)
    assert house.now - began <= 1.5
    house.wires.is_full = False
    house.wait(1.0, a)
    a.listen()
    assert a.versions == [1]


def test_what_a_learner_asked_for_that_is_gone_waits_no_more(house: House) -> None:
    (a,) = begun(house, "site-a")
    house.wires.is_full = True
    a.fetch(msg.DataKind.STATE, 0, 0, 0, 1)
    house.settle()
    assert len(house.host.downlink.sender) == 2
    a.say(msg.Bye("gone"))
    house.wait(1.5)
    assert len(house.host.downlink.sender) == 0


def test_a_learner_cut_into_another_number_of_fragments_is_of_another_run(tmp_path: Path) -> None:
    """Before version 0 the number may change from one life of a run to the next."""
    before = House(tmp_path / "state", {"fragments.count": 2})
    a = HandLearner(before, "site-a")
    a.hello()
    before.kill()
    a.house = now = House(tmp_path / "state", now=before.now + 5, lives=1)
    a.hello()
    (refusal,) = a.heard(msg.Refuse)
    assert refusal.code == "wrong_run" and refusal.remedy.startswith("start the learner again")
    assert (refusal.expected, refusal.got) == ("1 fragments, or none", "2")
    assert not now.host.syncer.state.members.connected()


def test_the_end_is_durable(tmp_path: Path) -> None:
    house = House(tmp_path / "state", {"run.goal_tokens": "100"})
    (a,) = begun(house, "site-a")
    one_round(house, a)
    a.say(msg.Report(1, 100, 1.0, tuple(a.versions), finished=(0,)))
    house.wait(1.0)
    a.say(msg.Bye("the run has ended"))
    house.wait(1.0)
    assert house.host.finished is not None and house.host.finished.missing == ()
    house.kill()
    house.start()
    assert house.host.syncer.status(house.now)["phase"] == "ended"
