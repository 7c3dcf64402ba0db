"""One member of an average by another system: the program that `narrows bench peers` starts.

It runs in that system's own environment, so it imports PyTorch, the system and the standard library
alone. `python peers_exchange.py SYSTEM RANK WORLD STORE_HOST OWN_HOST PARAMS EXCHANGES` prints a
JSON line for each exchange. Rank 0 holds the store, and the coordinator where a system has one. The
parent holds the standard input open, and a member ends when its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PORT = 29500
PATIENCE = timedelta(minutes=5)
WARM_UP = 2
"""Exchanges that are not counted: they make the connections, and TCP finds its window."""

BUCKET_ELEMENTS = (25 << 20) // 2
"""25 MiB of bfloat16, as DistributedDataParallel cuts gradients by default."""

MATCHMAKING_S = 1.0
"""Seconds for which hivemind looks for the group before the clock starts; its default is 5."""


@dataclass(frozen=True)
class Member:
    """One process of a measurement, and the store where all of them meet."""

    rank: int
    world: int
    host: str
    params: int
    store: Any

    def meet(self, place: str) -> None:
        """Returns when all members have come to `place`."""
        if self.store.add(f"{place} come", 1) == self.world:
            self.store.set(f"{place} go", "")
        self.store.wait([f"{place} go"], PATIENCE)

    def place(self, find: Callable[[], str]) -> str:
        """The address of the system's coordinator. Rank 0 calls `find` for it, and all get it."""
        if self.rank == 0:
            self.store.set("coordinator", find())
        return str(self.store.get("coordinator").decode())


@dataclass(frozen=True)
class System:
    """How a system averages."""

    average: Callable[[Tensor], Tensor]
    """Returns the mean of all members' values. It is timed."""
    tolerance: float
    """Largest error of the mean, relative in the 2-norm."""
    prepare: Callable[[Tensor], None] = lambda values: None
    """Finds the group, where a system looks for one. It is called before the clock starts."""
    holds: object = None
    """Servers that have to live as long as the system is used."""


