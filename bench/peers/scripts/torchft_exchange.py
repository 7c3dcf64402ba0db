"""Averages with torchft: `Manager.allreduce` over Gloo, quorum and commit vote included."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.exchange import (
    MEETING_TIMEOUT,
    PLACE,
    hold,
    measure,
    task_of,
    use_interface_of,
)

JOIN_TIMEOUT_MS = 60_000
"""Longest wait of the first quorum for late members."""


def main() -> None:
    # Without Triton, as on any CPU, torchft sends float32 even if quantisation is on.
    task = task_of(("f32",))
    store = task.store()
    if task.coordinator:
        lighthouse = LighthouseServer(
            bind="0.0.0.0:0", min_replicas=task.world, join_timeout_ms=JOIN_TIMEOUT_MS
        )
        port = lighthouse.address().rpartition(":")[2]
        hold(store, f"http://{task.host}:{port}")
        lighthouse.shutdown()
        return
    use_interface_of(task.host)
    # Each replica group has its own store. Without one the constructor would wait for ever.
    own = TCPStore(task.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=MEETING_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=task.world,
        use_async_quorum=False,
        timeout=MEETING_TIMEOUT,
        quorum_timeout=MEETING_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=task.host,
        store_port=own.port,
        lighthouse_addr=store.get(PLACE).decode(),
        replica_id=f"member_{task.rank}",
        hostname=task.host,
        init_sync=False,
    )

    def average(values: Tensor) -> Tensor:
        manager.start_quorum()
        manager.allreduce(values).wait()
        if not manager.should_commit():
            raise RuntimeError(f"torchft refused the step: {manager.errored()}")
        return values

    measure(task, store, average, tolerance=1e-5)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
