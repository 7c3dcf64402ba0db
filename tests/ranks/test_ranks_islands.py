"""Islands of every kind train with a single process: real groups over gloo, a real broker."""

from dataclasses import replace

import pytest
from acceptance.kit import Site
from ranks.island import Island
from ranks.kit import check_whole_run, left, start

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


def test_ranks_with_equal_batches_push_the_bits_of_a_single_process(site: Site) -> None:
    """Codes and scales of a first push make its version: that of either run has the other's digest.
    The tokens are doubled. Holds `RanksIsland.read`."""
    digests: list[list[str]] = []
    tokens: list[int] = []
    for island in (Island("solo", 1), Island("ddp", 2, same_batches=True)):
        island = replace(island, batches=island.ranks * (8,))
        with Site(site.folder / island.kind) as own:
            own.broker("run.mode=diloco", "fragments.count=1", "fragments.overlap_steps=0")
            for each in start(own, "a", replace(island, same_batches=True)):
                each.ends(0)
            tokens.append(left(own, "a", 1)[0]["stats"]["merged_tokens"])
            digests.append([merge["digest"] for merge in own.merges()])
    single, double = digests
    assert single[0] == double[0] and len(single) == len(double)
    assert 0 < 2 * tokens[0] == tokens[1]