def gloo(member: Member) -> System:
    """torch.distributed over Gloo in bfloat16, as DistributedDataParallel's hook compresses."""
    distributed.init_process_group(
        "gloo", store=member.store, rank=member.rank, world_size=member.world, timeout=PATIENCE
    )

    def average(values: Tensor) -> Tensor:
        parts = [
            each.bfloat16().div_(member.world) for each in torch.split(values, BUCKET_ELEMENTS)
        ]
        for work in [distributed.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        return torch.cat(parts).float()

    return System(average, 2e-2)


def torchft(member: Member) -> System:
    """Manager.allreduce over Gloo with its quorum and its vote.

    Without Triton, as on any CPU, torchft sends float32 even if it is told to quantise.
    """
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    lighthouse: Any = None
    if member.rank == 0:
        lighthouse = LighthouseServer(
            bind="0.0.0.0:0", min_replicas=member.world, join_timeout_ms=60_000
        )
    place = member.place(lambda: f"http://{member.host}:{lighthouse.address().rpartition(':')[2]}")
    own = TCPStore(member.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=None, state_dict=None,
        min_replica_size=member.world, use_async_quorum=False, timeout=PATIENCE,
        quorum_timeout=PATIENCE, rank=0, world_size=1, store_addr=member.host, store_port=own.port,
        lighthouse_addr=place, replica_id=f"member_{member.rank}",
        hostname=member.host, init_sync=False,
    )  # fmt: skip

    def average(values: Tensor) -> Tensor:
        manager.start_quorum()
        manager.allreduce(values).wait()
        if not manager.should_commit():
            raise RuntimeError(f"torchft refused the step: {manager.errored()}")
        return values

    return System(average, 1e-5, holds=(lighthouse, own))


def hivemind(member: Member) -> System:
    """DecentralizedAverager with 8-bit codes; it finds its group before the clock starts."""
    from hivemind import DHT, DecentralizedAverager  # type: ignore[import-not-found]
    from hivemind.averaging.control import AveragingStage  # type: ignore[import-not-found]
    from hivemind.compression import Uniform8BitQuantization  # type: ignore[import-not-found]
    from hivemind.utils import get_dht_time  # type: ignore[import-not-found]

    def node(peers: list[str]) -> Any:
        return DHT(
            initial_peers=peers, start=True, host_maddrs=[f"/ip4/{member.host}/tcp/0"],
            auto_nat=False, nat_port_map=False, use_relay=False,
        )  # fmt: skip

    # Rank 0 is the node that all others find.
    first: Any = node([]) if member.rank == 0 else None
    place = member.place(lambda: str(first.get_visible_maddrs()[0]))
    averager = DecentralizedAverager(
        [torch.zeros(member.params)], first or node([place]), start=True, prefix="exchange",
        target_group_size=member.world, min_group_size=member.world,
        min_matchmaking_time=MATCHMAKING_S, request_timeout=MATCHMAKING_S / 2,
        compression=Uniform8BitQuantization(),
    )  # fmt: skip
    control: Any = None

    def prepare(values: Tensor) -> None:
        nonlocal control
        with averager.get_tensors() as tensors:
            tensors[0].copy_(values)
        control = averager.step(
            scheduled_time=get_dht_time() + MATCHMAKING_S, timeout=PATIENCE.total_seconds(),
            require_trigger=True, wait=False,
        )  # fmt: skip
        while control.stage != AveragingStage.AWAITING_TRIGGER:
            if control.done():
                raise RuntimeError(f"hivemind found no group: {control.exception()}")
            time.sleep(0.002)

    def average(values: Tensor) -> Tensor:
        control.allow_allreduce()
        group = control.result() or ()
        if len(group) != member.world:
            raise RuntimeError(f"hivemind averaged {len(group)} of {member.world}")
        with averager.get_tensors() as tensors:
            return values.copy_(tensors[0])

    return System(average, 5e-2, prepare)


def measure(member: Member, system: System, exchanges: int) -> None:
    """Averages known values again and again. Raises ArithmeticError for a wrong mean."""
    base = torch.randn(member.params, generator=torch.Generator().manual_seed(0))
    for number in range(-WARM_UP, exchanges):
        shift = WARM_UP + number + 1  # Another mean each time: a stale result is found.
        values = base * (shift + member.rank)
        wanted = base * (shift + (member.world - 1) / 2)
        system.prepare(values)
        member.meet(f"exchange {number}")
        started_s = time.perf_counter()
        result = system.average(values)
        seconds = time.perf_counter() - started_s
        error = float((result - wanted).norm() / wanted.norm())
        if not error <= system.tolerance:
            raise ArithmeticError(f"the mean is off by {error:.2g}, expected {system.tolerance:g}")
        if number >= 0:
            print(json.dumps({"exchange": number, "seconds": seconds}), flush=True)
    # A member that leaves early would take away parts that others need. Rank 0 leaves last, because
    # it holds the store.
    member.meet("end")
    if member.rank:
        member.store.set(f"left {member.rank}", "")
    else:
        member.store.wait([f"left {rank}" for rank in range(1, member.world)], PATIENCE)


def end_with_parent() -> None:
    os.read(0, 1)  # sys.stdin has a lock, which a fork of hivemind's would wait for without end.
    os.killpg(0, signal.SIGKILL)  # The forks too: this process leads a group of its own.


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    name, rank, world, store_host, host, params, exchanges = sys.argv[1:]
    torch.set_num_threads(1)
    store = TCPStore(
        store_host, PORT, is_master=rank == "0", wait_for_workers=False, timeout=PATIENCE
    )
    member = Member(int(rank), int(world), host, int(params), store)
    system = {"gloo": gloo, "torchft": torchft, "hivemind": hivemind}[name](member)
    measure(member, system, int(exchanges))
    os._exit(0)  # The systems' threads would be torn down while others use their connections.


if __name__ == "__main__":
    main()
