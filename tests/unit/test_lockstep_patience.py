"""In lockstep one member cannot stop the run: not by silence, a trickle, nor by new joins."""

from __future__ import annotations

import pytest
from machines import Desk, hello, incarnation_of, one, only

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg
from narrows.proto.flow import patience, push_bytes_max

MODES = ("diloco", "streaming")
ROUND_S = 5.0


def begun(mode: str, *names: str) -> Desk:
    desk = Desk(mode).running(*names)
    assert desk.state.lockstep
    return desk


def rounds_of(desk: Desk) -> list[int]:
    return [index for index, each in sorted(desk.state.rounds.items()) if not each.merging]


def contribute(desk: Desk, name: str, index: int = 0, *, push_id: int) -> list[ev.Effect]:
    """A complete push of a fragment, however the model is cut."""
    elements = desk.state.table[index].elements
    effects = desk.push(name, index, push_id=push_id, elements=elements)
    return effects + desk.chunk(name, index, push_id=push_id, count=elements)


def finish(desk: Desk, effects: list[ev.Effect], *names: str) -> int:
    """Rounds that are merged; everybody adopts what comes of them."""
    merges = only(effects, ev.StartMerge)
    for merge in merges:
        desk.do(ev.Merged(merge.fragment, merge.version, 100 + merge.version, 0))
        for name in names:
            desk.say(name, msg.Adopted(merge.fragment, merge.version))
    return len(merges)


def spend(desk: Desk, seconds: float, *names: str) -> list[ev.Effect]:
    effects: list[ev.Effect] = []
    for _ in range(round(seconds)):
        effects += desk.wait(1.0)
        for name in names:
            effects += desk.say(name, msg.Alive(0))
    return effects


def together(desk: Desk, rounds: int, *names: str) -> None:
    """Everybody contributes ROUND_S after each opening."""
    for number in range(rounds):
        spend(desk, ROUND_S, *names)
        effects: list[ev.Effect] = []
        for index in rounds_of(desk):
            for name in names:
                effects += contribute(desk, name, index, push_id=1 + number)
        assert finish(desk, effects, *names)


def merged_within(desk: Desk, seconds: float, honest: str, *others: str, first: int) -> int:
    """Versions that come while only `honest` contributes; the others live and adopt."""
    count, push_id, until = 0, first, desk.now + seconds
    while desk.now < until:
        effects = spend(desk, 1.0, honest, *others)
        for index in rounds_of(desk):
            if honest not in desk.state.rounds[index].contributed:
                effects += contribute(desk, honest, index, push_id=push_id)
                push_id += 1
        count += finish(desk, effects, honest, *others)
    return count


@pytest.mark.parametrize("mode", MODES)
def test_a_member_that_never_pushes_and_never_leaves_is_left_out(mode: str) -> None:
    desk = begun(mode, "a", "silent")
    together(desk, 3, "a", "silent")
    effects: list[ev.Effect] = []
    for index in rounds_of(desk):
        effects += contribute(desk, "a", index, push_id=9)
    assert not only(effects, ev.StartMerge)
    assert "silent" in status_of(desk.syncer, {}, desk.now).waiting_for
    effects = spend(desk, 70.0, "a", "silent")
    assert only(effects, ev.StartMerge)
    notes = [note.text for note in only(effects, ev.Note) if "goes on without silent" in note.text]
    assert len(notes) == 1 and "has not contributed to the round of fragment" in notes[0]
    learners = {each.name: each.state for each in status_of(desk.syncer, {}, desk.now).learners}
    assert learners["silent"] == "given up"


@pytest.mark.parametrize("mode", MODES)
def test_its_silence_costs_less_from_round_to_round(mode: str) -> None:
    desk = begun(mode, "a", "silent")
    together(desk, 3, "a", "silent")
    assert merged_within(desk, 200.0, "a", "silent", first=20) > 3
    assert merged_within(desk, 200.0, "a", "silent", first=500) > 60


def test_a_member_that_was_silent_from_the_beginning_is_left_out_as_well() -> None:
    desk = begun("diloco", "a", "silent")
    assert merged_within(desk, 300.0, "a", "silent", first=1) > 10


def test_a_member_gets_the_time_of_its_first_step_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("narrows.broker.syncer.ending.ADOPTION_WAIT_S", 200.0)
    desk = begun("diloco", "a", "silent")
    assert merged_within(desk, 195.0, "a", "silent", first=1) == 0
    assert merged_within(desk, 185.0, "a", "silent", first=50) >= 6


