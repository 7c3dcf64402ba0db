"""The lab and the benches on it, with real processes: small, but every part of it runs. Needs root.

What a line does at most is the kernel's promise and can be asserted; what it reaches is not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from select import select

import pytest
from bench_process import BenchProcess
from running import HANG_S, wait_until

from narrows.bench.kit.lab import PREFIX, Lab, remove_leftovers
from narrows.bench.kit.rows import read_rows
from narrows.bench.wan.bench import run_cell
from narrows.bench.wan.cells import WanCell
from narrows.bench.wan.training import TrainingCell
from narrows.bench.wan.training import run_cell as run_training_cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("tc") is None, reason="the lab needs root and iproute2"
    ),
]

SIZE = 2_000_000
SERVER = """
import socket
with socket.create_server(("10.77.0.1", 9000)) as listener:
    print("listens", flush=True)
    end, _ = listener.accept()
    size = 0
    while data := end.recv(1 << 16):
        size += len(data)
    print(size, flush=True)
"""
CLIENT = f"""
import socket
with socket.create_connection(("10.77.0.1", 9000)) as end:
    end.sendall(bytes({SIZE}))
"""
INSIDE = ("sh", "-c", "echo inside; exec cat")
"""Lives as long as its input."""

OWNER = f"""
import subprocess, sys
from narrows.bench.kit.lab import Lab
with Lab(1, 0) as lab:
    subprocess.Popen([*lab.learners[0].under, *{INSIDE}])
    sys.stdin.read()
"""
CELL = WanCell("narrows", "int4-zstd", 50, 0, 1 << 16, streams=2, exchanges=3)


def test_a_link_holds_its_rate_and_counts_whole_frames() -> None:
    rate = 10e6
    with Lab(2, rate) as lab:
        command = [*lab.hub.under, sys.executable, "-c", SERVER]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            with lab.meter() as meter:
                subprocess.run([*lab.learners[0].under, sys.executable, "-c", CLIENT], check=True)
                assert server.stdout.readline() == f"{SIZE}\n"
    up, other = meter.rates("l0", "up"), meter.rates("l1", "up")
    assert SIZE * 1500 / 1448 < up.wire_bytes < 1.1 * SIZE
    assert up.windows_bits_per_s and up.peak_bits_per_s <= 1.02 * rate
    assert meter.rates("hub", "down").wire_bytes >= up.wire_bytes - 20_000
    assert other.wire_bytes < 20_000


def test_nothing_is_left_behind_by_a_failure() -> None:
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError), Lab(1, 1e6) as lab:
        assert lab.hub.namespace in _namespaces()
        command = [*lab.hub.under, *INSIDE]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == b"inside\n"
        raise ZeroDivisionError
    assert lab.hub.namespace not in _namespaces()
    with started[0] as child:
        assert child.wait(HANG_S) == -signal.SIGKILL


def test_what_a_killed_bench_left_is_ended_by_the_next_one() -> None:
    # Both share the pipes: they end when we close the one, the other closes when both have ended.
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"inside\n"
        owners = f"{PREFIX}-{owner.pid}-"
        remove_leftovers()
        assert _namespaces().count(owners) == 3, "of a living one"
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # It stays as a zombie.
        assert _namespaces().count(owners) == 3
        with Lab(1, 0):
            assert owners not in _namespaces()
            ended, _, _ = select([owner.stdout], [], [], HANG_S)
            assert ended and owner.stdout.read() == b""


def test_sigterm_ends_the_line_and_keeps_what_is_done(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = ("-m", "narrows", "bench", "wan", "--short", "--rows", str(rows))
    with BenchProcess(tmp_path, sys.executable, *command) as bench:
        wait_until(lambda: read_rows(rows), "the first cell")

        def all_started() -> bool:
            """The probe is the last one, and at its site: `ip` has become Python."""
            commands = bench.running().values()
            return any("narrows.bench.kit.probe" in each and each[0] != "ip" for each in commands)

        wait_until(all_started, "the exchanges of the second cell")
        assert len(bench.running()) >= 5 and f"{PREFIX}-{bench.pid}-" in _namespaces()
        done = rows.read_bytes()
        bench.interrupt(signal.SIGTERM)
        assert "rows.jsonl keeps what is done; the same command goes on" in bench.output
    assert f"{PREFIX}-{bench.pid}-" not in _namespaces()
    assert list(bench.temporary.iterdir()) == []
    assert rows.read_bytes() == done and len(read_rows(rows)) == 1


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "cell",
    [CELL, replace(CELL, round_trip_ms=10, window_bytes=1 << 16, variant="raw32")],
    ids=["line", "proxy"],
)
def test_a_cell_of_ours(cell: WanCell) -> None:
    row = run_cell(cell)
    assert len(row["exchange_s"]) == 3 and row["exchange_s_median"] > 0, row
    bits = 8 * row["up_wire_bytes_per_exchange"] / cell.params
    assert (32 if cell.variant == "raw32" else 2.5) < bits, row


def test_a_system_without_environment_is_skipped_with_the_reason() -> None:
    row = run_cell(WanCell("torchft", "f32", 50, 10, 1 << 16))
    assert "proxy" in row["skipped"]


@pytest.mark.parametrize("system", ["narrows", "ddp f32", "ddp bf16"])
def test_training_on_a_line(system: str) -> None:
    row = run_training_cell(TrainingCell(system, 100, "nano", seconds=2))
    assert row["steps"] > 0 and row["tokens_per_s"] > 0, row
    assert row["validation_loss"] < 6
