"""The baselines: repeatable, equal in tokens, and data parallel is one large batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from narrows.bench.quality import baselines
from narrows.bench.quality.baselines import Progress, Recipe, train_alone, train_data_parallel
from narrows.learner.reference import gpt
from narrows.learner.reference.corpus import Corpus, Reader, load_corpus
from narrows.learner.reference.gpt import GPT, GPTConfig, token_tensor
from narrows.proto.errors import ConfigError

NANO = GPTConfig(layers=1, heads=2, width=16, context=12, batch=2, peak_learning_rate=1e-2)


@pytest.fixture(autouse=True)
def nano(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt.PRESETS, "nano", NANO)


@pytest.fixture
def corpus() -> Corpus:
    words = np.random.default_rng(0).choice([b"to ", b"be ", b"or ", b"not "], 4000).tolist()
    text = np.frombuffer(b"".join(words), np.uint8)
    return Corpus(text[2000:], text[:1000], text[1000:2000], 1, (), "00")


def recipe(steps: int) -> Recipe:
    return Recipe(steps=steps, preset="nano", batch=2)


def test_the_same_recipe_gives_the_same_bits(corpus: Corpus) -> None:
    first, again = train_alone(corpus, recipe(5)), train_alone(corpus, recipe(5))
    assert first.record["loss"] == again.record["loss"]
    other = train_alone(corpus, Recipe(steps=5, preset="nano", batch=2, seed=1))
    assert other.record["loss"] != first.record["loss"]


def test_it_learns_and_tells(corpus: Corpus) -> None:
    told: list[Progress] = []
    short = train_alone(corpus, recipe(1))
    long = train_alone(corpus, recipe(60), report=told.append)
    assert long.record["loss"] < short.record["loss"] - 0.5
    assert told[-1]["step"] == told[-1]["steps"] == 60
    assert told[-1]["tokens"] == long.record["tokens"] == 60 * 2 * NANO.context


def test_data_parallel_has_the_gradient_of_all_batches(corpus: Corpus) -> None:
    names = ["a", "b", "c"]
    readers = [Reader(corpus.train, batch=2, context=12, name=name) for name in names]
    batches = [next(reader) for reader in readers]
    model, twin = GPT(NANO), GPT(NANO)
    again = [Reader(corpus.train, batch=2, context=12, name=name) for name in names]
    baselines.accumulate(model, again)
    x, y = (np.concatenate([batch[side] for batch in batches]) for side in (0, 1))
    twin.loss(token_tensor(x), token_tensor(y)).backward()  # type: ignore[no-untyped-call]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_data_parallel_counts_the_tokens_of_all(corpus: Corpus) -> None:
    record = train_data_parallel(corpus, recipe(3), names=["a", "b", "c"]).record
    assert record["tokens"] == 3 * train_alone(corpus, recipe(3)).record["tokens"]
    assert record["steps"] == 3 and record["kind"] == "data_parallel"


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alone.json"
    baselines.alone(steps=1, preset="nano", json=path)
    written = json.loads(path.read_text())
    assert written["corpus_digest"] == load_corpus().corpus_digest
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["step"] == 1 and lines[-1] == written


def test_no_steps_are_no_baseline() -> None:
    with pytest.raises(ConfigError, match="positive"):
        Recipe(steps=0)
