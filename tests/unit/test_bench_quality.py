"""The quality bench: statistics, catalogue, resuming, and runs that equal a loop by hand."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from narrows.bench.codec.codings import CODINGS
from narrows.bench.kit import runner as bench_jobs
from narrows.bench.kit.rows import read_rows
from narrows.bench.kit.stats import STUDENT_T, paired
from narrows.bench.quality import bench as quality
from narrows.bench.quality import catalogue as quality_cells
from narrows.bench.quality import run as quality_run
from narrows.bench.quality.bench import report_collected, run_jobs, run_quality_bench
from narrows.bench.quality.catalogue import REPORTING_SEEDS, rates_of
from narrows.bench.quality.run import QualityCell, learner_name, run_cell
from narrows.bench.quality.variants import POISONS, VARIANTS
from narrows.bench.sim import trained
from narrows.broker.config import load_config
from narrows.learner.reference.corpus import Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import GPT, make_optimizer, preset, token_tensor, validation_loss
from narrows.proto.codec.codecs import codec, piece_scales
from narrows.proto.codec.kernels import F32
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment

TINY = QualityCell(
    "tiny", "plain", learners=3, steps=24,
    settings={"fragments.sync_period_steps": 3, "fragments.count": 2},
)  # fmt: skip

HANG_S = 60.0

ROW_KEYS = {
    "cell", "group", "model", "inner", "learners", "steps", "mode",
    "up_bits_per_param", "down_bits_per_param", "loss", "loss_data_parallel",
    "excess_percent", "ci_low_percent", "ci_high_percent", "seeds",
    "contributors_mean", "virtual_s", "learner_steps",
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Evaluation is most of a tiny run."""
    cached = quality_run._windows
    monkeypatch.setattr(quality_run, "EVALUATION_WINDOWS", 128)
    cached.cache_clear()
    yield
    cached.cache_clear()


class Threads(ThreadPoolExecutor):
    """Workers that start at once and see what a test has patched."""

    def __init__(self, workers: int, **_: object) -> None:
        super().__init__(workers)
        stopped.clear()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(False, cancel_futures=cancel_futures)
        stopped.set()
        super().shutdown(wait)


stopped = threading.Event()
"""The pool takes no more jobs."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The tiny run that others are compared with, on as few windows as theirs."""
    before, quality_run.EVALUATION_WINDOWS = quality_run.EVALUATION_WINDOWS, 128
    try:
        return run_cell(TINY, 1)
    finally:
        quality_run.EVALUATION_WINDOWS = before


# Statistics.


def test_paired_by_hand() -> None:
    result = paired([1.1, 2.4, 1.3], [1.0, 2.0, 1.0])
    # 10%, 20%, 30%: deviation 10, so 4.303 * 10 / sqrt(3) to either side.
    assert result.n == 3
    assert result.mean_percent == pytest.approx(20)
    assert result.low_percent == pytest.approx(20 - 24.843, abs=1e-3)
    assert result.high_percent == pytest.approx(20 + 24.843, abs=1e-3)
    assert str(paired([1.02, 1.02], [1.0, 1.0])) == "+2.00% [+2.00, +2.00]"


def test_one_pair_has_no_interval() -> None:
    result = paired([0.99], [1.0])
    assert (result.low_percent, result.high_percent, result.n) == (None, None, 1)
    assert str(result) == "-1.00%"


