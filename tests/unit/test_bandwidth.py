"""The bandwidth model against the published table and headline, one claim per test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from narrows.bench.bandwidth import published
from narrows.bench.bandwidth.bench import (
    BandwidthRow,
    headline_rows,
    run_bandwidth_bench,
    table_rows,
)
from narrows.bench.bandwidth.model import (
    GRID_GBPS,
    METHODS,
    SETUPS,
    Method,
    Setup,
    compute_utilization,
    data_parallel_gbps,
    decoupled_gbps,
    nearest_index,
    reaching,
)
from narrows.bench.bandwidth.wire import WireRow

ONE_STEP_BELOW = {
    ("1B", "overlap", 95),
    ("1B", "overlap_fp4", 50),
    ("10B", "overlap", 50),
    ("10B", "overlap_fp4", 90),
}
"""Cells in which the model prints the grid point below the published one."""


@pytest.fixture(scope="module")
def rows() -> list[BandwidthRow]:
    return table_rows()


def test_published_cells_are_on_the_authors_grid() -> None:
    for cells in published.TABLE.values():
        for gbps in cells:
            # One decimal is printed: 0.9 stands for 0.954, 0.4 for 0.373.
            assert GRID_GBPS[nearest_index(gbps)] == pytest.approx(gbps, abs=0.06)


def test_46_of_the_50_known_cells_are_the_model_s_grid_point(rows: list[BandwidthRow]) -> None:
    known = [row for row in rows if row.gbps_published is not None]
    assert len(known) == 50
    for row in known:
        cell = (row.model, row.method, row.compute_utilization_percent)
        assert row.grid_steps_off == (-1 if cell in ONE_STEP_BELOW else 0), cell


def test_the_rows_of_100b_are_predicted(rows: list[BandwidthRow]) -> None:
    mine = [row for row in rows if row.params == 10**11]
    assert {row.method for row in mine} == {method.name for method in METHODS}
    assert len(mine) == len(METHODS) * len(published.TARGETS_PERCENT)
    assert all(row.gbps_published is None and row.grid_steps_off is None for row in mine)


def test_fragments_are_three_layers_and_as_far_apart_as_published() -> None:
    assert [setup.fragments for setup in SETUPS] == [8, 16, 36]
    assert [setup.spacing_steps for setup in SETUPS] == [11, 5, 2]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_more_bandwidth_never_computes_less(method: Method) -> None:
    utilization = compute_utilization(SETUPS[0], method, GRID_GBPS)
    assert np.all(np.diff(utilization) >= 0)
    assert np.all(utilization > 0)
    assert np.all(utilization <= 1 + 1e-12)


def test_a_line_without_end_leaves_no_stall() -> None:
    for method in METHODS:
        assert compute_utilization(SETUPS[0], method, np.array([1e12]))[0] == pytest.approx(1.0)


def test_a_thin_line_is_all_that_counts() -> None:
    """At 1 kbit/s a period takes what its bits take: 16 per parameter once per H in DiLoCo."""
    setup = Setup("toy", 1e6, 3, 0.01)
    share = compute_utilization(setup, Method("diloco"), np.array([1e-6]))[0]
    assert share == pytest.approx(100 * 0.01 * 8 / 9 / (16e6 / 1e3), rel=1e-3)


def test_a_step_of_three_layers_by_hand() -> None:
    """Data parallel: the time that its last all-reduces leave uncovered."""
    setup = Setup("toy", 1e9, 3, 0.9)
    share = compute_utilization(setup, Method("data_parallel"), np.array([48.0]))[0]
    # Operations of 0.1 s, layers of 1/9 s on the wire. The gradient of the second layer is there
    # 0.1 s before that of the first, which then waits for the channel and takes 1/9 s itself.
    period_s = 0.8 + 1 / 9 + (1 / 9 - 0.1)
    assert share == pytest.approx(0.8 / period_s)


def test_a_target_beyond_the_grid_is_told() -> None:
    assert reaching(np.array([0.1, 0.2]), 50) == 2


def test_the_headline_s_pair_follows_from_one_set_of_assumptions() -> None:
    """5.04B parameters, a step of 1 s, 8 sites, int4, P = H = 24, data parallel at 95%."""
    parallel = data_parallel_gbps(5.04e9, 1.0, 8, 0.95)
    decoupled = decoupled_gbps(5.04e9, 1.0, 24, 4.0)
    assert parallel == pytest.approx(published.HEADLINE_DATA_PARALLEL_GBPS, abs=0.5)
    assert decoupled == pytest.approx(published.HEADLINE_DECOUPLED_GBPS, abs=0.005)


def test_data_parallel_at_full_use_waits_for_its_last_bucket() -> None:
    """At 99.9% the last of 128 buckets is what is left to wait for."""
    gbps = data_parallel_gbps(1e9, 1.0, 2, 0.999)
    assert gbps == pytest.approx(16 / 128 / (1 / 0.999 - 1))


def test_our_headline_takes_the_bits_that_were_measured() -> None:
    row = WireRow("tiny", 800_000, 2, 0.5, "up", 10, 3.1, 2.5, 0, 0)
    ours = [line for line in headline_rows([row]) if line.what == "Narrows, rho 0.5"]
    for line in ours:
        assert line.up_bits_per_param == pytest.approx(2.5 * (1 + 66 / 1448))
        assert line.up_gbps == pytest.approx(
            5 * line.up_bits_per_param / line.sync_period_steps / line.step_s
        )
        assert line.hub_gbps == 8 * max(line.up_gbps, line.down_gbps)


def test_json_has_a_row_per_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bandwidth.json"
    run_bandwidth_bench(path, None, wire=False)
    result = json.loads(path.read_text())
    assert result["bench"] == "bandwidth"
    assert len(result["rows"]) == 75
    assert {"params", "method", "compute_utilization_percent", "gbps"} <= set(result["rows"][0])
    assert result["wire"] == []
    assert "46 of 50" in capsys.readouterr().out
