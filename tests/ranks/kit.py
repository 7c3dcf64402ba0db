"""Islands of ranks beside a broker, and the judgement of what they leave."""

import json
from typing import Any

from acceptance.kit import Site, equal
from ranks.island import TOKENS, Island, counting, learn

from narrows.bench.kit.processes import Child

SOLO = Island(kind="solo", ranks=1)


def start(site: Site, name: str, island: Island) -> list[Child]:
    """Starts the ranks of a learner; `site.broker` has been called."""
    return [
        site.fork(f"{name}-{rank}", learn, site.folder, name, site.address, island, rank)
        for rank in range(island.ranks)
    ]


def left(site: Site, name: str, ranks: int) -> list[dict[str, Any]]:
    """Reads what each rank has told at its end."""
    files = [site.folder / f"{name}.{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def check_whole_run(site: Site, island: Island, *, merged: int) -> None:
    """Runs an island beside a single process until the run ends, and judges all that they leave:
    so many merged pushes at least, equal bits, one clock, no token lost, a clean journal."""
    alone = Island(kind="solo", ranks=1, bfloat16=island.bfloat16)
    children = [*start(site, "island", island), *start(site, "solo", alone)]
    for each in children:
        each.ends(0)
    site.running["broker"].ends(0)
    assert site.contributions("island") >= merged
    assert site.contributions("solo") >= merged
    assert equal(site.saved("island"), site.saved("solo"))
    site.tell("journal", "audit", str(site.state))

    ranks = left(site, "island", island.ranks)
    leader = ranks[0]
    assert {each["steps"] for each in ranks} == {leader["steps"]}
    assert {each["health"] for each in ranks} == {"final"}
    assert {each["groups_left"] for each in ranks} == {2}, "a learner keeps its groups"
    assert {each["metrics"]["narrows/progress"] for each in ranks} == {1.0}
    assert all(each["rates"] == leader["rates"] for each in ranks), "ranks have clocks of their own"
    assert len(set(leader["rates"])) > 1
    logged = leader["steps"] * island.accumulate * TOKENS * len(counting(island))
    stats = leader["stats"]
    assert stats["logged_tokens"] == logged
    # Each of the two is rounded down to whole tokens.
    assert logged - 2 <= stats["merged_tokens"] + stats["lost_tokens"] <= logged
    for twins in replicas(island):
        digests = {ranks[rank]["digest"] for rank in twins}
        assert len(digests) == 1, f"ranks {twins} have drifted apart"


def replicas(island: Island) -> list[list[int]]:
    """Ranks that hold the same of every parameter."""
    every = range(island.ranks)
    if island.kind == "ddp":
        return [list(every)]
    if island.kind == "hsdp":
        shards = island.ranks // 2
        return [[rank for rank in every if rank % shards == shard] for shard in range(shards)]
    return []