def test_pairs_have_to_be_pairs() -> None:
    with pytest.raises(ValueError):
        paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize("n", [2, 3, 5, 31, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(n)
    trials, truth, hits = 4000, 3.0, 0
    for _ in range(trials):
        reference = rng.uniform(1.0, 2.0, n)
        excess = truth + 0.5 * rng.standard_normal(n)
        result = paired(list(reference * (1 + excess / 100)), list(reference))
        assert result.low_percent is not None and result.high_percent is not None
        hits += result.low_percent <= truth <= result.high_percent
    # The standard deviation of the share is 0.0034.
    assert hits / trials == pytest.approx(0.95, abs=0.012)


def test_quantiles_fall_towards_the_normal_one() -> None:
    assert len(STUDENT_T) == 30
    assert list(STUDENT_T) == sorted(STUDENT_T, reverse=True) and STUDENT_T[-1] > 1.96


# The catalogue.


def test_every_cell_of_the_catalogue_is_accepted() -> None:
    cells = quality_cells.full()
    labels = [(cell.group, cell.name) for cell in cells]
    assert len(set(labels)) == len(labels)
    for cell in cells:
        config = cell.config()
        assert len(cell.specs()) == cell.learners
        assert config.merge.quorum <= cell.learners
        assert cell.variant in VARIANTS and (not cell.poison or cell.poison in POISONS)
        assert all(learner < cell.learners for learner, _, _ in cell.deaths)
        for twin in quality_cells.rates_of(cell):
            assert twin.learners * twin.steps * twin.step_tokens == config.run.goal_tokens
            assert (twin.model, twin.inner) == (cell.model, cell.inner)


def test_every_group_asks_something() -> None:
    for group in (*quality_cells.GROUPS, quality_cells.DATA_PARALLEL):
        assert quality_cells.question(group).rstrip()[-1] in "?.;"


def test_the_small_selection_has_all_its_cells() -> None:
    cells = quality_cells.small()
    named = [(group, name) for group, names in quality_cells.SMALL.items() for name in names]
    assert sorted((cell.group, cell.name) for cell in cells) == sorted(named)
    assert {cell.learners for cell in cells} == {4}


def test_unequal_speeds_are_as_fast_together_as_equal_ones() -> None:
    for cell in quality_cells.full():
        speeds = [1 / spec.step_s for spec in cell.specs()]
        assert sum(speeds) / len(speeds) == pytest.approx(1.0)


def test_unknown_groups_are_refused() -> None:
    cells = quality_cells.full()
    assert {c.group for c in quality.of_groups(cells, ["codec", "outer"])} == {"codec", "outer"}
    with pytest.raises(ConfigError, match="did you mean codec"):
        quality.of_groups(cells, ["codecs"])


# Runs.


def test_the_same_cell_twice_gives_the_same_losses(plain: dict[str, Any]) -> None:
    again = run_cell(TINY, 1)
    assert again.pop("wall_s") > 0
    assert again == {name: value for name, value in plain.items() if name != "wall_s"}
    assert plain["corpus_digest"] == load_corpus().corpus_digest
    other = run_cell(TINY, 2)
    assert other["test_loss"] != again["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *({"adoption": name} for name in ("blend", "carry", "lean")),
        # Nothing opposes the momentum in so short a run: heloco has a test of its own.
        *({"variant": name} for name in VARIANTS if name not in ("", "heloco")),
        *({"poison": name} for name in POISONS),
        {"poison": "-100x", "settings": {**TINY.settings, "merge.clip_ratio": 0.0}},
        {"inner": "muon"},
        {"latency_s": (5.0, 5.0)},
        {"step_s": (0.5, 1.0, 2.0)},
        {"deaths": ((1, 8.0, 5.0),)},
        {"deaths": ((1, 8.0, 5.0),), "ramp": False},
        {"joins_at_s": (0.0, 0.0, 6.0)},
    ],
    ids=lambda change: ", ".join(f"{name} {value}" for name, value in change.items())[:40],
)
def test_what_is_changed_runs_and_matters(change: dict[str, Any], plain: dict[str, Any]) -> None:
    row = run_cell(replace(TINY, **change), 1)
    assert row["merges"] > 0 and 0 < row["contributors_mean"] <= 3
    assert math.isfinite(row["validation_loss"]) and math.isfinite(row["test_loss"])
    assert row["test_loss"] != plain["test_loss"]


def test_a_coding_that_is_the_codec_in_other_words_gives_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, plain: dict[str, Any]
) -> None:
    def step_per_piece(part: Fragment, values: F32) -> tuple[F32, int]:
        sent = np.empty_like(values)
        scales = piece_scales(values, part.bounds, 0.5)
        return sent, len(codec("int4-zstd").encode(values, part.bounds, scales, sent))

    monkeypatch.setitem(CODINGS, "step per piece", step_per_piece)
    monkeypatch.setitem(VARIANTS, "step per piece", VARIANTS["a step per block"])
    row = run_cell(replace(TINY, variant="step per piece"), 1)
    for name in ("test_loss", "up_bits_per_param", "down_bits_per_param"):
        assert row[name] == plain[name], name


