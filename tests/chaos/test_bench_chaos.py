"""`narrows bench chaos` with real processes: every kind of fault, nothing lost, nobody left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import HANG_S, wait_until

from narrows.bench.chaos.bench import run_chaos_bench
from narrows.bench.chaos.run import ChaosOptions
from narrows.bench.kit.nursery import Nursery

pytestmark = pytest.mark.slow


def test_faults_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chaos.json"
    options = ChaosOptions(
        learners=4,
        seconds=10.0,
        fault_every_s=2.0,
        down_max_s=2.0,
        broker_kills=1,
        step_s=0.05,
        params=1 << 14,
        keep=tmp_path / "run",
        json=path,
    )
    run_chaos_bench(options)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["learners"], row["faults"], row["broker_kills"]) == (4, 6, 1)
    assert min(row["kills"], row["stops"], row["cuts"]) >= 1
    assert row["digests_compared"] > 100
    assert row["digests_different"] == row["versions_lost"] == 0
    assert row["ledger_ok"] and row["replay_equal"] and row["problems"] == []
    assert 0 < row["throughput_kept_percent"] and row["rejoin_median_s"] is not None
    assert row["tokens_merged_per_s"] > 0
    assert "throughput kept" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_behind(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "narrows", "bench", "chaos", "--learners", "2", "--keep", str(folder),
        "--seconds", "600", "--fault-every", "1s", "--step", "20ms", "--params", "16384",
    ]  # fmt: skip
    with (tmp_path / "output").open("wb") as output:
        bench = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: (folder / "learner-01.life").exists(), "the learners")
        assert len(mentioning(folder)) >= 3
        bench.send_signal(number)
        assert bench.wait(HANG_S) == 130
    finally:
        bench.kill()
    assert mentioning(folder) == []


def test_a_nursery_starts_signals_and_ends_its_children(tmp_path: Path) -> None:
    arguments = (str(tmp_path), str(1 << 14), "0.05")
    with Nursery(tmp_path, "narrows.bench.chaos.learner", *arguments) as nursery:
        # Nobody listens there: they wait to join.
        for name in ("a", "b", "c"):
            nursery.start(name, "tcp://127.0.0.1:1")
        wait_until(lambda: (tmp_path / "c.life").exists(), "the children")
        nursery.signal("a", signal.SIGSTOP)
        nursery.signal("b", signal.SIGKILL)

        def ended() -> bool:
            nursery.look()
            return bool(nursery.ended)

        wait_until(ended, "the end of a child")
        assert nursery.ended == [("b", -signal.SIGKILL)]
        assert nursery.running == {"a", "c"}
        nursery.start("b", "tcp://127.0.0.1:1")
        assert nursery.running == {"a", "b", "c"}
        pids = children(nursery.pid)
        assert len(pids) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int) -> list[int]:
    """Processes whose parent this is."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def mentioning(folder: Path) -> list[str]:
    """Processes with this folder in their command line."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text().replace("\0", " "):
                found.append(path.parent.name)
        except OSError:
            continue  # It has ended.
    return found
