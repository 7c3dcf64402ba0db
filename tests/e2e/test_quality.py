"""The quality bench beside the system that it simulates: the same cell with real processes; and a
bench that a signal ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from bench_process import BenchProcess
from running import HANG_S, wait_until
from safetensors.torch import load_file

from narrows.bench.kit.processes import Processes
from narrows.bench.kit.rows import read_rows
from narrows.bench.quality.run import QualityCell, learner_name, losses_of, run_cell
from narrows.learner.reference.gpt import GPT, preset

pytestmark = pytest.mark.slow

CELL = QualityCell("modes", "decoupled", learners=2, steps=600)

TOLERANCE = 0.05
"""Real processes are as late as the machine is busy, the simulated ones by rule: one seed of such
a run differs from the next by 1 to 3%."""


def test_the_simulation_reaches_the_loss_of_real_processes(tmp_path: Path) -> None:
    simulated = run_cell(CELL, seed=0)
    run = CELL.config().run
    with Processes(tmp_path) as processes:
        address = processes.start_broker(
            "--listen", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path / "state"),
            "--goal-tokens", str(run.goal_tokens),
            "--set", f"run.tokens_per_run_step={run.tokens_per_run_step}",
            "--set", f"run.learners_at_start={CELL.learners}",
        )  # fmt: skip
        names = [learner_name(i) for i in range(CELL.learners)]
        for name in names:
            processes.start(
                name, "learner", "--broker", address, "--name", name, "--preset", CELL.model
            )
        for name in (*names, "broker"):
            assert processes.wait(name, 4 * HANG_S) == 0, processes.tail(name, 20)
        file = tmp_path / "model.safetensors"
        processes.start("export", "export", str(tmp_path / "state"), "--to", str(file))
        assert processes.wait("export", HANG_S) == 0, processes.tail("export", 20)
    model = GPT(preset(CELL.model))
    # Tied weights travel under one name only.
    model.load_state_dict(load_file(file), strict=False)
    validation, test = losses_of(model)
    assert validation == pytest.approx(simulated["validation_loss"], rel=TOLERANCE)
    assert test == pytest.approx(simulated["test_loss"], rel=TOLERANCE)


def test_sigterm_ends_the_jobs_and_keeps_what_is_done(tmp_path: Path) -> None:
    rows, script = tmp_path / "rows.jsonl", Path(__file__).with_name("endless_quality.py")
    command = ("bench", "quality", "--short", "--workers", "2", "--rows", str(rows))
    with BenchProcess(tmp_path, sys.executable, str(script), *command) as bench:
        under_way = bench.temporary.glob
        wait_until(lambda: len([*under_way("endless-*")]) == 2 and read_rows(rows), "the jobs")
        done = rows.read_bytes()
        bench.interrupt(signal.SIGTERM)
        assert "rows.jsonl keeps what is done; the same command goes on" in bench.output
    assert rows.read_bytes() == done and len(read_rows(rows)) == 1
