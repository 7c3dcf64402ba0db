"""The status: what people see, and who is waited for."""

from __future__ import annotations

import msgspec
import pytest
from desk import CHUNKS, Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg


def test_the_status_of_a_run() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1, tokens=3000)
    desk.report("b", 20, held=(0, 0, 0, -1))
    status = desk.status
    assert status["phase"] == "running" and status["versions"] == [1, 0, 0, 0]
    assert (status["run_tokens"], status["merges"], status["contributions"]) == (1000, 1, 2)
    learner = status["learners"]["a"]
    assert (learner["logged_tokens"], learner["merged_tokens"]) == (250, 250)
    assert (learner["state"], learner["steps_per_s"]) == ("training", 10.0)
    assert learner["versions_behind"] == 1
    assert status["learners"]["b"]["state"] == "joining"
    message = msg.Status(status)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=msg.Status) == message


def test_a_learner_is_paused_silent_lost_or_gone() -> None:
    desk = running("a", "b")
    desk.report("a", 20, paused="evaluating")
    states = [desk.status["learners"]["a"]["state"]]
    for seconds in (3.0, 27.0):
        desk.pass_(seconds, "b")
        states.append(desk.status["learners"]["a"]["state"])
    desk.send("b", msg.Bye("done"))
    states.append(desk.status["learners"]["b"]["state"])
    assert states == ["paused: evaluating", "silent", "lost", "left"]
    assert desk.status["waiting_for"] == ["learners: none is here"]


def test_merged_tokens_go_on_after_a_start() -> None:
    desk = Desk(resumed=resumed(merged_tokens={"a.00000001": 4000}))
    desk.hello("a")
    assert desk.status["learners"]["a"]["merged_tokens"] == 1000


def test_a_firewall_in_the_way_is_named_once() -> None:
    desk = running("a", "b")
    desk.announce("a", 0, 1)
    desk.announce("b", 0, 1)
    for chunk in range(CHUNKS - 1):
        desk.pass_(4.0, "a", "b", steps_per_s=10)
        desk.chunk("b", 0, 1, chunk)
    hints = [note for note in desk.take(ev.Note) if note.event == "no_data"]
    assert len(hints) == 1 and "a firewall close port 7071" in hints[0].text
    assert desk.status["learners"]["a"]["hint"] and not desk.status["learners"]["b"]["hint"]


def test_the_status_names_the_reason_of_a_stop() -> None:
    desk = running("a", config=configure(merge={"quorum": 2}))
    desk.do(desk.syncer.stop, "maintenance")
    assert desk.status["waiting_for"] == ["nobody: the broker stops (maintenance)"]


@pytest.mark.parametrize("phase", [msg.Phase.ENDING, msg.Phase.ENDED])
def test_after_a_start_the_end_waits_for_learners_that_are_not_here_yet(phase: msg.Phase) -> None:
    desk = Desk(resumed=resumed(phase=phase, merged={(incarnation("b"), 0): 3}))
    desk.hello("a")
    desk.pass_(10.5, "a")
    line = "learners that were here before the broker's start, for another 20 s"
    assert desk.status["waiting_for"][0] == line
    desk.pass_(20.0, "a")
    assert line[:20] not in str(desk.status["waiting_for"])
