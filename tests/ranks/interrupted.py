"""A signal in the middle of an adoption, as each of three ranks meets it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrows.bench.kit.processes import wait_until
from narrows.learner import Learner, LocalProtocolError
from narrows.learner.fragment import Standing
from narrows.learner.parameters import local_part
from narrows.learner.ranks.exchange import RanksExchange
from narrows.learner.ranks.meeting import Ranks

MOVES = 6
"""Fragments that move before the signal: those of version 0 and a few more."""


def interrupted(folder: Path, broker: str, kind: str, who: int, rank: int) -> None:
    """A part of a fragment is written at rank `who` when the signal comes. The others end their
    blocks, and only then its process does anything else."""
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=3)
    model = nn.Linear(16, 16)
    scatter = Ranks._scatter
    moves: list[int] = []

    def half_scatter(ranks: Ranks, *given: Any) -> None:
        moves.append(given[0].index)
        if rank == who and len(moves) > MOVES:
            local_part(model.weight)[:4] = 100.0
            raise KeyboardInterrupt
        scatter(ranks, *given)

    Ranks._scatter = half_scatter  # type: ignore[assignment,method-assign]
    run: Any = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    learner = Learner(model, optimizer, broker=broker, name="a", join_timeout_s=25.0)
    expected = KeyboardInterrupt if rank == who else LocalProtocolError
    with pytest.raises(expected) as caught, learner:
        for _ in learner.until_end(itertools.count()):
            run(torch.randn(4, 16)).square().mean().backward()
            learner.log(tokens=4)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                learner.log(tokens=4)
                with pytest.raises(LocalProtocolError, match="has broken off an exchange"):
                    learner.step()
                raise
            optimizer.zero_grad()
    if rank != who:
        others = ", ".join(str(other) for other in range(3) if other != rank)
        assert f"rank {rank} has lost another rank, of {others}" in str(caught.value)
        (folder / f"{rank}.over").touch()
        return
    if rank == 0:
        exchange = learner._exchange
        assert isinstance(exchange, RanksExchange)
        parts = exchange._leader.link.host.session.parts
        assert parts[moves[-1]].standing is Standing.ADRIFT, "nobody knows how far it came"
    wait_until(lambda: len(list(folder.glob("*.over"))) == 2, "the end of the others")
