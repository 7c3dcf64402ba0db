"""Options of the test suite, and data for its processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

SEEDS_PER_TEST = 10


def pytest_configure() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text that is quick to load, the same for all learners."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(40):
        lines = (f"{index} times {n} is {index * n}, says file {index}." for n in range(400))
        (folder / f"table-{index}.txt").write_text("\n".join(lines))
    return folder
