"""Benches: their arithmetic on made-up input, and each of them once with tiny real runs; the
reference worker's text, model and options; and what `narrows demo` shows. A real demo is run by
tests/acceptance."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

from narrows.bench import (
    bandwidth,
    chaos,
    cli,
    codec,
    fairness,
    goodput,
    loop,
    peers,
    quality,
    trained,
    wan,
)
from narrows.bench.demo import SPARKS, SPARKS_MAX, STEP_TOKENS, Story, View, demo, report, sparkline
from narrows.bench.kit import rows
from narrows.bench.kit.line import Sample, available, ip, peak_bits_per_s
from narrows.bench.kit.run import TENSORS, WIDTH, Run
from narrows.bench.quality_cells import QualityCell
from narrows.bench.reference import worker
from narrows.bench.reference.gpt import GPT, PRESETS, learning_rate, make_optimizer
from narrows.bench.reference.text import SECTION_BYTES, SIDE_BYTES_MIN, Text, load_text
from narrows.bench.reference.worker import Options, learner
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError

PARAMS = 4 * TENSORS * WIDTH


@dataclass(frozen=True)
class Cell:
    number: int


def halved(cell: Cell) -> rows.Row:
    if cell.number == 13:
        raise NarrowsError(ErrorCode.UNFINISHED, "a process has died")
    return {"half": cell.number / 2, "rest": None}


def measure(path: Path, *numbers: int) -> None:
    columns = [rows.Column("half of it", "half", "{:.1f}"), rows.Column("rest", "rest")]
    cells = [Cell(number) for number in numbers]
    rows.bench("halves", cells, halved, columns, lambda _: ["so it is"], json=path, seed=7)


def test_cells_become_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path / "new" / "rows.json", 1, 2)
    said = json.loads((tmp_path / "new" / "rows.json").read_text())
    made = [{"number": n, "half": n / 2, "rest": None} for n in (1, 2)]
    assert (said["bench"], said["seed"], said["rows"]) == ("halves", 7, made)
    assert said["machine"]["cores"] >= 1 and "commit" in said
    told = capsys.readouterr().out
    assert "half of it" in told and "0.5" in told and "so it is" in told


def test_what_was_measured_before_an_error_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with pytest.raises(NarrowsError, match="a process has died"):
        measure(path, 1, 13, 2)
    assert [row["half"] for row in json.loads(path.read_text())["rows"]] == [0.5]


def test_the_fullest_second_is_found_wherever_it_is() -> None:
    rates = [100] * 10 + [0] * 4 + [300] * 10 + [50] * 10
    samples, up = [Sample(0.0, 0, 0)], 0
    for index, rate in enumerate(rates):
        up += rate
        samples.append(Sample((index + 1) / 10, up, 7 * (index + 1)))
    assert peak_bits_per_s(samples) == pytest.approx((8 * 3000, 8 * 70))
    assert peak_bits_per_s(samples[:10]) == (0, 0), "less than a second"


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` to refuse anything")
def test_a_line_that_cannot_be_built_says_what_it_takes() -> None:
    with pytest.raises(NarrowsError, match=r"expected ip no-such-thing, got .*run it as root"):
        ip("no-such-thing")


def test_bits_are_counted_per_learner_and_exchange() -> None:
    alone = {"elements": 1000, "contributors": "a", "pushed_bytes": 400, "published_bytes": 350}
    merge = alone | {"contributors": "ab", "pushed_bytes": 800}
    before = {"up_bytes": 5000, "down_bytes": 9000}
    after = {"up_bytes": 5000 + 1500, "down_bytes": 9000 + 1600}
    row = bandwidth.bits([merge, alone], before, after, line_bytes=(1800, 2000))
    assert row == {
        "exchanges": 2,
        "payload_up_bits_per_param": 8 * 1200 / 3000,
        "wire_up_bits_per_param": 8 * 1500 / 3000,
        "line_up_bits_per_param": 8 * 1800 / 3000,
        "payload_down_bits_per_param": 8 * 2 * 700 / 4000,
        "wire_down_bits_per_param": 8 * 1600 / 4000,
        "line_down_bits_per_param": 8 * 2000 / 4000,
    }


def test_published_figures_come_out_of_the_arithmetic() -> None:
    assert bandwidth.data_parallel_gbps() == pytest.approx(198, rel=0.02)
    assert bandwidth.site_gbps(4.0) == pytest.approx(0.84 * 1514 / 1448, rel=0.02)


def test_a_codec_is_worth_its_bits() -> None:
    def row(data: str, name: str, rho: float | None) -> rows.Row:
        return codec.measure(codec.CodecCell(data, name, rho, 1 << 16))

    gaussian = row("gaussian", "int4-zstd", 0.5)
    assert 0 < gaussian["bits_per_param"] - gaussian["gaussian_bound_bits"] < 0.5
    assert row("gaussian", "absmax int4 by 256", None)["bits_per_param"] == 4 + 32 / 256
    lossless = row("student_t", "f32-blosc2", None)
    assert lossless["snr_db"] is None and 20 < lossless["bits_per_param"] < 32
    recorded = row("recorded", "int8-zstd", 0.25)
    assert recorded["snr_db"] > 20 and 3 < recorded["bits_per_param"] < 5


@pytest.mark.parametrize("name", cli.BENCHES)
def test_every_bench_has_a_command_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.bench([name, "--help"], result_action="return_value")
    told = capsys.readouterr().out
    assert "--short" in told and "--json" in told and "File for the rows." in told, told


def test_all_goes_on_after_a_bench_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "BENCHES", {"loop": "", "codec": ""})
    error = NarrowsError(ErrorCode.UNFINISHED, "the broker has died")
    monkeypatch.setattr(loop, "measure", Mock(side_effect=error))
    with pytest.raises(NarrowsError, match=r"failed: loop .*the broker has died"):
        cli.run_all(folder=tmp_path / "new")
    said = json.loads((tmp_path / "new" / "codec.json").read_text())
    assert {row["codec"] for row in said["rows"]} >= {"int4-zstd"}
    assert "bits per parameter" in capsys.readouterr().out


def test_half_a_line_of_events_waits_for_its_rest(tmp_path: Path) -> None:
    with Run(folder=tmp_path) as run:
        assert run.merges() == []
        with (tmp_path / "broker.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"event": "merged"}\n{"event": "x"}\n{"eve')
            assert run.merges() == [{"event": "merged"}]
            file.write(b'nt": "merged", "n": 2}\nnot json\n')
        assert run.merges() == [{"event": "merged"}, {"event": "merged", "n": 2}]


@pytest.mark.real
def test_a_run_says_which_process_has_died_and_why() -> None:
    with Run() as run, pytest.raises(NarrowsError, match=r"broker .*to serve.*fragments\.count"):
        run.broker({"fragments.count": 0})


@pytest.mark.real
def test_the_loop_is_measured_by_stage() -> None:
    row = loop.measure(loop.LoopCell("decoupled", "0", PARAMS, 0.5))
    assert row["rounds_per_s"] > 0 and row["pushes_per_round"] == loop.LEARNERS
    assert row["exchange_s"] == pytest.approx(loop.FRAGMENTS / row["rounds_per_s"])
    assert row["learner_training_ns"] > 0 and row["broker_loop_ns"] >= 0
    assert "free running" in "".join(
        loop.headline([{"mode": "decoupled", "params": PARAMS, **row}])
    )


@pytest.mark.real
def test_bandwidth_counts_frames_and_the_line() -> None:
    row = bandwidth.measure(bandwidth.BandwidthCell(0.5), steps=40)
    assert 2 < row["payload_up_bits_per_param"] < 4 and 2 < row["payload_down_bits_per_param"] < 4
    assert row["wire_up_bits_per_param"] > 2
    assert (row["line_up_bits_per_param"] is not None) == available()
    assert "Narrows, rho 0.5" in "".join(bandwidth.headline([{"rho": 0.5, **row}]))


@pytest.mark.real
def test_kills_lose_nothing_and_what_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = chaos.compare

    def also_spoilt(state: Path, seen: dict[str, list[dict[str, Any]]]) -> rows.Row:
        made_up = {"fragment": 0, "version": 1, "digest": "0" * 16}
        spoilt = compare(state, {**seen, "liar": [made_up], "nobody": []})
        assert spoilt["copies_lost"] == 1 and spoilt["problem_count"] == 2, spoilt["problems"]
        return compare(state, seen)

    monkeypatch.setattr(chaos, "compare", also_spoilt)
    row = chaos.measure(chaos.ChaosCell(kills=3, seed=1))
    assert row["problems"] == [] and row["copies_seen"] > 0
    assert row["kills_at_places"] == 1 and row["rounds_replayed"] == row["rounds"] > 0


@pytest.mark.real
def test_shares_are_measured_while_a_learner_is_away() -> None:
    row = fairness.measure(fairness.FairnessCell((0.005, 0.02), minutes=0.06))
    for name in ("calm", "rough"):
        # Facts of a toy may be some steps old.
        assert all(0 < share < 1.05 for share in row[f"{name}_shares"]), row
        assert row[f"{name}_clock_off_tokens"] == 0, row
    assert row["rough_logged_tokens"][1] < row["calm_logged_tokens"][1], "it was not away"
    equal = {"step_s": (0.1, 0.1), **row}
    assert "the clock is exact" in "".join(fairness.headline([equal]))
    spoilt = "".join(fairness.headline([{**equal, "calm_clock_off_tokens": 4000}]))
    assert "wrong at [(0.1, 0.1)]" in spoilt


@pytest.mark.real
def test_promises_of_a_line_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "TRANSFER_S", 0.02)  # Else first copies would take a while.
    frozen = wan.measure(wan.WanCell("frozen", seconds=4.0))
    assert max(frozen["rounds_per_s"]) > 0 and frozen["longest_pause_s"] > 0, frozen
    revoked = wan.measure(wan.WanCell("revoke", 2, seconds=1.0))
    assert revoked["copies_after"] == 0 and 0 < revoked["pause_s"] < wan.LOOKED_S, revoked
    assert revoked["behind_periods"] < 2, revoked
    broken = {"promise": "far", "rate": "0", "learners": 1, **frozen, "held": "NO"}
    assert wan.headline([broken])[0] == "0 of 1 held"
    if available():
        row = wan.measure(wan.WanCell("budget", 2, "20Mbit/s", seconds=1.5))
        assert 0 < max(row["mean_shares"]) <= 1.05, row


def test_a_slice_that_leaves_and_returns_stalls_its_job_twice() -> None:
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
    at_s = 1000.0 + goodput.CHECKPOINT_S + 7.0
    course = goodput.data_parallel(np.array([[1000.0, 1.0], [1010.0, 1.0], [at_s + 52.0, 1.0]]))
    lost_s = 2 * goodput.RESTART_S + 7.0
    assert course.useful_s(3000.0) == pytest.approx(3000.0 - lost_s)


@pytest.mark.parametrize(("method", "percent"), [("data parallel", 27), ("elastic", 58)])
def test_fitted_costs_give_the_published_cells(method: str, percent: int) -> None:
    row = goodput.measure(goodput.GoodputCell(method, 1, 1_200_000, days=2.0, steps=0))
    assert row["published_percent"] == percent
    assert row["model_percent"] == pytest.approx(percent, abs=2.5)


def test_hosts_merge_what_the_course_lets_them_train() -> None:
    cell = goodput.GoodputCell("decoupled", 4, 1_200_000, days=0.1, steps=60)
    row = goodput.measure(cell)
    assert 0.5 * row["made_percent"] < row["merged_percent"] <= 1.2 * row["made_percent"] < 120, row
    assert 1 <= row["contributors_mean"] <= 4
    lines = goodput.headline([{"method": "decoupled", "learners": 8, "chips": 1_200_000, **row}])
    assert "at 1.2 M chips" in lines[0] and "decoupled, merged" in lines[1]


def test_excess_is_told_with_an_interval_of_its_pairs() -> None:
    row = quality.compared([1.01, 2.06], [1.0, 2.0])
    assert row["excess_percent"] == pytest.approx(2.0)
    half = 12.706 * 2**0.5 / 2**0.5  # Standard deviation of 1% and 3%, over two pairs.
    assert row["low_percent"] == pytest.approx(2.0 - half) == 4.0 - row["high_percent"]
    line = quality.headline([{**vars(QualityCell("1:1")), **row}])[0]
    assert line.startswith("1:1, nobody dead, keep 0.5") and "+2.0%" in line
    with pytest.raises(ConfigError, match="--seeds"):
        quality.quality(seeds=1)


def test_a_seed_decides_the_loss_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "AWAY_PERIOD_S", 30.0)
    cell = QualityCell("1:1", dead="each", steps=40)
    loss, contributors = trained.train(cell, 1)
    assert 1.0 < loss < 5.6 and 1.0 <= contributors < 2.0
    assert trained.train(cell, 1) == (loss, contributors)
    assert trained.train(QualityCell("1:1", keep=0.7, steps=40), 1)[1] > contributors
    assert 1.0 < trained.train_data_parallel(cell, 1) < 5.6


def test_a_system_that_is_not_there_has_a_row_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    cell = peers.PeersCell("exchange", "torchft", "1Mbit/s", PARAMS, 1.0)
    row = peers.measure(cell)
    assert row["exchange_s"] is None and "bin/pip install torch torchft==" in row["note"], row
    assert "torchft -" in peers.headline([{**vars(cell), **row}])[0]


@pytest.mark.real
@pytest.mark.skipif(not available(), reason="root alone can build a line")
@pytest.mark.parametrize("system", ["decoupled", "lockstep"])
def test_learners_compute_and_exchange(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PUBLISHED_STEP_S", 0.004)
    row = peers.measure(peers.PeersCell("computing", system, "200Mbit/s", PARAMS, 0.5, 32))
    assert row["computing_percent"] > 0 and row["published_percent"] is None, row
    assert row["steps_per_exchange"] > 16 and row["exchange_s"] > 0, row


@pytest.mark.real
@pytest.mark.skipif(not available(), reason="root alone can build a line")
def test_other_systems_are_timed_on_a_shaped_line() -> None:
    cell = peers.PeersCell("exchange", "gloo", "20Mbit/s", 1 << 18, 1.0)
    row = peers.averaged(cell, Path(sys.executable))
    assert row["exchange_s"] >= 0.9 * 16 * cell.params / 20e6, row  # All bits cross the line.


def counting(train: int) -> Text:
    """A text that tells at which place a token was read."""
    return Text(np.arange(train, dtype=np.uint8), np.arange(100, dtype=np.uint8), 1)


def test_a_file_is_on_the_side_of_its_name(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * SIDE_BYTES_MIN)
    (tmp_path / "image.png").write_bytes(b"\xff" * 4096)
    text = load_text(tmp_path)
    train, validation = set(text.train.tolist()), set(text.validation.tolist())
    assert train | validation == set(range(60)) and not train & validation
    (tmp_path / "0.txt").write_bytes(b"\xfe" * 4096)
    changed = load_text(tmp_path)
    assert (0xFE in changed.train.tolist()) == (0 in train)


def test_one_long_file_has_both_sides(tmp_path: Path) -> None:
    whole = b"".join(bytes([index]) * SECTION_BYTES for index in range(40))
    (tmp_path / "book.txt").write_bytes(whole)
    text = load_text(tmp_path)
    assert len(text.validation) and len(text.train) + len(text.validation) == len(whole)


def test_too_little_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("few words")
    with pytest.raises(ConfigError, match=r"too little text in .*expected .* got .* in 1 files"):
        load_text(tmp_path)
    for preset in PRESETS.values():
        assert preset.batch * preset.context < SIDE_BYTES_MIN, "the shortest text has a batch"


def test_batches_cover_the_text_once_a_pass() -> None:
    def batches(order: str, count: int, skip: int = 0) -> list[list[int]]:
        source = counting(81).tokens(batch=2, context=10, order=order, skip=skip)
        taken = list(islice(source, count))
        assert all(np.array_equal(y, x + 1) for x, y in taken)
        return [x[:, 0].tolist() for x, _ in taken]

    eight = batches("0:site-a", 8)
    for one_pass in (eight[:4], eight[4:]):
        assert sorted(chain(*one_pass)) == list(range(0, 80, 10))
    assert eight[:4] != eight[4:], "each pass has its own order"
    assert batches("0:site-b", 4) != eight[:4]
    assert batches("0:site-a", 3, skip=5) == eight[5:], "a learner that returns goes on"


def test_validation_windows_are_spread_over_the_text() -> None:
    windows = counting(20).validation_windows(context=9, count=4)
    assert windows[:, 0].tolist() == [0, 30, 60, 90] and windows[-1, -1] == 99


def test_the_model_learns_and_does_not_look_ahead() -> None:
    model, text = GPT(PRESETS["nano"]), load_text()
    assert len(text.train) > 3e6 and 5e4 < len(text.validation) < len(text.train) / 10
    assert all(map(torch.equal, model.parameters(), GPT(PRESETS["nano"]).parameters()))
    assert model.head.weight is model.embedding.weight
    x = torch.from_numpy(text.validation_windows(context=64, count=1))[:, :-1]
    changed = x.clone()
    changed[0, 40] ^= 1
    before, after = model(x), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])
    windows = text.validation_windows(context=64, count=64)
    assert abs(model.validation_loss(windows) - math.log(256)) < 0.5, "it knows nothing yet"
    optimizer = make_optimizer(model, 8e-3)
    for x_, y_ in islice(text.tokens(batch=4, context=64, order="a"), 60):
        model.loss(torch.from_numpy(x_), torch.from_numpy(y_)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert model.validation_loss(windows) < 3.6


def test_presets_have_the_sizes_that_help_tells() -> None:
    models = map(GPT, PRESETS.values())
    sizes = [sum(each.numel() for each in model.parameters()) / 1e6 for model in models]
    assert sizes == pytest.approx([0.12, 0.43, 0.82, 4.8, 25, 85], rel=0.05)


@pytest.mark.parametrize(
    ("progress", "run_step", "rate"),
    [(0.0, 0, 0.01), (0.0, 1e6, 1.0), (0.01, 0, 0.2), (0.05, 0, 1.0), (1.0, 0, 0.1)],
)
def test_the_learning_rate_follows_the_run(progress: float, run_step: float, rate: float) -> None:
    """A run without a goal, whose progress is 0, goes on at the full rate."""
    assert learning_rate(progress, run_step, 1.0) == pytest.approx(rate)


WITHOUT_PYTORCH = r"needs PyTorch.*pip install"


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        (lambda: Options(step_wait_s=-1), r"--step-wait-s \(expected >= 0, got -1"),
        (
            lambda: worker.train(Options(device="tpu", name="site-a", broker="tcp://127.0.0.1:1")),
            r"--device \(expected a device that PyTorch can use",
        ),
        (
            lambda: learner(Options(name="site-a", broker="tcp://127.0.0.1:1")),
            WITHOUT_PYTORCH,
        ),
        (lambda: bandwidth.bandwidth(short=True), WITHOUT_PYTORCH),
        (lambda: chaos.chaos(short=True), WITHOUT_PYTORCH),
        (lambda: loop.loop(short=True), WITHOUT_PYTORCH),
    ],
)
def test_what_cannot_begin_says_why(
    begin: Callable[[], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=told):
        begin()


def test_a_worker_speaks_before_the_import_that_takes_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def trained(options: Options) -> dict[str, float]:
        heard.append(capsys.readouterr().out)
        return {"steps": 1, "tokens": 2, "validation_loss": 3.0}

    monkeypatch.setattr(worker, "train", trained)
    learner(Options(name="site-a", broker="tcp://127.0.0.1:1"))
    assert heard == ["site-a: loading PyTorch, which takes seconds\n"]
    assert "validation loss 3.0000" in capsys.readouterr().out


MEASURED = Path(__file__).parents[2] / "docs" / "results" / "demo.json"


def status(
    run_tokens: int, incarnation: str = "b.1", merged: int = 0, phase: str = "running"
) -> dict[str, Any]:
    victim = {"incarnation": incarnation, "merged_tokens": merged}
    return {"phase": phase, "run_tokens": run_tokens, "learners": {"b": victim}}


@pytest.fixture
def story() -> Story:
    """A run of 100 tokens that has just begun; its start took 10 seconds."""
    story = Story("b", 100, started_at=0.0)
    assert story.hear(status(0, phase="seeding"), 5.0) is None
    assert story.hear(status(0), 10.0) is None
    return story


@pytest.mark.parametrize(
    "course",
    [
        [
            (status(39), 40.0, None, ""),
            (status(40), 50.0, "kill", "b was killed .*"),
            (status(50), 60.0, None, "b was killed .*"),
            (status(60), 70.0, "return", "b is starting again"),
            # Pushes of its first life do not count.
            (status(70, merged=9), 75.0, None, "b is starting again"),
            (status(80, "b.2"), 80.0, None, "b is back, warming up"),
            (status(90, "b.2", merged=1), 82.0, None, "b contributes again after 12.0 s"),
            (status(95, "b.2", merged=2), 90.0, None, "b contributes again after 12.0 s"),
        ],
        [
            (status(45), 20.0, "kill", "b was killed .*"),
            # It is dead for a second, so that it is seen.
            (status(45), 20.9, None, "b was killed .*"),
            # The rest takes 13 s at this pace, and the start of all took 10.
            (status(45), 21.0, "return", "b is starting again"),
        ],
        [
            (status(100, phase="ended"), 11.0, None, ""),
            (status(100, phase="ending"), 11.0, "kill", "b was killed .*"),
        ],
    ],
    ids=["once each", "it returns soon where the rest of the run is short", "until the run ends"],
)
def test_the_victim_dies_returns_and_contributes(
    story: Story, course: list[tuple[dict[str, Any], float, str | None, str]]
) -> None:
    for said, now, command, told in course:
        assert story.hear(said, now) == command
        assert re.fullmatch(told, story.tell())


def test_a_sparkline_shows_the_course() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 2.0]) == SPARKS[-1] + SPARKS[0]
    course = sparkline([10.0 / (1 + index) for index in range(333)])
    assert len(course) == SPARKS_MAX and list(course) == sorted(course, reverse=True)


@pytest.mark.parametrize("is_live", [True, False])
def test_sixty_columns_tell_the_story(story: Story, is_live: bool) -> None:
    console = Console(file=io.StringIO(), width=60, record=True, force_terminal=is_live)
    view = View(console, story, is_live=is_live)
    with view.shown:
        for tokens, now in ((20, 20.0), (40, 50.0), (60, 70.0)):
            said = status(tokens) | {"merges": 391, "up_bytes": 114.9e6, "down_bytes": 2.345e9}
            learner = {"steps": 1234, "contributions": 123, "state": "training", "loss": 2.0}
            said["learners"]["b"] |= learner
            story.hear(said, now)
            view.update(said | {"waiting_for": []})
    console.print(view.moment)
    told = console.export_text()
    assert "up 114.9 MB, down 2.35 GB" in told and "b was killed (SIGKILL)" in told
    assert max(map(len, told.splitlines())) <= 60


@pytest.mark.parametrize("kept, step", [(None, "narrows demo --keep"), (Path("x"), "journal show")])
def test_the_results_fit_into_60_columns(kept: Path | None, step: str) -> None:
    console = Console(file=io.StringIO(), width=60, record=True)
    row = json.loads(MEASURED.read_text())["rows"][0]
    console.print(report(row, kept))
    told = console.export_text()
    assert f"merged again {row['rejoin_s']:.1f} s after its start" in told, "no cell is broken"
    times = row["data_parallel_bytes"] / (row["up_bytes"] + row["down_bytes"])
    assert f"{times:.0f} times" in told and step in told and "examples/train.py" in told


def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 2 to 26 learners, 1 step or more, got 1 and"):
        demo(learners=1)
    with pytest.raises(ConfigError, match=r"exists.*new folder"):
        demo(keep=tmp_path)
    preset = PRESETS["tiny"]
    assert STEP_TOKENS == preset.batch * preset.context
