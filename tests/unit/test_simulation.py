"""Whole runs in virtual time with every fault: thirteen checkers are silent, and each can speak."""

import pytest

from narrows.bench.sim.planted import PLANTED, Planted, judge

PLANTED_SEEDS = 50


@pytest.mark.timeout(200)  # Ten runs take 15 s of a core, which others may need at the time.
def test_seeds(seeds: range) -> None:
    wrong = {seed: said for seed in seeds if (said := judge(seed)) is not None}
    assert not wrong


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.plant.__name__)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    seeds = range(planted.first_seed, planted.first_seed + PLANTED_SEEDS)
    said = (judge(seed, planted) or "" for seed in seeds)
    assert any(words.startswith(planted.checker) for words in said)
