"""Averages with torch.distributed over Gloo as DistributedDataParallel does with gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# The environment of another system has no narrows.
sys.path.append(str(Path(__file__).resolve().parents[3] / "src"))

from narrows.bench.peers.exchange import MEETING_TIMEOUT, hold, measure, task_of, use_interface_of

BUCKET_BYTES = 25 << 20
"""`bucket_cap_mb` of DistributedDataParallel."""

TOLERANCES = {"f32": 1e-5, "bf16": 2e-2}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def average(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Averages all buckets at the same time. `bf16` is as `bf16_compress_hook`: cast, divide, sum,
    cast."""
    buckets = torch.split(values, BUCKET_BYTES // values.element_size())
    world = dist.get_world_size()
    cast = [bucket.to(dtype, copy=True).div_(world) for bucket in buckets]
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in cast]:
        work.wait()
    for bucket, mean in zip(buckets, cast, strict=True):
        bucket.copy_(mean)
    return values


def main() -> None:
    task = task_of(tuple(DTYPES))
    store = task.store()
    if task.coordinator:
        hold(store)
        return
    use_interface_of(task.host)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.world, timeout=MEETING_TIMEOUT
    )
    dtype, tolerance = DTYPES[task.variant], TOLERANCES[task.variant]
    measure(task, store, lambda values: average(values, dtype), tolerance=tolerance)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
