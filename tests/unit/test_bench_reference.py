"""The reference worker: its text, its model, and what it says before it trains."""

import importlib.util
import math
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from narrows.bench import bandwidth, chaos, loop
from narrows.bench.reference import worker
from narrows.bench.reference.gpt import GPT, PRESETS, learning_rate, make_optimizer
from narrows.bench.reference.text import SECTION_BYTES, SIDE_BYTES_MIN, Text, load_text
from narrows.bench.reference.worker import Options, learner
from narrows.proto.errors import ConfigError


def counting(train: int) -> Text:
    """A text that tells at which place a token was read."""
    return Text(np.arange(train, dtype=np.uint8), np.arange(100, dtype=np.uint8), 1)


def test_a_file_is_on_the_side_of_its_name(tmp_path: Path) -> None:
    """Holds `load_text`."""
    for index in range(60):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * SIDE_BYTES_MIN)
    (tmp_path / "image.png").write_bytes(b"\xff" * 4096)
    text = load_text(tmp_path)
    train = set(text.train.tolist())
    validation = set(text.validation.tolist())
    assert train | validation == set(range(60)) and not train & validation
    (tmp_path / "0.txt").write_bytes(b"\xfe" * 4096)
    changed = load_text(tmp_path)
    assert (0xFE in changed.train.tolist()) == (0 in train)


def test_one_long_file_has_both_sides(tmp_path: Path) -> None:
    """Holds `load_text`."""
    whole = b"".join(bytes([index]) * SECTION_BYTES for index in range(40))
    (tmp_path / "book.txt").write_bytes(whole)
    text = load_text(tmp_path)
    assert len(text.validation) and len(text.train) + len(text.validation) == len(whole)


def test_too_little_text_is_told(tmp_path: Path) -> None:
    """Holds `load_text`."""
    (tmp_path / "notes.txt").write_text("few words")
    with pytest.raises(ConfigError, match=r"too little text in .*expected .* got .* in 1 files"):
        load_text(tmp_path)
    for preset in PRESETS.values():
        assert preset.batch * preset.context < SIDE_BYTES_MIN, "the shortest text has a batch"


def test_batches_cover_the_text_once_a_pass() -> None:
    """Holds `Text.tokens`."""

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
    """Holds `GPT`."""
    model = GPT(PRESETS["nano"])
    text = load_text()
    assert len(text.train) > 3e6 and 5e4 < len(text.validation) < len(text.train) / 10
    assert all(map(torch.equal, model.parameters(), GPT(PRESETS["nano"]).parameters()))
    assert model.head.weight is model.embedding.weight
    x = torch.from_numpy(text.validation_windows(context=64, count=1))[:, :-1]
    changed = x.clone()
    changed[0, 40] ^= 1
    before = model(x)
    after = model(changed)
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
    """Holds `PRESETS`."""
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
    """Holds `need_torch`."""
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


@pytest.mark.parametrize(
    ("variables", "fsdp", "told"),
    [
        ({}, True, "torchrun --nproc-per-node 2 -m narrows learner --fsdp"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False, "add --fsdp"),
    ],
)
def test_torchrun_and_fsdp_go_together(
    variables: dict[str, str], fsdp: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `_check_ranks`."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        learner(Options(name="site-a", broker="tcp://127.0.0.1:1", fsdp=fsdp))
