"""Parameters that two ranks share, as the exchange sees and saves them: real groups over gloo."""

from collections.abc import Callable
from pathlib import Path

import pytest
from acceptance.kit import Site
from ranks import sharded


def on_every_rank(site: Site, work: Callable[[Path], None]) -> None:
    """Runs the work on all ranks, and expects that each ends in order."""
    started = [
        site.fork(f"rank-{rank}", sharded.meet, work, site.folder, rank)
        for rank in range(sharded.RANKS)
    ]
    for each in started:
        each.ends(0)


def test_a_spread_model_has_the_layout_and_the_file_of_a_single_process(site: Site) -> None:
    """Holds `Parameters`, `whole`."""
    on_every_rank(site, sharded.layouts)
    one = (site.folder / "one-0.safetensors").read_bytes()
    for make in sharded.SHARDINGS:
        assert (site.folder / f"{make.__name__}.safetensors").read_bytes() == one
        sharded.loaded(site.folder, make.__name__)


@pytest.mark.parametrize(
    "work",
    [
        sharded.saves_on_one_rank_alone,
        sharded.no_place_for_the_file,
        sharded.evaluated,
        sharded.stranger,
        sharded.stages,
    ],
)
def test_on_two_ranks(site: Site, work: Callable[[Path], None]) -> None:
    """The docstring of each says what it shows."""
    on_every_rank(site, work)
