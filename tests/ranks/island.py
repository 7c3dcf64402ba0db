"""A learner of several ranks, as a user writes it: what each rank runs in the tests."""

import hashlib
import itertools
import json
import logging
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from narrows.learner import Learner
from narrows.learner.parameters import local_part

WIDTH = 12
HIDDEN = 20
TOKENS = 8
"""Tokens of each rank's batch."""


class Block(nn.Module):
    """A feed-forward layer with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Two blocks between an embedding and the head that is tied to it. Some of its vectors have
    fewer elements than there are ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.gain
        return out


@dataclass(frozen=True)
class Island:
    """One learner of so many ranks, and what befalls it."""

    kind: str = "ddp"
    """solo, ddp, fsdp, hsdp, tp or fsdp_tp."""
    ranks: int = 2
    accumulate: int = 1
    bfloat16: bool = False
    compiled: bool = False
    same_batches: bool = False
    """All ranks learn from those of a single process."""
    step_s: float = 0.004
    batches: tuple[int, ...] = ()
    """Batches in the loader of each rank; (): endless."""
    leaves_at: int = 0
    """Steps after which the last rank leaves the loop; 0: never."""
    raises_at: int = 0
    """Steps after which the last rank raises; 0: never."""
    leave_timeout_s: float = 25.0


def build(island: Island) -> tuple[nn.Module, nn.Module, Any]:
    """The bare model, the one to call, and the mesh along which batches differ."""
    model = Model(torch.bfloat16 if island.bfloat16 else torch.float32)
    if island.compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    if island.kind == "solo":
        return model, model, None
    if island.kind == "ddp":
        return model, DistributedDataParallel(model), None
    shape: tuple[int, ...]
    names: tuple[str, ...]
    if island.kind == "fsdp":
        shape, names = (island.ranks,), ("dp",)
    elif island.kind == "hsdp":
        shape, names = (2, island.ranks // 2), ("replicas", "shards")
    else:
        shape, names = (island.ranks // 2, 2), ("dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" not in names:
        shard(model, mesh)
        return model, model, None
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    if island.kind == "fsdp_tp":
        shard(model, mesh["dp"])
    return model, model, mesh["dp"]


def shard(model: Model, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def digest_here(model: nn.Module) -> str:
    """A digest of what this rank holds of each parameter."""
    parts = [local_part(each).contiguous().view(torch.uint8) for each in model.parameters()]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def learn(folder: Path, name: str, broker: str, island: Island, rank: int) -> None:
    """One rank's life. It leaves NAME.RANK.json, and rank 0 NAME.safetensors."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # torchrun has started this process.
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    elif island.kind != "solo":
        place = f"file://{folder / name}-meeting"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=island.ranks)
    model, run, batches_differ = build(island)
    groups: dict[str, list[Tensor]] = {}
    for each in model.parameters():
        # Optimizers take plain tensors or DTensors of one mesh in one call.
        groups.setdefault(str(getattr(each, "device_mesh", "")), []).append(each)
    optimizer = torch.optim.AdamW([{"params": each} for each in groups.values()], lr=3e-3)
    more = {} if batches_differ is None else {"data_parallel": batches_differ}
    learner = Learner(
        model, optimizer, broker=broker, name=name, boundary="manual", join_timeout_s=25.0,
        events=folder / f"{name}.jsonl" if rank == 0 else None,
        leave_timeout_s=island.leave_timeout_s, **more,
    )  # fmt: skip
    groups_during = len(dist.distributed_c10d._world.pg_map)
    order = rank if batches_differ is None else batches_differ.get_local_rank()
    generator = torch.Generator().manual_seed(0 if island.same_batches else 1 + order)
    pace = threading.Event()
    loader = range(island.batches[rank]) if island.batches else itertools.count()
    steps = 0
    batches = 0
    rates: list[float] = []
    with learner:
        steps_file = (folder / f"{name}.{rank}.steps").open("wb", buffering=0)
        for _ in learner.until_end(loader):
            tokens = torch.randint(0, 17, (TOKENS,), generator=generator)
            loss = nn.functional.cross_entropy(run(tokens).float(), (tokens * 3 + 1) % 17)
            (loss / island.accumulate).backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=TOKENS, loss=loss)
            batches += 1
            if batches % island.accumulate:
                continue
            rates.append(3e-3 * learner.lr_scale * (1.0 - learner.progress / 2))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            optimizer.step()
            learner.step()
            optimizer.zero_grad()
            steps += 1
            steps_file.write(b".")
            pace.wait(island.step_s)
            if rank == island.ranks - 1 and steps == island.leaves_at:
                break
            if rank == island.ranks - 1 and steps == island.raises_at:
                raise RuntimeError("this rank's data is gone")
        digest = digest_here(model)
    learner.save(folder / f"{name}.safetensors")
    told = {
        "steps": steps, "batches": batches, "digest": digest, "rates": rates,
        "counts": rank in counting(island),
        "health": learner.health, "stats": learner.stats(), "island": asdict(island),
        "metrics": learner.metrics(),
        "groups_left": groups_during - len(dist.distributed_c10d._world.pg_map),
    }  # fmt: skip
    (folder / f"{name}.{rank}.json").write_text(json.dumps(told))
    if island.kind != "solo":
        dist.destroy_process_group()


def counting(island: Island) -> list[int]:
    """The ranks whose tokens count."""
    if island.kind in ("tp", "fsdp_tp"):
        return list(range(0, island.ranks, 2))
    return list(range(island.ranks))


if __name__ == "__main__":
    _, its_folder, its_name, its_broker, its_island, its_rank = sys.argv
    island_here = Island(**json.loads(its_island))
    learn(Path(its_folder), its_name, its_broker, island_here, int(its_rank))
