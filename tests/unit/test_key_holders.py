"""Attempts of somebody with an admitted key: another's connection, the memory, the budget, and
messages that nobody could read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from desk import CHUNKS, LAYOUT, Desk, configure, incarnation, running
from learner_cases import HandLearner, House, begun, values

from narrows.broker.process import pipeline
from narrows.broker.process.downlink import SPARE_CONNECTIONS, Connection
from narrows.broker.syncer import events as ev
from narrows.broker.syncer import pushes
from narrows.broker.syncer.state import Clock
from narrows.proto import messages as msg
from narrows.proto.codec import DecodedChunk, decode_chunk
from narrows.proto.errors import ErrorCode
from narrows.proto.layout import fingerprint


def test_a_connection_that_had_another_key_does_not_speak_for_its_learner() -> None:
    desk = running("site-a")
    for message in (msg.Bye("gone"), msg.Report(1 << 40, 1 << 40, None, (0,) * 4)):
        effects = desk.do(desk.syncer.control, desk.peer("site-a"), "site-b", message)
        sent = [each.message for each in effects if isinstance(each, ev.Send)]
        assert not any(isinstance(each, msg.Refuse) for each in sent), sent
    learner = desk.status["learners"]["site-a"]
    assert learner["state"] == "training" and learner["logged_tokens"] == 100


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


def test_a_layout_whose_bitmaps_would_fill_the_memory_is_refused() -> None:
    desk = Desk()
    entries = tuple(msg.LayoutEntry(f"w{i}", (1 << 46,), "float32", "mean") for i in range(4))
    huge = msg.Layout(0, entries)
    desk.hello("a", fingerprint=fingerprint(huge))
    desk.do(desk.syncer.layout, incarnation("a"), huge)
    (refusal,) = desk.told(msg.Refuse, "a")
    assert "size of the model" in refusal.message
    desk.hello("b")
    assert desk.syncer.wants_layout(incarnation("b")), "the next one is asked"
    assert not desk.syncer.wants_layout(incarnation("a"))
    desk.seed("b")
    assert desk.syncer.state.layout == LAYOUT and CHUNKS == desk.syncer.state.push_chunks[0]


def test_a_clock_that_is_full_can_still_be_told() -> None:
    clock = Clock(1, msg.TOKENS_MAX - 1)
    clock.count(msg.PUSH_TOKENS_MAX, 1.0)
    assert clock.run_tokens == msg.TOKENS_MAX


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "state")


def test_a_connection_is_charged_once_whatever_it_says_and_before_its_learner_says_hello(
    house: House,
) -> None:
    downlink, a, b = house.host.downlink, Connection(10, 1), Connection(11, 2)
    steps = [
        (a, "p/00", True, 1), (a, "p/00", True, 1), (a, "p/01", True, 1), (b, "p/00", False, 1),
        (b, "p/00", True, 2), (b, "p/00", False, 1), (b, "p/00", False, 1), (b, "p/00", True, 2),
    ]  # fmt: skip
    assert downlink.sender.fan_out == 0
    for connection, topic, is_on, counted in steps:
        downlink.listens(connection, topic, is_on, house.now)
        assert downlink.sender.fan_out == counted
    downlink.keep_listeners(lambda connection: connection == b)
    assert downlink.sender.fan_out == 1


@pytest.mark.parametrize("topic", ["p/00", "p/03", "p/", "p", ""])
def test_who_hears_any_publication_is_charged_and_a_site_for_no_more_than_its_learners_and_a_few(
    house: House, topic: str
) -> None:
    downlink = house.host.downlink
    for number in range(100):
        downlink.listens(Connection(number, number, "site-m"), topic, True, house.now)
    downlink.listens(Connection(1000, 1000, "site-a"), topic, True, house.now)
    assert downlink.sender.fan_out == SPARE_CONNECTIONS + 1
    downlink.members(["site-m/0", "site-m/1", "site-a"])
    assert downlink.sender.fan_out == 2 + SPARE_CONNECTIONS + 1


def test_pushes_that_displace_each_other_cost_the_workers_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def decode(*arguments: Any) -> DecodedChunk:
        decoded.append(1)
        return decode_chunk(*arguments)

    monkeypatch.setattr(pipeline, "decode_chunk", decode)
    (a,) = begun(house, "site-a")
    decoded.clear()
    for _ in range(50):
        a.push(0, values(a, 0.01)[0])
    house.settle()
    assert len(decoded) == a.table[0].chunk_count(1 << 18), "the last push alone"


def test_a_model_that_does_not_fit_into_the_memory_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    a = HandLearner(house, "site-a")
    a.hello()
    monkeypatch.setattr(pipeline, "decode_chunk", full)
    a.seed(values(a, 1.0))
    house.settle()
    refusals = [each for _, each in house.wires.controls if isinstance(each, msg.Refuse)]
    assert [each.code for each in refusals] == [ErrorCode.TOO_LARGE] and refusals[0].remedy
    monkeypatch.undo()
    begun(house, "site-b")


def test_a_publication_of_other_chunks_is_answered_with_the_state(tmp_path: Path) -> None:
    house = House(tmp_path / "state")
    (a,) = begun(house, "site-a")
    a.push(0, values(a, 0.01)[0])
    house.until(lambda: house.heads[0] == 1, "a version", a)
    house.kill()
    again = House(tmp_path / "state", {"wan.down": "4Mbit/s"}, now=house.now + 1, lives=1)
    assert again.config.shared.chunk_elements < house.config.shared.chunk_elements
    late = HandLearner(again, "late")
    late.hello()
    late.fetch(msg.DataKind.PUBLICATION, 0, 1, 0, 1, 2)
    again.wait(5.0, late)
    kinds = [header.kind for topic, header, _, _ in again.wires.datas if topic.startswith("r/")]
    assert kinds == [msg.DataKind.STATE]
