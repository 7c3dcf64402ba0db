"""Islands of every kind train with a single process: real groups over gloo, a real broker."""

import pytest
from acceptance.kit import Site
from ranks.island import Island
from ranks.kit import check_whole_run

ISLANDS = (
    Island("ddp", 2), Island("fsdp", 2), Island("fsdp", 4), Island("hsdp", 4), Island("tp", 2),
    Island("fsdp_tp", 4), Island("fsdp", 2, bfloat16=True), Island("ddp", 2, bfloat16=True),
    Island("fsdp", 2, accumulate=4), Island("ddp", 2, accumulate=4),
    Island("fsdp", 2, compiled=True), Island("ddp", 2, compiled=True),
)  # fmt: skip


def described(island: Island) -> str:
    more = [name for name in ("bfloat16", "compiled") if getattr(island, name)]
    more += ["accumulate"] if island.accumulate > 1 else []
    return "-".join([island.kind, str(island.ranks), *more])


@pytest.mark.parametrize("island", ISLANDS, ids=described)
def test_an_island_ends_with_the_bits_of_a_single_process(site: Site, island: Island) -> None:
    """Holds `RanksExchange`, `Ranks.gather`, `Ranks.scatter`."""
    site.broker("run.learners_at_start=2", "fragments.count=3", goal_tokens=12_000)
    check_whole_run(site, island, merged=20)
