"""Options of the test suite."""

from __future__ import annotations

import pytest

SEEDS_PER_TEST = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=300, help="simulated runs with faults")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first of them")
    parser.addoption("--rewrite", action="store_true", help="write the transcripts anew")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `seeds` get them in blocks."""
    if "seeds" in metafunc.fixturenames:
        first = int(str(metafunc.config.getoption("--first-seed")))
        count = int(str(metafunc.config.getoption("--seeds")))
        seeds = range(first, first + count)
        blocks = [seeds[i : i + SEEDS_PER_TEST] for i in range(0, count, SEEDS_PER_TEST)]
        metafunc.parametrize("seeds", blocks, ids=[f"{b[0]}-{b[-1]}" for b in blocks])
