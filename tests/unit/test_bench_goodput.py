"""The goodput bench: real machines beside the stall model, rows, resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from narrows.bench.goodput import bench as goodput
from narrows.bench.goodput.bench import agreement, run_goodput_bench, set_relative_times
from narrows.bench.goodput.cells import GoodputCell, sweeps, table
from narrows.bench.goodput.machines import STEP_S, MachinePlan, PlannedRun
from narrows.bench.goodput.run import plans_of, run_cell
from narrows.bench.goodput.stall_model import NEVER, full_course
from narrows.bench.kit import runner as jobs
from narrows.bench.kit.rows import read_rows

SPAN_S = 4000.0
EDGES_S = np.array([0.0, SPAN_S])
FREE = MachinePlan(full_course(SPAN_S, NEVER))


def played(plans: Sequence[MachinePlan]) -> PlannedRun:
    run = PlannedRun(plans, SPAN_S, 1, {})
    run.play()
    return run


def test_the_machines_agree_with_the_stall_model() -> None:
    row = run_cell(GoodputCell("decoupled", 2, 600_000, 20_000.0), 1)
    half = row["goodput_percent"] - row["ci_low_percent"]
    assert 0.05 < half < 3
    assert abs(row["goodput_percent"] - row["tape_model_goodput_percent"]) < half
    half = row["uptime_percent"] - row["uptime_ci_low_percent"]
    assert abs(row["uptime_percent"] - row["tape_model_uptime_percent"]) < half
    assert row["fit_low_percent"] < row["month_model_goodput_percent"] < row["fit_high_percent"]
    assert row["month_model_ci_low_percent"] < row["month_model_goodput_percent"]


def test_without_failures_the_machines_lose_nothing() -> None:
    run = played([FREE] * 3)
    assert run.goodput(EDGES_S) == pytest.approx([1.0], abs=0.01)
    assert run.uptime(EDGES_S) == pytest.approx([1.0], abs=0.005)
    assert {len(commit.contributors) for commit in run.commits} == {3}
    assert 0.8 < run.merged_share() < 1
    assert run.longest_gap_s() < 5 * STEP_S


def test_a_step_takes_its_time_of_training_however_long_the_stalls() -> None:
    spans_s = np.array([[100.0, 105.0], [500.0, 1500.0], [1510.0, 2000.0]])
    stalling = MachinePlan(full_course(SPAN_S, spans_s))
    run = played([stalling, FREE])
    steps = run.steps["learner-00"]
    inside = [(begin_s, end_s) for begin_s, end_s, _ in steps if 0 < begin_s and end_s < SPAN_S]
    trained_s = np.diff(stalling.course.up_s(np.array(inside)), axis=1)
    assert trained_s.min() > 0.89 * STEP_S and trained_s.max() < 1.11 * STEP_S
    assert run.goodput(EDGES_S) == pytest.approx([1 - 1495 / 2 / SPAN_S], abs=0.01)
    measured = run.measured_course("learner-00").up_s(EDGES_S)[1]
    assert measured == pytest.approx(SPAN_S - 1495, abs=5)
    assert run.contributions()["learner-00"] < run.contributions()["learner-01"]


def test_an_absent_learner_makes_no_steps_and_only_a_lent_one_costs_nothing() -> None:
    absent_s = np.array([[1000.0, 2000.0]])
    for lent, share in ((False, 7 / 8), (True, 1.0)):
        run = played([FREE, MachinePlan(FREE.course, absent_s, lent=lent)])
        times_s = np.array([end_s for _, end_s, _ in run.steps["learner-01"]])
        assert not ((times_s > 1000) & (times_s < 2000)).any()
        assert ((times_s > 2000) & (times_s < 2100)).any()  # It is back soon.
        assert run.goodput(EDGES_S) == pytest.approx([share], abs=0.02)


def test_who_warms_up_after_a_restart_does_not_contribute() -> None:
    absent_s = np.array([[1000.0, 1100.0]])
    first, later = (
        played([FREE, MachinePlan(FREE.course, absent_s, ramp_steps=ramp)]).contributions()[
            "learner-01"
        ]
        for ramp in (0, 60)
    )
    assert 0 < later < first - 10


def test_every_published_cell_and_no_sweep_claims_to_be_one() -> None:
    cells = table(1e5)
    assert len(cells) == len({cell.place for cell in cells}) == 6 * 5
    assert {cell.method for cell in sweeps()} == {"sweep"}
    assert {cell.sweep for cell in sweeps()} == {
        "quorum", "restart", "step", "speeds", "scavenging",
    }  # fmt: skip
    assert all(plans_of(replace(cell, span_s=SPAN_S), 1) for cell in sweeps())


def test_distances_by_hand() -> None:
    rows = [
        {"method": method, "learners": m, "goodput_percent": ours, "published_percent": theirs}
        for method, m, ours, theirs in (
            ("data_parallel", 1, 50.0, 52.0), ("decoupled", 4, 94.0, 93.0),
            ("decoupled", 8, 97.0, 94.0), ("decoupled", 2, 80.0, 80.5),
        )
    ]  # fmt: skip
    found = {each.pop("cells_of"): tuple(each.values()) for each in agreement(rows)}
    assert found == {
        "data parallel, fitted": (1, 2, 2),
        "decoupled, fitted": (2, 2, 3),
        "decoupled, M = 2, predicted": (1, 0.5, 0.5),
        "decoupled, all": (3, 1.5, 3),
    }


def test_relative_times() -> None:
    rows = [{"sweep": "scavenging", "added": a, "goal_s": 100.0 - 5 * a} for a in (0, 2)]
    rows.append({"sweep": "", "added": 0, "goal_s": 7.0})
    set_relative_times(rows)
    assert [row.get("relative_time") for row in rows] == [1.0, 0.9, None]
    assert rows[1]["published_relative_time"] == 0.83


class Threads(ThreadPoolExecutor):
    """Workers that start at once and see what a test has patched."""

    def __init__(self, workers: int, **_: object) -> None:
        super().__init__(workers)


def test_rows_pictures_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        GoodputCell("data_parallel", 1, 150_000, SPAN_S),
        GoodputCell("elastic", 1, 150_000, SPAN_S),
        GoodputCell("decoupled", 2, 150_000, SPAN_S),
    ]
    varied = [replace(cell, span_s=SPAN_S) for cell in sweeps() if cell.learners == 4][:2]
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Threads)

    def tiny(machines_s: float) -> list[GoodputCell]:
        return small

    monkeypatch.setattr(goodput, "table", tiny)
    monkeypatch.setattr(goodput, "sweeps", lambda: varied)
    rows_file, json_file = tmp_path / "rows.jsonl", tmp_path / "goodput.json"
    run_goodput_bench(rows_file, json_file, tmp_path / "g.svg", full=False, short=False, workers=1)
    assert len(read_rows(rows_file)) == 5
    result = json.loads(json_file.read_text())
    assert result["bench"] == "goodput" and "machine" in result
    rows = result["rows"]
    assert [row["method"] for row in rows] == [
        "data_parallel", "elastic", "decoupled", "sweep", "sweep",
    ]  # fmt: skip
    for row in rows:
        assert {"learners", "chips", "goodput_percent", "uptime_percent"} < set(row)
        assert row["ci_low_percent"] <= row["goodput_percent"] <= row["ci_high_percent"]
        assert row["uptime_ci_low_percent"] <= row["uptime_percent"] <= 100.5
    assert [row["published_percent"] for row in rows[:3]] == [72, 88, 94]
    distances = {each["cells_of"]: each["cells"] for each in result["agreement"]}
    assert distances == {
        "data parallel, fitted": 1, "elastic, fitted": 1,
        "decoupled, M = 2, predicted": 1, "decoupled, all": 1,
    }  # fmt: skip
    for name in ("g.svg", "g-time-lines.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")
    assert "M = 2" in capsys.readouterr().out

    def run_again(cell: GoodputCell, seed: int) -> None:
        pytest.fail(f"{cell} is in the file already")

    monkeypatch.setattr(goodput, "run_cell", run_again)
    run_goodput_bench(rows_file, None, None, full=False, short=False, workers=1)
    assert len(read_rows(rows_file)) == 5
