"""The last inputs of both machines: played again they lead to the same decisions."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_cases import Narrows
from desk import LAYOUT, running

from narrows.bench.sim.run import Draw, Simulation
from narrows.broker.config import load_broker
from narrows.broker.process.host import Host
from narrows.broker.process.service import Service
from narrows.broker.records import NotFinite
from narrows.broker.syncer import events as ev
from narrows.learner.host import LearnerHost
from narrows.learner.link import Link
from narrows.learner.site import JoinTarget

SEED = 2
"""A run with kills of the broker, and with exceptions out of the exchange."""


def test_lives_with_kills_and_interrupted_exchanges_are_played_again(
    narrows: Narrows, tmp_path: Path
) -> None:
    parts: list[object] = []
    Simulation(Draw(SEED), tmp_path / "run", parts.append).finish()
    recorders = [part.syncer.recorder for part in parts if isinstance(part, Host)]
    recorders += [part.session.recorder for part in parts if isinstance(part, LearnerHost)]
    for recorder in recorders:
        (tmp_path / "inputs").write_bytes(recorder.text())
        assert narrows.run("debug", "replay", str(tmp_path / "inputs")) == 0
        assert "Not played" not in narrows.out


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        (b"\n", b"\n", 0, "merge_failed"),
        (b'"lost":0', b'"lost":3', 0, "Not played"),
        (b'"tokens":1000', b'"tokens":1001', 1, "the recorded decisions"),
        (b'"lost":0}', b'"lost":0', 1, "the lines that this version"),
        (b'"machine":"syncer"', b'"machine":"os"', 1, "the lines that this version"),
        (b'["done"', b'["__init__"', 1, "the lines that this version"),
        (b'["done",[{"type":"Seed"', b'["done",[{"type":"os"', 1, "the lines that this version"),
        (b'"clock":0', b'"clock":"0"', 1, "the lines that this version"),
    ],
)
def test_a_file_that_was_changed_is_refused(
    narrows: Narrows, tmp_path: Path, old: bytes, new: bytes, code: int, said: str
) -> None:
    desk = running("a")
    desk.commits = False
    desk.to_launch("a")
    desk.push("a", 0, 1)
    (merge,) = desk.take(ev.MergeRound)
    desk.do(desk.syncer.failed, merge, NotFinite("inf", *merge.round_.contributions))
    text = desk.syncer.recorder.text()
    assert old in text
    (tmp_path / "inputs").write_bytes(text.replace(old, new, 1))
    assert narrows.run("debug", "replay", str(tmp_path / "inputs")) == code
    assert said in narrows.out + narrows.err


def test_the_last_inputs_are_printed_and_all_are_played(narrows: Narrows, tmp_path: Path) -> None:
    """Holds `replay`."""
    desk = running("a")
    text = desk.syncer.recorder.text()
    (tmp_path / "inputs").write_bytes(text)
    assert narrows.run("debug", "replay", str(tmp_path / "inputs"), "--last", "1") == 0
    inputs = sum(len(json.loads(line)) > 1 for line in text.splitlines()[1:])
    printed = [line for line in narrows.out.splitlines() if not line.startswith("  ")]
    assert [line.split()[0] for line in printed] == [str(inputs), "Inputs"]
    assert narrows.run("debug", "replay", str(tmp_path / "none")) == 2
    assert "none" in narrows.err and "the log" in narrows.err


def test_an_assertion_in_a_running_machine_leaves_the_file(
    narrows: Narrows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Service.run` and `Link._run`."""
    flags = {"broker.listen": "tcp://127.0.0.1:0", "broker.state_dir": str(tmp_path)}
    service = Service(load_broker(None, flags), events=None)
    monkeypatch.setattr(service, "_turn", lambda: service.host.syncer.done(ev.Commit(0), 1.0))
    with pytest.raises(AssertionError):
        service.run()
    target = JoinTarget("tcp://127.0.0.1:7070", "a/0")
    link = Link(target, LAYOUT, Mock(), events=tmp_path / "events.jsonl")
    monkeypatch.setattr(link, "_is_open", True)
    monkeypatch.setattr(link, "_turn", lambda: link.host.session.encoded(7, 1, 1.0))
    link._run()
    for name in ("inputs-syncer.jsonl", "inputs-a-0.*.jsonl"):
        (file,) = tmp_path.glob(name)
        assert narrows.run("debug", "replay", str(file)) == 0
        assert "raised" in narrows.out
