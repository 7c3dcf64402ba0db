"""Parameters that two ranks share, as the exchange sees and saves them: real groups over gloo."""

from collections.abc import Callable
from pathlib import Path

import pytest
from acceptance.kit import Site
from model_cases import VOCABULARY
from ranks import shared
from sharded_cases import CASES


def test_an_island_evaluates_at_any_time(site: Site) -> None:
    """Holds `Parameters.reshard`, `WeightWatch`."""
    site.broker(goal_tokens=2 * VOCABULARY * 4 * shared.STRANGER_AT)
    on_every_rank(site, shared.evaluates_at_any_time_and_a_stranger_is_told)


@pytest.mark.parametrize("case", [*CASES, shared.stages_of_a_pipeline_are_refused])
def test_on_two_ranks(site: Site, case: Callable[[Path], None]) -> None:
    """Holds `Parameters`, `WeightWatch`; each case says what it shows."""
    on_every_rank(site, case)


def on_every_rank(site: Site, case: Callable[[Path], None]) -> None:
    """Runs a case on all ranks, and expects that it holds on each."""
    ranks = range(shared.RANKS)
    started = [site.fork(f"rank-{rank}", shared.meet, case, site.folder, rank) for rank in ranks]
    for each in started:
        each.ends(0)