def test_new_processes_of_a_silent_name_change_nothing() -> None:
    desk = begun("diloco", "a", "x")
    together(desk, 3, "a", "x")
    count, push_id = 0, 20
    for life in range(2, 60):
        desk.say("x", msg.Bye("again"))
        desk.say("x", hello("x", incarnation=incarnation_of("x", life)))
        if life % 2:
            desk.say("x", msg.Adopted(0, desk.state.heads[0].version))
        effects = spend(desk, 4.0, "a", "x")
        for index in rounds_of(desk):
            if "a" not in desk.state.rounds[index].contributed:
                effects += contribute(desk, "a", index, push_id=push_id)
                push_id += 1
        count += finish(desk, effects, "a")
    assert count > 20


def test_a_trickle_of_one_byte_a_second_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = begun("diloco", "a", "x")
    together(desk, 3, "a", "x")
    contribute(desk, "a", push_id=9)
    desk.push("x", push_id=9, elements=desk.state.table[0].elements)
    merges: list[ev.Effect] = []
    for second in range(90):
        desk.handle += 1
        header = desk.header("x", 0, push_id=9, offset=second, count=1)
        merges += desk.do(ev.ChunkArrived(header, desk.handle, 1))
        merges += spend(desk, 1.0, "a", "x")
    assert only(merges, ev.StartMerge)


def test_claimed_positions_buy_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late copies of a merged push change nothing, and are no fault."""
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = begun("diloco", "a", "x")
    together(desk, 3, "a", "x")
    contribute(desk, "a", push_id=9)
    effects: list[ev.Effect] = []
    for second in range(90):
        place = {"offset": 0, "count": 1, "version": 0}
        effects += desk.chunk(
            "x", 0, push_id=1, position=10_000 + 1000 * second, size_bytes=300, **place
        )
        effects += spend(desk, 1.0, "a", "x")
    assert only(effects, ev.StartMerge) and not desk.state.tally.refused


def test_a_slow_line_buys_a_multiple_of_the_time_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes come as usual, but in ever new pushes, of which none is ever complete."""
    monkeypatch.setattr(patience, "RATE_MIN", 8)
    desk = begun("diloco", "a", "x")
    size = int(push_bytes_max(desk.state.settings.push_codec, 2000))
    rates = {"a": size // 8, "x": size // 400}
    for name in rates:
        desk.push(name, elements=2000)
    effects: list[ev.Effect] = []
    for part in range(8):
        spend(desk, 1.0, "a", "x")
        for name, bytes_per_s in rates.items():
            place = {"offset": 250 * part, "count": 250}
            effects += desk.chunk(name, 0, size_bytes=bytes_per_s, **place)
    assert finish(desk, effects, "a", "x")
    spend(desk, 1.0, "a", "x")
    contribute(desk, "a", push_id=9)
    begun_at, effects = desk.now, []
    while not only(effects, ev.StartMerge) and desk.now < begun_at + 500:
        push_id = 10 + int(desk.now)
        desk.push("x", push_id=push_id, elements=2000)
        desk.chunk("x", 0, push_id=push_id, count=1, size_bytes=rates["x"])
        effects += spend(desk, 1.0, "a", "x")
    assert desk.now - begun_at < 90, "three rounds of 29 s; 800 s would be twice its own time"


def test_one_that_is_slow_but_contributes_is_waited_for_again() -> None:
    desk = begun("diloco", "a", "slow")
    together(desk, 3, "a", "slow")
    contribute(desk, "a", push_id=9)
    finish(desk, spend(desk, 70.0, "a", "slow"), "a", "slow")
    contribute(desk, "slow", push_id=10)
    slow = desk.state.roster.get("slow")
    assert slow is not None and not slow.given_up
    one(contribute(desk, "a", push_id=10), ev.StartMerge)


def test_who_answers_a_little_later_each_time_does_not_stretch_its_patience() -> None:
    desk = begun("diloco", "a", "b", "x")
    waited, push_id = 5.0, 1
    while waited < 300.0 and push_id < 30:
        push_id += 1
        effects = contribute(desk, "a", push_id=push_id)
        effects += contribute(desk, "b", push_id=push_id)
        effects += spend(desk, waited, "a", "b", "x")
        if not only(effects, ev.StartMerge):
            effects += contribute(desk, "x", push_id=push_id)
            waited *= 1.2
        finish(desk, effects, "a", "b", "x")
        spend(desk, 1.0, "a", "b", "x")
    assert waited < 300.0, "twelve times the 21 s that the first round took"
