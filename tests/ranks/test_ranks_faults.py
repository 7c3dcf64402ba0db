"""Ranks that end, raise, hang, or see another loop than the others: over gloo, with a broker."""

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import psutil
import pytest
from acceptance.kit import Site
from ranks import gone, refused
from ranks import island as islands
from ranks.interrupted import interrupted
from ranks.island import TOKENS, Island
from ranks.kit import SOLO, left, start

from narrows.bench.kit.processes import Child, wait_until


@pytest.mark.parametrize(
    ("island", "steps", "batches"),
    [
        (Island("ddp", 2, batches=(1000, 37)), 37, 37),
        (Island("fsdp", 2, batches=(38, 1000), accumulate=4), 9, 38),
    ],
    ids=["a rank", "the leader, within a step"],
)
def test_all_ranks_end_when_the_loader_of_one_does(
    site: Site, island: Island, steps: int, batches: int
) -> None:
    """Holds `RanksExchange.batches`."""
    site.broker()
    for each in start(site, "island", island):
        each.ends(0)
    ranks = left(site, "island", island.ranks)
    assert [(each["steps"], each["batches"]) for each in ranks] == 2 * [(steps, batches)]
    assert ranks[0]["stats"]["logged_tokens"] == steps * island.accumulate * 2 * TOKENS


def programs(site: Site, island: Island) -> list[Child]:
    """Starts the ranks as programs, which end as Python does. (Forks of the tests' server end more
    quickly.)"""
    return [
        site.shell(f"rank-{rank}", sys.executable, *arguments(site, island, rank))
        for rank in range(island.ranks)
    ]


def arguments(site: Site, island: Island, rank: int) -> list[str]:
    told = json.dumps(asdict(island))
    return [islands.__file__, str(site.folder), "island", site.address, told, str(rank)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", ["leaves", "raises"])
def test_a_rank_that_goes_alone_ends_all_and_each_names_both(
    site: Site, kind: str, what: str
) -> None:
    """Holds `RanksExchange.abort`, `Ranks.leave`."""
    site.broker()
    fault = Island(
        kind, 2, leaves_at=25 * (what == "leaves"), raises_at=25 * (what == "raises")
    )  # fmt: skip
    leader, other = programs(site, fault)
    for each in (leader, other):
        each.ends(1)
        assert "rank 0 " in each.log and "rank 1 " in each.log, each.log
        assert "after 25 steps" in each.log
    if what == "raises":
        assert "this rank's data is gone" in other.log
        assert "The log of rank 1 says why" in leader.log


def test_a_rank_ends_though_a_sum_is_on_its_way(site: Site) -> None:
    """The other one waits for it in a collective of training's. Holds `Ranks.leave`."""
    site.wait_s = 60.0  # Two programs import torch.
    given = [gone.__file__, f"file://{site.folder / 'meeting'}"]
    ranks = [site.shell(f"rank-{rank}", sys.executable, *given, str(rank)) for rank in range(2)]
    for each in reversed(ranks):
        each.ends(1)
    assert "this rank ends" in ranks[1].log


def test_an_error_of_the_leader_is_raised_on_every_rank(site: Site) -> None:
    """A run of another model refuses it. Holds `RanksExchange._lead`."""
    site.broker()
    solo = start(site, "solo", SOLO)
    site.steps_on(1, "solo.0")
    leader, other = start(site, "island", Island("fsdp", 2, bfloat16=True))
    for each in (leader, other):
        each.ends(1)
        assert "Refused: layout_differs" in each.log
    assert "rank 0 has told rank 1" in other.log
    solo[0].kill()


@pytest.mark.parametrize("work", refused.CASES)
def test_all_ranks_refuse_what_cannot_be(site: Site, work: Callable[[], None]) -> None:
    """Holds `counts_tokens`, `Ranks`."""
    for each in [
        site.fork(f"rank-{rank}", refused.meet, work, site.folder, rank) for rank in range(2)
    ]:
        each.ends(0)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_signal_in_the_middle_of_an_adoption_ends_all_and_leaves_nothing_half_adopted(
    site: Site, kind: str, who: int
) -> None:
    """Its own process goes on meanwhile. Holds `Ranks.exchanging`, `Ranks.leave`."""
    site.broker("fragments.count=2")
    given = (site.folder, site.address, kind, who)
    ranks = [site.fork(f"rank-{rank}", interrupted, *given, rank) for rank in range(3)]
    for each in ranks:
        each.ends(0)


# Under torchrun.

VERSIONS = 500
"""The other learner contributes to so many while a rank hangs."""


def torchrun(site: Site, kind: str, *, restarts: int) -> Child:
    """Starts an island of two ranks as a user does."""
    # Else a second life may read the addresses of the first one: github.com/pytorch, issue 135712.
    site.environment["island"] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts}"
    given = arguments(site, Island(kind, 2), 0)
    return site.shell(
        "island", sys.executable, *command.split(), "--monitor-interval", "0.2", *given
    )


def ranks_of(child: Child) -> dict[int, psutil.Process]:
    """The living ranks that torchrun has started."""
    found: dict[int, psutil.Process] = {}
    for each in psutil.Process(child.pid).children(recursive=True):
        environment = each.environ()
        if "RANK" in environment:
            found[int(environment["RANK"])] = each
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_island_comes_back_after_the_kill_of_a_rank(site: Site, rank: int) -> None:
    """The others train on meanwhile. How long it takes is printed."""
    site.broker()
    solo = start(site, "solo", SOLO)
    started_at = time.monotonic()
    island = torchrun(site, "fsdp", restarts=2)

    def lives(count: int) -> None:
        """So many lives of the island have joined, and a push of the last one is merged."""
        joined = "the model is here"
        wait_until(lambda: island.log.count(joined) == count, joined, island, timeout_s=100.0)
        site.contribute("island")

    lives(1)
    start_s = time.monotonic() - started_at
    ranks_of(island)[rank].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    site.contribute("solo", count=20)
    lives(2)
    back_s = time.monotonic() - killed_at
    print(f"merged again {back_s:.1f} s after the SIGKILL, the start took {start_s:.1f} s")
    island.signal(signal.SIGTERM)
    island.process.join(site.wait_s)
    solo[0].kill()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_an_island_one_of_whose_ranks_hangs(site: Site, rank: int) -> None:
    """The other one makes versions alone until the rank goes on. Then both make them."""
    site.wait_s = 90.0  # So many versions take some ten seconds.
    site.broker("run.learners_at_start=2")
    solo = start(site, "solo", SOLO)
    ranks = start(site, "island", Island("fsdp", 2))
    site.contribute("island")
    ranks[rank].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    site.contribute("solo", count=VERSIONS)
    hung_s = time.monotonic() - stopped_at
    # What the island had sent before is merged long since.
    assert all(each["contributors"] == ["solo"] for each in site.merges()[-20:])

    def states() -> dict[str, str]:
        return {name: each["state"] for name, each in site.status()["learners"].items()}

    if rank == 0:  # Of another one that hangs a status tells after a minute.
        wait_until(lambda: states()["island"] != "training", "no training", *solo)
    assert states()["solo"] == "training"
    before = site.contributions("solo")
    ranks[rank].signal(signal.SIGCONT)
    site.contribute("island")
    behind = site.contributions("solo") - before
    print(f"after {hung_s:.1f} s of hanging {behind} merges of the other until the island's first")
    site.contribute("island", count=3)
    for each in (*ranks, *solo):
        each.kill()
