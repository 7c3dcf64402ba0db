"""The quality bench beside the system that it stands for: the same cell with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import HANG_S
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from narrows.bench.processes import Processes
from narrows.bench.quality_run import Cell, learner_name, losses_of, run_cell
from narrows.learner.gpt import GPT, preset

pytestmark = pytest.mark.slow

CELL = Cell("modes", "decoupled", learners=2, steps=600)

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
