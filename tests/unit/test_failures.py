"""Processes of a bench that fail: the message in one line, and the place of the rest."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import pytest

from narrows.bench.kit.failures import logs_kept, reason_of
from narrows.bench.kit.lab import Lab, LabSite
from narrows.bench.kit.processes import Processes, work_folder
from narrows.bench.peers import run as peer_run
from narrows.bench.peers.run import run_event
from narrows.bench.peers.systems import PeerExchange, PeerPlan
from narrows.bench.wan import bench as wan
from narrows.bench.wan import peers as wan_peers
from narrows.bench.wan.cells import MILLION, WanCell
from narrows.bench.wan.run import ShapedLine, SiteProcesses
from narrows.proto.errors import NarrowsError

OFF = "the average is off by 0.012, at most 0.01 is fine"
SCRIPT = f"def measure():\n    raise ArithmeticError('{OFF}')\nmeasure()\n"
TRACEBACK = f"""\
[W socket.cpp:42] hello
Traceback (most recent call last):
  File "/x/y.py", line 3, in <module>
    measure()
  File "/x/y.py", line 2, in measure
    raise ArithmeticError("...")
ArithmeticError: {OFF}
"""
GLOO = (
    "RuntimeError: [/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:28560: Connection"
    " reset by peer"
)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (TRACEBACK, OFF),
        # Another process's name before every line, and a line after the end.
        ("\n".join(f"[rank1]: {line}" for line in TRACEBACK.splitlines()) + "\n", OFF),
        (TRACEBACK + "terminate called without an active exception\n", OFF),
        (TRACEBACK.replace("Arith", "x.y.Arith"), OFF),
        # What was raised last counts.
        (TRACEBACK.replace(OFF, "first") + "\nDuring handling ...:\n\n" + TRACEBACK, OFF),
        (
            TRACEBACK.replace(f"ArithmeticError: {OFF}", GLOO),
            "Read error [127.0.0.1]:28560: Connection reset by peer",
        ),
        (TRACEBACK.replace(f"ArithmeticError: {OFF}", "KeyboardInterrupt"), "KeyboardInterrupt"),
        (TRACEBACK.replace(f"ArithmeticError: {OFF}", "ValueError: a\n  b\nc"), "a b c"),
        ("2026-01-01 INFO joined\nnarrows: config: no such key\n\n", "config: no such key"),
        ("a\nERROR: no wheel\nb\n", "no wheel"),
        ("first\n\nlast\n", "last"),
        ("", "it said nothing"),
        ("x" * 1000, "x" * 200 + " ..."),
    ],
)
def test_a_log_is_told_in_a_line(log: str, reason: str) -> None:
    assert reason_of(log) == reason


def test_a_failure_says_who_and_why_and_where_its_log_is() -> None:
    with pytest.raises(NarrowsError) as caught, work_folder(None, "test") as folder:
        with Processes(folder) as processes:
            processes.start_command("l0", sys.executable, "-c", SCRIPT)
            processes.wait("l0", 60)
            processes.check("l0")
    assert not folder.exists()
    text = str(caught.value)
    assert f"l0 ended with code 1: {OFF}" in text
    assert "Traceback" not in text and "File " not in text and "\n" not in text
    log = re.search(r"/\S+/l0\.log", text)
    assert log and "Traceback (most recent call last)" in Path(log[0]).read_text()


def test_what_was_asked_to_be_kept_is_named_and_not_copied(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with pytest.raises(NarrowsError, match=f"{keep}/l0.log"), work_folder(keep, "test") as folder:
        with Processes(folder) as processes:
            processes.start_command("l0", sys.executable, "-c", SCRIPT)
            processes.wait("l0", 60)
            processes.check("l0")


def test_other_errors_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), logs_kept(tmp_path):
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), logs_kept(tmp_path):
        raise KeyboardInterrupt


class FakeLab:
    """A place for processes without namespaces."""

    hub = LabSite("hub", "", "127.0.0.1")
    learners = (LabSite("l0", "", "127.0.0.1"),)

    def __init__(self, *_: object) -> None:
        pass

    def meter(self) -> nullcontext[None]:
        return nullcontext()


def test_a_peer_that_fails_on_the_line_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def line(lab: object, _limit_s: float) -> Generator[ShapedLine]:
        processes = SiteProcesses(tmp_path)
        with logs_kept(tmp_path), processes:
            hub = SiteProcesses(tmp_path)
            yield ShapedLine(cast(Lab, lab), hub, [(FakeLab.learners[0], processes)])

    def can_be_run(_cell: WanCell) -> str:
        return ""

    def run_peer(_cell: WanCell, at: ShapedLine, _limit_s: float) -> None:
        (_, processes), *_ = at.learners
        processes.start_command("l0", sys.executable, "-c", SCRIPT)
        processes.wait("l0", 60)
        processes.check("l0")
        raise AssertionError

    monkeypatch.setattr(wan, "Lab", FakeLab)
    monkeypatch.setattr(wan, "line", line)
    monkeypatch.setattr(wan_peers, "run_peer", run_peer)
    monkeypatch.setattr(wan_peers, "why_not", can_be_run)
    row = wan.run_cell(WanCell("hivemind", "uniform8bit", 100, 0, MILLION))
    assert row["failed"].startswith(f"hivemind: l0 ended with code 1: {OFF}; its log: /")
    assert "Traceback" not in row["failed"] and "\n" not in row["failed"]
    assert "Traceback" in Path(row["failed"].rpartition(" ")[2]).read_text()


class FailingSystem:
    """One whose member exchanges once and then ends with a traceback."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    def start_coordinator(self, start_step: int) -> None:
        pass

    def start_member(self, rank: int, start_step: int) -> None:
        self.processes.start_command(f"member-{rank}", sys.executable, "-c", SCRIPT)

    def release(self) -> None:
        pass

    def exchanges(self) -> list[PeerExchange]:
        return [PeerExchange(time.time(), 1, 2)]

    def finished(self, rank: int) -> bool:
        return False

    def loss(self) -> float | None:
        return None


def test_a_peer_that_fails_in_training_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def system_of(_name: str, _plan: PeerPlan, processes: Processes) -> FailingSystem:
        return FailingSystem(processes)

    monkeypatch.setattr(peer_run, "system_of", system_of)
    plan = PeerPlan(members=2, steps=100, sync_steps=20, preset="nano", step_wait_s=0.0)
    row = run_event("hivemind", plan, "none")
    assert re.match(rf"hivemind: member-[01] ended: {re.escape(OFF)}; its log: /", row["note"])
    assert "Traceback" in Path(row["note"].rpartition(" ")[2]).read_text()
