"""The demo's story: the times at which a learner is killed and started again, and its display."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from machines import Desk, hello, incarnation_of
from running import wait_until

from narrows.bench.demo import bench as demo
from narrows.bench.demo.story import KILL_AT, RETURN_AT, DemoStory
from narrows.bench.kit import processes
from narrows.bench.kit.failures import ProcessFailed
from narrows.bench.kit.processes import Processes
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.status import status_of

START_S = 10.0

SLOW_TO_END = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(threading.Event().wait(20)))
print("ready", flush=True)
signal.pause()
"""


def acts(train_s: float) -> list[tuple[str, float]]:
    """The acts on the victim, with the share of the run at which each happens.

    `train_s` is the length of the run. Its learners needed START_S to be up.
    """
    story, done = DemoStory("b", started_at=0.0, begun_at=START_S), list[tuple[str, float]]()
    for percent in range(1, 100):
        share, now = percent / 100, START_S + train_s * percent / 100
        if story.is_to_kill(share, now):
            story.killed_at = now
            done.append(("kill", share))
        if story.is_to_return(share, now):
            story.returned_at = now
            done.append(("return", share))
    return done


def test_a_learner_is_killed_and_returns_in_the_middle_of_the_run() -> None:
    assert acts(150.0) == [("kill", KILL_AT), ("return", RETURN_AT)]


def test_in_a_short_run_the_killed_learner_returns_sooner() -> None:
    (kill, killed_at), (back, returned_at) = acts(4 * START_S)
    assert (kill, back, killed_at) == ("kill", "return", KILL_AT)
    assert (1 - returned_at) * 4 * START_S >= START_S, "it needs as long to be up again"


def test_in_a_run_too_short_to_come_back_nobody_is_killed() -> None:
    assert acts(START_S) == []


def test_a_learner_is_back_when_the_broker_counts_it_as_live() -> None:
    desk, story = Desk().running("a", "b"), DemoStory("b")

    def chapter() -> str:
        story.note(status_of(desk.syncer, {}, desk.now), desk.now)
        return story.chapter

    assert chapter() == ""
    story.killed_at = desk.now
    desk.do(ev.PeerLost(b"b"))
    assert "killed" in chapter()
    story.returned_at = desk.now
    assert chapter() == "b is starting under its old name"
    again = hello("b", incarnation=incarnation_of("b", 2))
    desk.do(ev.Received(b"b", again, "tcp://b"))
    assert chapter() == "b is starting under its old name"
    desk.adopt("b")
    assert chapter() == "b is back under its old name, warming up"


def test_a_run_that_ends_before_its_killed_learner_is_back_says_so(tmp_path: Path) -> None:
    """Not that a firewall may block the port, as its own log does."""
    story = DemoStory("b", killed_at=1.0, returned_at=2.0)
    with Processes(tmp_path) as children:
        children.start_command("b", sys.executable, "-c", "exit(4)")
        children.wait("b", 60)
        with pytest.raises(ProcessFailed) as caught:
            demo.check_ended(children, story, "b")
        assert str(caught.value) == "the run ended before b was back; give it more --steps"
        story.live_at = 3.0
        with pytest.raises(ProcessFailed, match="b ended with code 4"):
            demo.check_ended(children, story, "b")


def test_an_interrupted_bench_does_not_wait_for_an_orderly_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that leaves in order measures its model first, which nobody will read."""
    monkeypatch.setattr(processes, "ABORT_TIMEOUT_S", 0.1)
    children = Processes(tmp_path)
    with pytest.raises(KeyboardInterrupt), children:
        children.start_command("a", sys.executable, "-c", SLOW_TO_END)
        wait_until(lambda: "ready" in children.log("a"), "the handler")
        raise KeyboardInterrupt
    assert children.running["a"].returncode == -signal.SIGKILL
