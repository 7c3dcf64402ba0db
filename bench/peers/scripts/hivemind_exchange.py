"""Averages with hivemind: `DecentralizedAverager`, the group found before the clock starts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
from hivemind.utils import get_dht_time
from torch import Tensor

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.exchange import MEETING_TIMEOUT, PLACE, hold, measure, task_of

COMPRESSIONS: dict[str, tuple[Any, float]] = {
    "none": (NoCompression, 1e-5),
    "fp16": (Float16Compression, 2e-3),
    "uniform8bit": (Uniform8BitQuantization, 5e-2),
}
"""Class, and largest relative error of the average."""

MATCHMAKING_S_PER_MEMBER = 0.5
"""Matchmaking time per member, before the clock starts. A group must be complete, so more members
need more time on a busy machine. The default of 5 s for any number would only make the bench
longer."""

POLL_S = 0.002


def start_dht(host: str, initial_peers: list[str]) -> DHT:
    """A node that listens and announces itself at `host`, and contacts nobody outside."""
    return DHT(
        initial_peers=initial_peers,
        start=True,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )


class Averaging:
    """The steps of one averager in two halves: find the group, then average."""

    def __init__(self, averager: DecentralizedAverager, world: int, matchmaking_s: float) -> None:
        self.averager, self.world, self.matchmaking_s = averager, world, matchmaking_s
        self.control: Any = None

    def prepare(self, values: Tensor) -> None:
        with self.averager.get_tensors() as tensors:
            tensors[0].copy_(values)
        self.control = self.averager.step(
            scheduled_time=get_dht_time() + self.matchmaking_s,
            timeout=MEETING_TIMEOUT.total_seconds(),
            require_trigger=True,
            wait=False,
        )
        while self.control.stage != AveragingStage.AWAITING_TRIGGER:
            if self.control.done():
                raise RuntimeError(f"hivemind found no group: {self.control.exception()}")
            time.sleep(POLL_S)

    def average(self, values: Tensor) -> Tensor:
        self.control.allow_allreduce()
        group = self.control.result()
        if group is None or len(group) != self.world:
            raise RuntimeError(f"hivemind averaged {group and len(group)} of {self.world} members")
        with self.averager.get_tensors() as tensors:
            return values.copy_(tensors[0])


def main() -> None:
    task = task_of(tuple(COMPRESSIONS))
    store = task.store()
    if task.coordinator:
        dht = start_dht(task.host, [])
        hold(store, str(dht.get_visible_maddrs()[0]))
        dht.shutdown()
        return
    dht = start_dht(task.host, [store.get(PLACE).decode()])
    matchmaking_s = MATCHMAKING_S_PER_MEMBER * task.world
    compression, tolerance = COMPRESSIONS[task.variant]
    averager = DecentralizedAverager(
        [torch.zeros(task.params)],
        dht,
        start=True,
        prefix="exchange",
        target_group_size=task.world,
        min_group_size=task.world,
        min_matchmaking_time=matchmaking_s,
        request_timeout=matchmaking_s / 2,
        compression=compression(),
    )
    averaging = Averaging(averager, task.world, matchmaking_s)
    measure(task, store, averaging.average, tolerance=tolerance, prepare=averaging.prepare)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
