"""The demo's arithmetic: traffic of data parallelism, digests, sparklines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from narrows.bench.demo import results as demo_results
from narrows.bench.demo.results import data_parallel_bytes, learner_steps
from narrows.bench.demo.story import DemoOptions, DemoStory
from narrows.bench.demo.view import SPARKS, sparkline
from narrows.bench.kit.evidence import Digests, compare_digests
from narrows.bench.quality.baselines import Baseline, Recipe, Report
from narrows.learner.reference.gpt import GPT


def test_two_learners_send_and_receive_the_whole_model_per_step() -> None:
    # Ring over two: each sends 2 * 1/2 of the model in bf16 and receives as much.
    assert data_parallel_bytes(2, parameters=1000, steps=1) == 2 * (1000 * 2) * 2


def test_a_differing_copy_is_found(tmp_path: Path) -> None:
    published = {(0, 1): "aa", (0, 2): "bb"}
    records = [
        {"event": "installed", "fragment": 0, "version": 0, "digest": "zz"},
        {"event": "installed", "fragment": 0, "version": 1, "digest": "aa"},
        {"event": "installed", "fragment": 0, "version": 2, "digest": "cc"},
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + '\n{"event": "inst')
    assert compare_digests(published, [tmp_path / "a.jsonl"]) == Digests(2, 1, 1)


def test_a_falling_loss_makes_a_falling_line() -> None:
    line = sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert line == SPARKS[::-1]
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == SPARKS[0] * 2


def test_the_baseline_tells_its_progress_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(_: object, recipe: Recipe, *, report: Report, **__: object) -> Baseline:
        assert recipe.steps == 1700
        report({"step": 20, "steps": 1500, "train_loss": 3.14159, "tokens": 1})
        return Baseline(cast(GPT, None), {"loss": 2.0})

    monkeypatch.setattr(demo_results, "train_data_parallel", train)
    said: list[str] = []
    results = demo_results.data_parallel(
        DemoOptions(),
        {"loss_alone": 3.0, "loss_global": 2.5, "learner_steps": 1700},
        say=said.append,
    )
    assert said == ["step 20 of 1500, training loss 3.142"]
    assert capsys.readouterr().out == ""
    assert results == {"loss_data_parallel": 2.0, "recovered": 0.5}


def test_a_learner_that_was_killed_does_not_tell_how_many_steps_one_made() -> None:
    options, summaries = DemoOptions(learners=3), [{"steps": 110}, {"steps": 30}, {"steps": 113}]
    story = DemoStory(victim="site-b", killed_at=5.0)
    assert learner_steps(summaries, options, story) == 112
    assert learner_steps(summaries, options, DemoStory(victim="site-b")) == 84
