"""The benches that need no processes: codec, goodput, quality with its loop `trained`."""

from dataclasses import replace

import numpy as np
import pytest

from narrows.bench import codec, goodput, quality, quality_cells, trained
from narrows.bench.kit import rows
from narrows.bench.quality_cells import QualityCell
from narrows.proto.errors import ConfigError


def test_a_codec_is_worth_its_bits() -> None:
    """Holds `codec.measure`."""

    def row(data: str, name: str, rho: float | None) -> rows.Row:
        return codec.measure(codec.CodecCell(data, name, rho, 1 << 16))

    gaussian = row("gaussian", "int4-zstd", 0.5)
    assert 0 < gaussian["bits_per_param"] - gaussian["gaussian_bound_bits"] < 0.5
    assert row("gaussian", "absmax int4 by 256", None)["bits_per_param"] == 4 + 32 / 256
    lossless = row("student_t", "f32-blosc2", None)
    assert lossless["snr_db"] is None and 20 < lossless["bits_per_param"] < 32
    recorded = row("recorded", "int8-zstd", 0.25)
    assert recorded["snr_db"] > 20 and 3 < recorded["bits_per_param"] < 5


def test_a_slice_that_leaves_and_returns_stalls_its_job_twice() -> None:
    """Holds `goodput.elastic`."""
    course = goodput.elastic(np.array([[100.0, 200.0], [110.0, 250.0]]), slices=10)
    # Both are taken in at 380 s; the second failure falls into the stall of the first.
    trained_s = 1000 - 2 * goodput.RECONFIGURE_S
    missing_s = 0.2 * (380 - 117.5)
    assert course.useful_s(1000.0) == pytest.approx(trained_s - missing_s)
    assert course.step_s(90.0) == pytest.approx(goodput.STEP_S + goodput.RECONFIGURE_S)
    assert course.share[course.segment(300.0)] == pytest.approx(0.8)
    beside = goodput.elastic(np.array([[110.0, 5000.0]]), slices=10)
    both_s = 117.5 - 110.0  # Only then are both stalled.
    assert goodput.uptime([course, beside], 1000.0) == pytest.approx(1 - both_s / 1000)


def test_a_restarted_job_repeats_what_its_checkpoint_lacks() -> None:
    """Holds `goodput.data_parallel`."""
    at_s = 1000.0 + goodput.CHECKPOINT_S + 7.0
    course = goodput.data_parallel(np.array([[1000.0, 1.0], [1010.0, 1.0], [at_s + 52.0, 1.0]]))
    lost_s = 2 * goodput.RESTART_S + 7.0
    assert course.useful_s(3000.0) == pytest.approx(3000.0 - lost_s)


@pytest.mark.parametrize(("method", "percent"), [("data parallel", 27), ("elastic", 58)])
def test_fitted_costs_give_the_published_cells(method: str, percent: int) -> None:
    """Holds `goodput.measure`."""
    row = goodput.measure(goodput.GoodputCell(method, 1, 1_200_000, days=2.0, steps=0))
    assert row["published_percent"] == percent
    assert row["model_percent"] == pytest.approx(percent, abs=2.5)


def test_hosts_merge_what_the_course_lets_them_train() -> None:
    """Holds `goodput.measure`."""
    cell = goodput.GoodputCell("decoupled", 4, 1_200_000, days=0.1, steps=60)
    row = goodput.measure(cell)
    assert 0.5 * row["made_percent"] < row["merged_percent"] <= 1.2 * row["made_percent"] < 120, row
    assert 1 <= row["contributors_mean"] <= 4
    lines = goodput.headline([{"method": "decoupled", "learners": 8, "chips": 1_200_000, **row}])
    assert "at 1.2 M chips" in lines[0] and "decoupled, merged" in lines[1]


def test_excess_is_told_with_an_interval_of_its_pairs() -> None:
    """Holds `quality.compared`."""
    row = quality.compared([1.01, 2.06], [1.0, 2.0])
    assert row["excess_percent"] == pytest.approx(2.0)
    half = 12.706 * 2**0.5 / 2**0.5  # Standard deviation of 1% and 3%, over two pairs.
    assert row["low_percent"] == pytest.approx(2.0 - half) == 4.0 - row["high_percent"]
    row["tokens_per_param"] = 20.0
    lines = quality.headline([{**vars(QualityCell("1:1")), **row}])
    assert lines[0].startswith("1:1, nobody dead, 1000 steps") and "+2.0%" in lines[0]
    assert "35M +0.7, +2.0, +3.9" in lines[1]
    with pytest.raises(ConfigError, match="--seeds"):
        quality.quality(seeds=1)


def test_cells_share_the_rival_that_was_searched() -> None:
    """Holds `quality_cells.rival`."""
    cells = [*quality_cells.site_cells(2), *quality_cells.mixed_cells(2)]
    rivals = {quality_cells.rival(cell) for cell in cells}
    assert len(rivals) < len(cells) / 2
    assert all(each.handover == 0 and each.dead == "nobody" for each in rivals)
    assert all(set(each.speeds) <= {"1", ":"} for each in rivals)
    chosen = {seed for cell in quality_cells.searched_cells(10) for seed in cell.seed_numbers}
    assert not any(chosen & set(cell.seed_numbers) for cell in cells)


def test_a_seed_decides_the_loss_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `trained.train`."""
    monkeypatch.setattr(trained, "AWAY_PERIOD_S", 30.0)
    cell = QualityCell("1:1", dead="each", steps=40)
    losses, contributors = trained.train(cell, 1)
    assert len(losses) == len(trained.MARKS) and 1.0 <= contributors < 2.0
    assert 1.0 < losses[-1] < losses[0] < 5.6
    late = trained.train(QualityCell("1:1", dead="late", steps=16), 1)
    assert 1.0 < late.contributors < 2.0
    assert trained.train(cell, 1) == (losses, contributors)
    assert trained.train(QualityCell("1:1", keep=0.7, steps=40), 1).contributors > contributors
    rival = trained.train_data_parallel(cell, 1)
    assert len(rival) == len(trained.MARKS) and 1.0 < rival[-1] < rival[0] < 5.6
    assert trained.train_data_parallel(replace(cell, beta1=0.5), 1) != rival
    assert trained.train_data_parallel(replace(cell, peak=0.5), 1) != rival
