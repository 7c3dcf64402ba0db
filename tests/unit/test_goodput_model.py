"""Failure tapes, the stall model and its calibration."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

import numpy as np
import pytest

from narrows.bench.goodput import calibration as goodput_calibration
from narrows.bench.goodput.calibration import (
    ALONE_POINTS,
    calibrated,
    data_parallel_fits,
    data_parallel_percent,
    elastic_fits,
    elastic_percent,
    fit_range_percent,
    missing_share,
)
from narrows.bench.goodput.cells import QUARTER_S, GoodputCell, GoodputMethod
from narrows.bench.goodput.published import (
    CHIP_FAILURE_S,
    CHIPS,
    DECOUPLED_PERCENT,
    LEARNERS,
    PREDICTED,
    published_percent,
)
from narrows.bench.goodput.run import courses_of, run_cell
from narrows.bench.goodput.stall_model import (
    NEVER,
    Costs,
    absorbed,
    course,
    data_parallel,
    elastic,
    full_course,
    goodput,
    uptime,
)
from narrows.bench.goodput.tapes import Slices, Tape, failure_tape
from narrows.proto.codec import F64

SLICES = Slices(256, 5000.0, gather_s=20.0)
COSTS = Costs(SLICES, restart_s=50.0, checkpoint_s=80.0, reconfigure_s=10.0)
WEEK_S = 7 * 86_400.0


def whole(span_s: float) -> F64:
    return np.array([0.0, span_s])


# Tapes.


def test_chips_fail_once_a_year() -> None:
    tape = failure_tape(600_000, WEEK_S, 1, SLICES)
    failed_s = tape.failed_s[tape.failed_s >= 0]
    out_s = SLICES.chips * SLICES.repair_s
    # A slice that is out cannot fail; that it may wait to be taken in hardly matters here.
    expected = 600_000 * WEEK_S / (CHIP_FAILURE_S + out_s)
    assert abs(len(failed_s) - expected) < 4 * sqrt(expected)
    gaps_s = np.diff(failed_s)
    assert np.std(gaps_s) == pytest.approx(np.mean(gaps_s), rel=0.05)  # Exponential.
    assert (gaps_s >= 0).all()


def test_a_seed_gives_the_same_tape_again() -> None:
    first, again, other = (failure_tape(150_000, WEEK_S, seed, SLICES) for seed in (1, 1, 2))
    for name in ("slice_", "failed_s", "back_s"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.failed_s[:100], other.failed_s[:100])


def test_repairs_have_their_mean_and_slices_that_are_out_do_not_fail() -> None:
    tape = failure_tape(150_000, 4 * WEEK_S, 1, SLICES)
    assert np.mean(tape.back_s - tape.failed_s) == pytest.approx(SLICES.repair_s, rel=0.03)
    for slice_ in range(tape.slices):
        mine = tape.slice_ == slice_
        assert (tape.failed_s[mine][1:] >= tape.back_s[mine][:-1] + SLICES.gather_s).all()


def test_some_slices_are_out_from_the_beginning_on() -> None:
    tape = failure_tape(2_400_000, 10.0, 1, SLICES)
    out = np.sum((tape.failed_s < 0) & (tape.back_s > 0)) / tape.slices
    out_s = SLICES.chips * SLICES.repair_s
    assert out == pytest.approx(out_s / (CHIP_FAILURE_S + out_s), rel=0.15)


@pytest.mark.parametrize("learners", [1, 2, 7])
def test_learners_share_a_tape(learners: int) -> None:
    tape = failure_tape(150_000, WEEK_S, 3, SLICES)
    parts = [tape.part(i, learners) for i in range(learners)]
    assert sum(part.slices for part in parts) == tape.slices
    failed_s = np.sort(np.concatenate([part.failed_s for part in parts]))
    assert np.array_equal(failed_s, tape.failed_s)
    assert all(part.slice_.min() >= 0 and part.slice_.max() < part.slices for part in parts)


# The stall model, by hand and at its limits.


def test_what_happens_in_a_stall_is_absorbed() -> None:
    stalls_s = absorbed(np.array([1.0, 2.0, 10.0, 11.0, 13.0]), lambda up_s: 3.0)
    assert stalls_s.tolist() == [[1, 4], [10, 13], [13, 16]]
    assert absorbed(np.array([]), lambda up_s: 3.0).shape == (0, 2)


def test_data_parallel_does_again_what_no_checkpoint_holds() -> None:
    tape = Tape(1000.0, 2, np.array([0, 1]), np.array([100.0, 290.0]), np.array([150.0, 800.0]))
    # 140 s after the restart at 150 s, 60 s of it after a checkpoint: back at 290 + 50 + 60.
    job = data_parallel(tape, COSTS)
    assert goodput([job], whole(1000)) == pytest.approx([(1000 - 50 - 110) / 1000])
    assert job.is_up(np.array([99.0, 100.0, 149.0, 150.0, 399.0, 400.0])).tolist() == [
        1, 0, 0, 1, 0, 1,
    ]  # fmt: skip


def test_elastic_stalls_twice_and_misses_the_slice_until_it_is_taken_in() -> None:
    tape = Tape(400.0, 2, np.array([1]), np.array([100.0]), np.array([280.0]))
    job = elastic(tape, COSTS)
    assert goodput([job], whole(400)) == pytest.approx([(100 + 190 / 2 + 90) / 400])
    assert uptime([job], whole(400)) == pytest.approx([380 / 400])


def test_slices_that_come_back_soon_after_another_are_taken_in_with_it() -> None:
    failed_s = np.array([100.0, 200.0, 300.0, 400.0])
    back_s = np.array([650.0, 500.0, 515.0, 600.0])
    tape = Tape(1000.0, 8, np.arange(4), failed_s, back_s)
    # The first is back at 500 s and waits until 520 s; that at 650 s is too late for 620 s.
    assert tape.gathered(20.0).back_s.tolist() == [670, 520, 520, 620]
    assert np.array_equal(tape.gathered(0.0).back_s, back_s)
    job = elastic(tape, COSTS)
    assert uptime([job], whole(1000)) == pytest.approx([1 - 7 * 10 / 1000])
    at_s = np.array([450.0, 519.0, 520.0, 619.0, 620.0, 669.0, 670.0])
    present = job.share[np.searchsorted(job.times_s, at_s, side="right") - 1]
    assert (8 * present).tolist() == [4, 4, 6, 6, 7, 7, 8]


def test_the_system_is_up_while_one_learner_is() -> None:
    jobs = [full_course(100.0, np.array([span])) for span in ([10.0, 40.0], [30.0, 60.0])]
    assert uptime(jobs, np.array([0.0, 50.0, 100.0])) == pytest.approx([0.8, 1.0])
    assert goodput(jobs, np.array([0.0, 50.0, 100.0])) == pytest.approx([0.5, 0.9])


def test_stalls_from_the_past_and_beyond_the_end_are_cut_off() -> None:
    spans_s = np.array([[-20.0, -10.0], [-5.0, 5.0], [95.0, 120.0], [130.0, 140.0]])
    assert goodput([full_course(100.0, spans_s)], whole(100)) == pytest.approx([0.9])


def test_without_failures_all_time_is_useful() -> None:
    tape = Tape(100.0, 4, np.array([], np.int64), np.array([]), np.array([]))
    for job in (data_parallel(tape, COSTS), elastic(tape, COSTS), course(tape, NEVER)):
        assert goodput([job], whole(100)) == uptime([job], whole(100)) == [1.0]


def test_nothing_but_the_mean_of_the_repairs_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def percent() -> float:
        tape = failure_tape(600_000, 4 * WEEK_S, 1, SLICES)
        return 100 * float(goodput([elastic(tape, COSTS)], whole(4 * WEEK_S))[0])

    drawn = percent()

    def always_equal(self: Slices, rng: np.random.Generator, count: int) -> F64:
        return np.full(count, self.repair_s)

    monkeypatch.setattr(Slices, "draw_repairs", always_equal)
    assert percent() == pytest.approx(drawn, abs=0.5)


# Calibration.


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("method", ["data_parallel", "elastic"])
def test_the_rows_of_data_parallel_are_met(method: GoodputMethod, chips: int) -> None:
    cell = GoodputCell(method, 1, chips, QUARTER_S)
    row = run_cell(cell, 1)
    assert abs(row["goodput_percent"] - published_percent()[cell.place]) <= ALONE_POINTS
    assert row["ci_high_percent"] - row["ci_low_percent"] < 1
    closed = (
        elastic_percent(chips, *elastic_fits()[0])
        if method == "elastic"
        else data_parallel_percent(chips, *data_parallel_fits()[0])
    )
    assert row["goodput_percent"] == pytest.approx(closed, abs=0.5)


@pytest.mark.parametrize("learners", [LEARNERS, [PREDICTED]])
def test_the_decoupled_rows_are_met(learners: Sequence[int]) -> None:
    misses: list[float] = []
    for cell in (GoodputCell("decoupled", m, chips, WEEK_S) for m in learners for chips in CHIPS):
        percent = 100 * float(goodput(courses_of(cell, WEEK_S, 1), whole(WEEK_S))[0])
        closed = elastic_percent(cell.chips / cell.learners, *elastic_fits()[0])
        assert percent == pytest.approx(closed, abs=0.5)
        misses.append(abs(percent - published_percent()[cell.place]))
    assert fmean(misses) <= 1.5
    assert max(misses) <= 3


def test_no_published_cell_is_out_of_reach() -> None:
    # However few chips a learner has: with 6% of the slices missing none would reach 95%.
    slices = calibrated().slices
    reachable_percent = 100 * (1 - missing_share(slices.repair_s + slices.gather_s))
    assert reachable_percent > max(published_percent().values())


def test_no_constant_is_fitted_to_the_row_that_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fits_with(learners: int) -> tuple[tuple[float, float], ...]:
        rows = {**DECOUPLED_PERCENT, learners: [each - 1 for each in DECOUPLED_PERCENT[learners]]}
        monkeypatch.setattr(goodput_calibration, "DECOUPLED_PERCENT", rows)
        return elastic_fits.__wrapped__()

    assert fits_with(PREDICTED) == elastic_fits()
    assert fits_with(8) != elastic_fits()


def test_all_fits_give_about_the_same() -> None:
    assert len(elastic_fits()) > 10
    for learners in LEARNERS:
        for chips in CHIPS:
            low, high = fit_range_percent(learners, chips)
            assert 0 < high - low < 3


def test_how_long_repairs_take_hardly_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_percents(repair_s: float) -> list[float]:
        monkeypatch.setattr(goodput_calibration, "REPAIR_S", repair_s)
        best = elastic_fits.__wrapped__()[0]
        return [elastic_percent(chips / m, *best) for m in (1, *LEARNERS) for chips in CHIPS]

    short, long = best_percents(0.0), best_percents(600.0)
    assert short == pytest.approx(long, abs=0.6)
    assert short != long


def test_missing_share_by_hand() -> None:
    # One slice of 256 chips fails 256 times a year.
    up_s, out_s = CHIP_FAILURE_S / 256, 7800.0
    assert missing_share(out_s) == pytest.approx(out_s / (up_s + out_s))
