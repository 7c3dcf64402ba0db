"""The bench of other systems: what it reads out of a run, and what it does without them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from narrows.bench.kit.loopback import Loopback
from narrows.bench.kit.processes import Processes
from narrows.bench.kit.rows import read_rows
from narrows.bench.peers import bench as peers
from narrows.bench.peers.envs import PeerAbsent
from narrows.bench.peers.member import START, training_of
from narrows.bench.peers.run import EVENTS, PeerStory, judged
from narrows.bench.peers.systems import COORDINATOR, Ours, PeerExchange, PeerPlan, Scripted
from narrows.proto.errors import ConfigError

PLAN = PeerPlan(members=2, steps=100, sync_steps=20, preset="nano", step_wait_s=0.0)
MEASURED: dict[str, Any] = {
    "loss": 2.0,
    "bytes": 1000,
    "bytes_isolated": True,
    "seconds": 3.0,
    "went_on": None,
    "note": "[/closing] is no markup",
}


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted("ddp", PLAN, Processes(tmp_path), Path(sys.executable))


def tell(path: Path, *records: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_an_exchange_that_all_members_tell_counts_once(scripted: Scripted) -> None:
    folder = scripted.processes.folder
    assert scripted.exchanges() == []
    tell(folder / "member-0.jsonl", {"time_s": 2.0, "step": 20, "members": 2})
    tell(
        folder / "member-1.jsonl",
        {"time_s": 1.0, "step": 20, "members": 2},
        {"time_s": 3.0, "step": 40, "members": 1},
    )
    assert scripted.exchanges() == [PeerExchange(1.0, 20, 2), PeerExchange(3.0, 40, 1)]
    tell(folder / f"{COORDINATOR}.jsonl", {"time_s": 4.0, "step": 60, "members": 2})
    assert scripted.exchanges() == [PeerExchange(4.0, 60, 2)]


def test_the_loss_is_the_coordinators_or_the_mean(scripted: Scripted) -> None:
    folder = scripted.processes.folder
    assert scripted.loss() is None and not scripted.finished(0)
    for rank, loss in enumerate((2.0, 3.0)):
        tell(folder / f"member-{rank}.json", {"steps": 100, "loss": loss})
    assert scripted.loss() == 2.5 and scripted.finished(1)
    tell(folder / f"{COORDINATOR}.json", {"steps": 100, "loss": 1.0})
    assert scripted.loss() == 1.0


def test_nobody_begins_before_all_are_ready(scripted: Scripted) -> None:
    folder = scripted.processes.folder
    for name in (COORDINATOR, "member-0"):
        scripted.processes.start_command(name, sys.executable, "-c", "")
    (folder / "member-0.ready").touch()
    scripted.release()
    assert not (folder / START).exists()
    (folder / f"{COORDINATOR}.ready").touch()
    scripted.release()
    assert (folder / START).exists()
    scripted.processes.stop_all()


def test_our_exchanges_are_the_brokers_merges(tmp_path: Path) -> None:
    tell(
        tmp_path / "broker.jsonl",
        {"time_s": 1.0, "event": "note", "text": ""},
        {
            "time_s": 2.0,
            "event": "merged",
            "run_tokens": 7 * PLAN.step_tokens + 1,
            "contributors": ["learner-0"],
        },
    )
    assert Ours(PLAN, Processes(tmp_path)).exchanges() == [PeerExchange(2.0, 7, 1)]


def test_an_undisturbed_run_has_nothing_to_recover_from() -> None:
    row = judged([PeerExchange(1.0, 20, 2), PeerExchange(3.5, 100, 2)], 2, "none", PeerStory())
    assert row["seconds"] == 2.5 and row["steps_done"] == 100 and row["went_on"] is None


def test_an_exchange_under_way_is_no_recovery() -> None:
    before = [PeerExchange(1.0, 20, 2), PeerExchange(10.1, 40, 2)]
    row = judged(before, 2, "member_killed", PeerStory(killed_s=10.0))
    assert row["went_on"] is False and row["recovered_after_s"] is None
    alone = [*before, PeerExchange(12.0, 60, 1), PeerExchange(14.0, 80, 1)]
    row = judged(alone, 2, "member_killed", PeerStory(killed_s=10.0, returned_s=13.0))
    assert row["went_on"] and row["recovered_after_s"] == 2.0
    assert row["longest_pause_s"] == 2.0 and row["rejoined_after_s"] is None
    row = judged(
        [*alone, PeerExchange(17.0, 100, 2)],
        2,
        "member_killed",
        PeerStory(killed_s=10.0, returned_s=13.0),
    )
    assert row["rejoined_after_s"] == 7.0 and row["longest_pause_s"] == 3.0


def test_after_the_coordinator_any_exchange_counts() -> None:
    story = PeerStory(killed_s=10.0, returned_s=13.0)
    exchanges = [PeerExchange(1.0, 20, 2), PeerExchange(10.5, 40, 2), PeerExchange(15.0, 60, 2)]
    row = judged(exchanges, 2, "coordinator_killed", story)
    assert row["recovered_after_s"] == 0.5 and row["rejoined_after_s"] == 5.0


def test_a_pause_until_a_run_is_given_up_is_one() -> None:
    exchanges = [PeerExchange(1.0, 20, 2), PeerExchange(12.0, 40, 1)]
    story = PeerStory(killed_s=10.0, returned_s=13.0, gave_up="no exchange", gave_up_s=57.0)
    row = judged(exchanges, 2, "member_killed", story)
    assert row["went_on"] and row["recovered_after_s"] == 2.0 and row["longest_pause_s"] == 45.0
    row = judged(exchanges[:1], 2, "coordinator_killed", story)
    assert row["went_on"] is False and row["longest_pause_s"] == 47.0


def test_rows_are_kept_and_absent_systems_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[str, str]] = []

    def run(name: str, plan: PeerPlan, event: str) -> dict[str, Any]:
        if name == "hivemind":
            raise PeerAbsent(name, "no wheel", remedy="none")
        runs.append((name, event))
        return MEASURED

    monkeypatch.setattr(peers, "run_event", run)
    rows_file, json_file = tmp_path / "rows.jsonl", tmp_path / "peers.json"
    for _ in range(2):
        peers.run_peers_bench(rows_file, json_file, PLAN, systems=["narrows", "hivemind"])
    assert runs == [("narrows", event) for event in EVENTS]
    assert len(read_rows(rows_file)) == 3
    result = json.loads(json_file.read_text())
    assert result["bench"] == "peers" and len(result["rows"]) == 6
    skipped = [row for row in result["rows"] if "skipped" in row]
    assert {row["system"] for row in skipped} == {"hivemind"}
    assert all("no wheel" in row["skipped"] for row in skipped)
    assert "skipped: config: no environment for hivemind" in capsys.readouterr().out


def test_an_unknown_system_is_refused() -> None:
    assert peers.chosen([]) == peers.SYSTEMS
    with pytest.raises(ConfigError, match="did you mean torchft"):
        peers.chosen(["narrows", "torchfft"])


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 1},
        {"steps": 0},
        {"sync_steps": 0},
        {"sync_steps": 30},
        {"step_wait_s": -1.0},
        {"preset": "huge"},
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        peers.run_peers_bench(tmp_path / "rows", None, replace(PLAN, **changes), systems=["ddp"])


def test_versions_are_the_pins() -> None:
    assert peers.version_of("torchft") and not peers.version_of("ddp")


def test_a_script_is_told_its_training(tmp_path: Path) -> None:
    arguments = "--rank 1 --world 2 --host 127.0.0.1 --port 7 --preset nano --steps 100".split()
    arguments += "--sync-steps 20 --start-step 40 --step-wait-s 0.5 --folder".split()
    training = training_of([*arguments, str(tmp_path)])
    assert (training.name, training.start_step, training.step_wait_s) == ("member-1", 40, 0.5)
    assert training_of([*arguments, str(tmp_path), "--coordinator"]).name == COORDINATOR
    assert {"steps", "sync_steps", "preset"} <= asdict(training).keys() & asdict(PLAN).keys()


def test_loopback_counts_bytes() -> None:
    assert Loopback().carried_bytes() >= 0 and Loopback().prefix == ()
    assert Loopback("x").prefix == ("ip", "netns", "exec", "x")


def test_a_member_dies_with_all_its_processes(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    inner = (
        f"import os, signal; open({str(told)!r}, 'w').write(f'{{os.getpid()}} '); signal.pause()"
    )
    outer = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    with Processes(tmp_path, prefix=("env",), groups=True) as processes:
        processes.start_command("member", sys.executable, "-c", f"{outer}; signal.pause()")
        while not (told.exists() and told.read_text().endswith(" ")):
            processes.check("member")
        processes.kill("member")
        while alive(int(told.read_text())):
            pass


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
