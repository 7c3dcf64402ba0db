"""The lab and the benches on it, with real processes: small, but every part of it runs. Needs root.

What a line does at most is the kernel's promise and can be asserted; what it reaches is not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from narrows.bench.lab import Lab
from narrows.bench.wan import run_cell
from narrows.bench.wan_cells import Cell
from narrows.bench.wan_training import TrainingCell
from narrows.bench.wan_training import run_cell as run_training_cell

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
CELL = Cell("narrows", "int4-zstd", 50, 0, 1 << 16, streams=2, exchanges=3)


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


def test_no_namespace_is_left_behind_by_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), Lab(1, 1e6) as lab:
        assert lab.hub.namespace in _namespaces()
        raise ZeroDivisionError
    assert lab.hub.namespace not in _namespaces()


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "cell",
    [CELL, replace(CELL, round_trip_ms=10, window_bytes=1 << 16, variant="raw32")],
    ids=["line", "proxy"],
)
def test_a_cell_of_ours(cell: Cell) -> None:
    row = run_cell(cell)
    assert len(row["exchange_s"]) == 3 and row["exchange_s_median"] > 0, row
    bits = 8 * row["up_wire_bytes_per_exchange"] / cell.params
    assert (32 if cell.variant == "raw32" else 2.5) < bits, row


def test_a_system_without_environment_is_skipped_with_the_reason() -> None:
    row = run_cell(Cell("torchft", "f32", 50, 10, 1 << 16))
    assert "proxy" in row["skipped"]


@pytest.mark.parametrize("system", ["narrows", "ddp f32", "ddp bf16"])
def test_training_on_a_line(system: str) -> None:
    row = run_training_cell(TrainingCell(system, 100, "nano", seconds=2))
    assert row["steps"] > 0 and row["tokens_per_s"] > 0, row
    assert row["validation_loss"] < 6
