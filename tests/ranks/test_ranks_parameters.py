"""Parameters that two ranks share, as the exchange sees and saves them: real groups over gloo."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from acceptance.kit import Site
from sharded_cases import CASES, whole_model

from narrows.learner.parameters import Parameters, check_same_model
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import fingerprint

RANKS = 2


def meet(case: Callable[[Path], None], folder: Path, rank: int) -> None:
    """One rank: meets the others at a file in the folder. Its exit code is 1 if the case fails."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    case(folder)
    dist.barrier()
    dist.destroy_process_group()


def stages_of_a_pipeline_are_refused(folder: Path) -> None:
    """Each rank has other layers."""
    mine = whole_model().get_submodule("table" if dist.get_rank() == 0 else "hidden")
    told = [""] * RANKS
    dist.all_gather_object(told, fingerprint(Parameters(mine).layout))
    with pytest.raises(LocalProtocolError, match=r"ranks 1 have other parameters than rank 0"):
        check_same_model(told)


@pytest.mark.parametrize("case", [*CASES, stages_of_a_pipeline_are_refused])
def test_on_two_ranks(site: Site, case: Callable[[Path], None]) -> None:
    """Holds `Parameters`, `WeightWatch`; each case says what it shows."""
    ranks = range(RANKS)
    started = [site.fork(f"rank-{rank}", meet, case, site.folder, rank) for rank in ranks]
    for each in started:
        each.ends(0)
