"""The attack bench with tiny runs: every attack does what its name says, every row is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from narrows.bench.attack.poison import (
    GROUPS,
    RULES,
    PoisonCell,
    attacks,
    run_cell,
    run_poison_bench,
    texts_of,
)
from narrows.bench.attack.poisons import ATTACKS
from narrows.bench.attack.report import honest_alarms, summary, table
from narrows.bench.commands import bench
from narrows.proto.errors import ConfigError

pytestmark = pytest.mark.slow

STEPS = 40


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "nobody"])
def test_an_attack_has_its_length_and_direction(name: str) -> None:
    rng = np.random.default_rng(1)
    base, local = (rng.normal(size=5000).astype(np.float32) for _ in range(2))
    poison = ATTACKS[name]
    assert poison is not None
    honest, pushed = base - local, base - poison(base, local, Random(1))
    ratio = float(np.linalg.norm(pushed) / np.linalg.norm(honest))
    cosine = float(honest @ pushed / np.linalg.norm(honest) / np.linalg.norm(pushed))
    expected = {"push x10^4": 1e4, "noise at the bound": 1.5, "noise x1000": 1e3}
    length = expected[name] if name in expected else float(name.removeprefix("sign-flip x"))
    assert ratio == pytest.approx(length, rel=1e-2)
    direction = 0.0 if name.startswith("noise") else 1.0 if name.startswith("push") else -1.0
    assert cosine == pytest.approx(direction, abs=0.05)


def test_a_liar_is_named_and_the_others_train_on(tmp_path: Path) -> None:
    cells = [PoisonCell("attacks", "defaults", 3, name) for name in ("nobody", "sign-flip x10")]
    rows = [run_cell(replace(cell, steps=STEPS), 1) for cell in cells]
    quiet, attacked = rows
    assert quiet["named"] == {} and quiet["rounds"] > 10
    assert attacked["named"] == {"learner-0": 8}
    assert attacked["test_loss"] < 1.15 * quiet["test_loss"]
    told = summary(rows)
    assert told[0]["loss_ratio"] == 1.0 and told[1]["loss_ratio"] < 1.15
    assert told[1]["named_after_rounds"] == [8] and told[1]["others_named"] == []
    assert honest_alarms(rows)["the same text"]["learners_named"] == 0
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(told))
    assert "sign-flip x10" in captured.get()


@pytest.mark.parametrize(("learners", "most"), [(2, 0.8), (4, 1 / 3)])
@pytest.mark.parametrize("claims", ["one step", "tokens, one step"])
def test_claims_raise_a_weight_by_tokens_up_to_its_limit(
    learners: int, most: float, claims: str
) -> None:
    cell = PoisonCell("tokens", "weights by tokens", learners, claims=claims, steps=STEPS)
    row = run_cell(replace(cell, settings=RULES["weights by tokens"]), 2)
    assert 1.2 / learners < row["attacker_share"] <= most + 1e-9


def test_claims_do_nothing_to_equal_weights_and_everything_before() -> None:
    cell = PoisonCell("tokens", "defaults", 3, claims="one step", steps=STEPS)
    before = replace(cell, rules="before", settings=RULES["before"])
    equal, claimed = run_cell(cell, 2), run_cell(before, 2)
    assert equal["attacker_share"] == pytest.approx(1 / 3)
    assert 0.45 < claimed["attacker_share"] <= 0.5


def test_learners_of_unequal_text_read_different_texts() -> None:
    for kind in ("kinds", "parts"):
        texts = list(texts_of(kind).values())
        assert len(texts) == 4 and len({bytes(text[:1000]) for text in texts}) == 4
    assert texts_of("") == {}


def test_the_bench_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rows_file = tmp_path / "result.json", tmp_path / "rows.jsonl"
    monkeypatch.setitem(GROUPS, "attacks", lambda: attacks()[:1])

    def run() -> dict[str, Any]:
        run_poison_bench(rows_file, file, steps=STEPS, seeds=[1], groups=["attacks"], workers=1)
        told: dict[str, Any] = json.loads(file.read_text())
        return told

    first, again = run(), run()
    assert first == again and first["bench"] == "attack poison"
    assert len(rows_file.read_text().splitlines()) == 1
    with pytest.raises(ConfigError):
        run_poison_bench(rows_file, None, steps=STEPS, seeds=[1], groups=["x"], workers=1)


def test_the_command_is_there() -> None:
    assert "poison" in bench["attack"]