def test_a_poison_without_the_clip_does_more_harm(plain: dict[str, Any]) -> None:
    poisoned = replace(TINY, poison="-100x")
    bare = replace(poisoned, settings={**TINY.settings, "merge.clip_ratio": 0.0})
    with_clip, without = run_cell(poisoned, 1)["test_loss"], run_cell(bare, 1)["test_loss"]
    assert plain["test_loss"] < with_clip < without


def test_a_learner_that_has_diverged_declines_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverged(base: F32, local: F32, random: Random) -> F32:
        return np.full_like(local, np.nan)

    monkeypatch.setitem(POISONS, "noise", diverged)
    row = run_cell(replace(TINY, poison="noise"), 1)
    # One of the two may decline a last round: it has made no step since it adopted.
    assert 1.75 < row["contributors_mean"] <= 2 and math.isfinite(row["test_loss"])


def test_data_parallel_learns_and_is_curved() -> None:
    cell = QualityCell("tiny", "data parallel", learners=2, steps=24, data_parallel=True)
    row = run_cell(cell, 1)
    assert row["test_loss"] < 4.5 and row["curve"][-1][0] == 24


# Files.


def fake(cell: QualityCell, seed: int) -> dict[str, Any]:
    """A run without training: its loss is known and higher than data parallel's."""
    loss = 1.0 + 0.01 * seed + (0.0 if cell.data_parallel else 0.1)
    loss += abs(cell.peak_learning_rate - 0.016)
    result = quality_run.QualityResult((loss, 2 * loss), curve=[(12.0, 2.0), (24.0, 1.5)])
    row: dict[str, Any] = {**vars(cell), "seed": seed, **vars(result)}
    row["config_digest"] = quality_run.config_digest(cell)
    row["validation_loss"], row["test_loss"] = row.pop("losses")
    return row


class Counted:
    """Fake runs that are counted; the one with number `fails_at` (from 1) fails."""

    def __init__(self, fails_at: int = 0) -> None:
        self.jobs: list[tuple[str, int]] = []
        self._fails_at = fails_at

    def __call__(self, cell: QualityCell, seed: int) -> dict[str, Any]:
        self.jobs.append((cell.name, seed))
        if len(self.jobs) == self._fails_at:
            raise FloatingPointError("diverged")
        if len(self.jobs) > self._fails_at > 0:
            assert stopped.wait(HANG_S)
        return fake(cell, seed)


Patched = Callable[[Callable[[QualityCell, int], dict[str, Any]]], None]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Patched:
    """Replaces run_cell."""
    monkeypatch.setattr(bench_jobs, "ProcessPoolExecutor", Threads)
    return lambda run: monkeypatch.setattr(quality, "run_cell", run)


def run(
    cells: list[QualityCell], path: Path, seeds: tuple[int, ...] = (1, 2)
) -> list[dict[str, Any]]:
    jobs = quality.jobs_of(cells, seeds)
    return run_jobs(jobs, path, workers=1, console=Console(quiet=True))


def test_resuming_runs_nothing_twice(tmp_path: Path, patched: Patched) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    counted = Counted()
    patched(counted)
    first = run([TINY], path)
    again = run([TINY, replace(TINY, adoption="carry", deaths=((1, 2.0, 3.0),))], path)
    assert len(counted.jobs) == 4 and len(read_rows(path)) == 4
    assert [row["test_loss"] for row in first] == [row["test_loss"] for row in again[::2]]
    assert [(row["seed"], row["adoption"]) for row in again] == [
        (1, "overwrite"), (1, "carry"), (2, "overwrite"), (2, "carry"),
    ]  # fmt: skip
    run([TINY, replace(TINY, adoption="carry", deaths=((1, 2.0, 3.0),))], path)
    assert len(counted.jobs) == 4


def test_runs_with_other_defaults_are_made_again_and_told_apart(
    tmp_path: Path, patched: Patched
) -> None:
    path, result, counted = tmp_path / "rows.jsonl", tmp_path / "quality.json", Counted()
    patched(counted)
    twin = replace(TINY, data_parallel=True)
    rows = run([twin, TINY], path)
    for row in rows:
        if row["data_parallel"]:
            del row["config_digest"]  # As rows were before there were digests.
        else:
            row |= {"config_digest": "other", "test_loss": 9.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run([twin, TINY], path)
    assert counted.jobs[4:] == [("plain", 1), ("plain", 2)]
    default = load_config(None, {}).outer.lr
    run([replace(TINY, settings={**TINY.settings, "outer.lr": default})], path)
    assert len(counted.jobs) == 6  # To say a default changes nothing.
    report_collected(path, result, None)
    losses = [row["loss"] for row in json.loads(result.read_text())["rows"]]
    assert len(losses) == 3 and losses[1] == 9.0 and losses[2] < 3.0


def test_a_cell_under_two_names_runs_once(tmp_path: Path, patched: Patched) -> None:
    counted = Counted()
    patched(counted)
    cells = [TINY, replace(TINY, group="other", name="the same")]
    rows = run(cells, tmp_path / "rows.jsonl")
    assert counted.jobs == [("plain", 1), ("plain", 2)]
    assert [(row["group"], row["name"], row["seed"]) for row in rows] == [
        ("tiny", "plain", 1), ("other", "the same", 1),
        ("tiny", "plain", 2), ("other", "the same", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 30])
def test_a_last_line_that_was_cut_off_is_run_again(
    cut: int, tmp_path: Path, patched: Patched
) -> None:
    path, counted = tmp_path / "rows.jsonl", Counted()
    patched(counted)
    complete = run([TINY], path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read_rows(path)) == (2 if cut == 1 else 1)
    more = [TINY, replace(TINY, learners=2)]
    rows = run(more, path)
    assert [row["test_loss"] for row in rows[::2]] == [row["test_loss"] for row in complete]
    # What came after the cut line is whole.
    runs = len(counted.jobs)
    assert runs == (4 if cut == 1 else 5) and len(read_rows(path)) == 4
    run(more, path)
    assert len(counted.jobs) == runs


def test_after_a_failure_nothing_more_is_run(tmp_path: Path, patched: Patched) -> None:
    path, counted = tmp_path / "rows.jsonl", Counted(fails_at=2)
    patched(counted)
    cells = [replace(TINY, learners=count) for count in range(1, 30)]
    with pytest.raises(FloatingPointError):
        run(cells, path, seeds=(1,))
    # The worker may have begun with a third one before the second was looked at.
    assert len(read_rows(path)) <= 1 and 2 <= len(counted.jobs) <= 3


def test_rows_have_their_keys_and_compare_with_the_best_rate(
    tmp_path: Path,
    patched: Patched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [TINY, replace(TINY, name="muon", inner="muon"), replace(TINY, group="outer")]
    monkeypatch.setattr(quality_cells, "small", lambda: cells)
    patched(counted := Counted())
    monkeypatch.setitem(quality_cells.GROUPS, "tiny", quality_cells.modes)
    paths = [tmp_path / name for name in ("rows.jsonl", "quality.json", "quality.svg")]
    run_quality_bench(*paths, full=False, short=False, workers=1, groups=[])
    result = json.loads(paths[1].read_text())
    assert result["bench"] == "quality" and "machine" in result
    rows = result["rows"]
    assert all(set(row) == ROW_KEYS for row in rows)
    assert [row["mode"] for row in rows] == ["data_parallel"] * 2 + ["decoupled"] * 3
    assert [row["cell"] for row in rows] == [
        "data parallel, adamw, 0.016", "data parallel, muon, 0.016", "plain", "muon", "plain",
    ]  # fmt: skip
    # Every seed: 2 (1 + 0.01 seed) for data parallel, 0.2 + 0.032 more for the preset's rate of 0.
    excess = [100 * (0.2 + 0.032) / (2 + 0.02 * seed) for seed in REPORTING_SEEDS]
    for row in rows[2:]:
        assert row["excess_percent"] == pytest.approx(sum(excess) / 5)
        assert row["ci_low_percent"] < row["excess_percent"] < row["ci_high_percent"]
        assert row["seeds"] == [11, 12, 13, 14, 15]
    assert all(row["excess_percent"] == 0 for row in rows[:2])
    # Two inner optimizers with five rates and three seeds, then two measures and two cells.
    assert len(counted.jobs) == 2 * 5 * 3 + 4 * 5
    assert len(result["data_parallel_rates"]) == 10
    for path in (paths[2], tmp_path / "quality-curves.svg"):
        assert path.read_text().startswith("<?xml")
    assert "outer: Which" in capsys.readouterr().out


def test_what_was_collected_is_compared_with_the_best_rate_that_was_not_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = replace(TINY, group="own", name="data parallel", data_parallel=True)
    rates = (0.016, 0.03, 0.004)
    good, bad, dropped = (replace(measure, peak_learning_rate=rate) for rate in rates)
    runs = [(bad, 11), (bad, 12), (good, 11), (good, 12), (dropped, 11)]
    runs += [(replace(TINY, group="own", name="late"), seed) for seed in (11, 12, 13)]
    runs += [(replace(TINY, group="own", name="long", steps=99), 11)]
    rows = [fake(cell, seed) for cell, seed in runs]
    rows[4]["validation_loss"] = 0.0
    path, result = tmp_path / "rows.jsonl", tmp_path / "quality.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[5]]))
    report_collected(path, result, None)
    told = json.loads(result.read_text())["rows"]
    assert all(set(row) == ROW_KEYS for row in told)
    late = told[-1]
    assert late["cell"] == "late" and late["seeds"] == [11, 12]
    assert late["loss_data_parallel"] == pytest.approx(2 * (1 + 0.115))
    assert "long" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no cell"):
        report_collected(tmp_path / "none.jsonl", None, None)


def test_what_was_collected_is_compared_with_as_many_tokens(tmp_path: Path) -> None:
    # Learners that come and go share the goal of fewer that stay: theirs is the measure.
    extra = next(cell for cell in quality_cells.scavenging() if cell.learners == 8)
    twins = [rate for cell in (extra, replace(extra, settings={})) for rate in rates_of(cell)]
    assert {twin.learners for twin in twins} == {4, 8}
    rows = [fake(replace(cell, group="own"), 11) for cell in (*twins, extra)]
    for row in rows:
        row["test_loss"] = float(row["learners"])
    path, result = tmp_path / "rows.jsonl", tmp_path / "quality.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report_collected(path, result, None)
    assert json.loads(result.read_text())["rows"][-1]["loss_data_parallel"] == 4


def test_rows_of_another_bench_are_left_out(tmp_path: Path) -> None:
    path, result = tmp_path / "rows.jsonl", tmp_path / "quality.json"
    others = [json.dumps({"bench": "goodput", "seed": 1}), "{"]
    own = fake(replace(TINY, data_parallel=True), 11)
    path.write_text("\n".join([*others, json.dumps(own)]) + "\n")
    report_collected(path, result, None)
    assert len(json.loads(result.read_text())["rows"]) == 1
    path.write_text("\n".join(others))
    with pytest.raises(ConfigError, match="no cell"):
        report_collected(path, None, None)


@pytest.mark.slow
def test_the_bench_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality_cells, "small", lambda: [replace(TINY, group="modes")])
    monkeypatch.setattr(quality_cells, "RATES", (1.0, 2.0))
    monkeypatch.setattr(quality, "CHOOSING_SEEDS", (1,))
    monkeypatch.setattr(quality, "REPORTING_SEEDS", (11, 12))
    json_file = tmp_path / "quality.json"
    run_quality_bench(
        tmp_path / "rows.jsonl",
        json_file,
        None,
        full=False,
        short=False,
        workers=1,
        groups=["modes"],
    )
    measure, row = json.loads(json_file.read_text())["rows"]
    assert row["loss_data_parallel"] == measure["loss"] < row["loss"] < 5
    assert 2 < row["up_bits_per_param"] < 4 and row["contributors_mean"] > 2
    assert "modes: How far" in capsys.readouterr().out


# The runner against loops by hand.

ROUND_STEPS, ROUNDS, RATE = 20, 2, 3e-3
RAW = {
    "run.mode": "diloco",
    "fragments.sync_period_steps": ROUND_STEPS,
    "codec.push": "raw32",
    "codec.publish": "raw32",
}


@pytest.fixture
def constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule follows the run's clock, which a loop by hand does not have."""

    def learning_rate(progress: float, peak: float) -> float:
        return RATE

    monkeypatch.setattr(trained, "learning_rate", learning_rate)


class ByHand:
    """One learner: its inner optimizer and its text go on from round to round."""

    def __init__(self, index: int, seed: int) -> None:
        shape = preset("nano")
        self.model = GPT(shape, seed=seed)
        self._optimizer = make_optimizer(self.model, RATE)
        self._reader = Reader(
            load_corpus().train,
            batch=shape.batch, context=shape.context, name=learner_name(index), seed=seed,
        )  # fmt: skip

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x, y = next(self._reader)
            loss = self.model.loss(token_tensor(x), token_tensor(y))
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()


def loss_on_test_text(model: GPT) -> float:
    windows = fixed_windows(load_corpus().test, context=model.config.context, count=128)
    return validation_loss(model, windows)


def diloco(settings: dict[str, object], learners: int) -> QualityCell:
    steps = ROUND_STEPS * ROUNDS
    return QualityCell("oracle", "", learners=learners, steps=steps, settings={**RAW, **settings})


def test_one_learner_with_sgd_at_rate_1_trains_as_if_alone(constant_rate: None) -> None:
    cell = diloco({"outer.optimizer": "sgd", "outer.lr": 1.0}, 1)
    alone = ByHand(0, seed=5)
    alone.train(cell.steps)
    row = run_cell(cell, 5)
    assert row["merges"] == ROUNDS
    assert row["test_loss"] == pytest.approx(loss_on_test_text(alone.model), abs=1e-6)


def test_diloco_is_the_classic_loop(constant_rate: None) -> None:
    cell = diloco({"outer.lr": 0.7, "outer.momentum": 0.9}, 2)
    outer = GPT(preset("nano"), seed=5)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    learners = [ByHand(i, seed=5) for i in range(2)]
    for _ in range(ROUNDS):
        for learner in learners:
            learner.model.load_state_dict(outer.state_dict())
            learner.train(ROUND_STEPS)
        locals_ = zip(*(learner.model.parameters() for learner in learners), strict=True)
        for parameter, own in zip(outer.parameters(), locals_, strict=True):
            parameter.grad = parameter.detach() - torch.stack([p.detach() for p in own]).mean(0)
        optimizer.step()
    row = run_cell(cell, 5)
    assert row["contributors_mean"] == 2 and row["merges"] == ROUNDS
    assert row["test_loss"] == pytest.approx(loss_on_test_text(outer), abs=1e-5)
