"""A signal in the middle of an adoption, as each of two ranks meets it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrows.learner import Learner, LocalProtocolError
from narrows.learner.fragment import Standing
from narrows.learner.ranks.exchange import RanksExchange
from narrows.learner.ranks.meeting import Ranks

MOVES = 6
"""Fragments that move before the signal: those of version 0 and a few more."""


def interrupted(folder: Path, broker: str, rank: int) -> None:
    """Half of a fragment is written at rank 0 when the signal comes, and its loop goes on."""
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    model = nn.Linear(16, 16)
    scatter = Ranks._scatter
    moves: list[int] = []

    def half_scatter(ranks: Ranks, *given: Any) -> None:
        moves.append(given[0].index)
        if rank == 0 and len(moves) > MOVES:
            model.weight.data[:4] = 100.0
            raise KeyboardInterrupt
        scatter(ranks, *given)

    Ranks._scatter = half_scatter  # type: ignore[assignment,method-assign]
    run = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    learner = Learner(model, optimizer, broker=broker, name="a", join_timeout_s=25.0)
    with learner:
        with pytest.raises(KeyboardInterrupt if rank == 0 else LocalProtocolError) as caught:
            while True:
                run(torch.randn(4, 16)).square().mean().backward()
                learner.log(tokens=4)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 1:
            assert "rank 1 has lost another rank, of 0" in str(caught.value)
        else:
            exchange = learner._exchange
            assert isinstance(exchange, RanksExchange)
            parts = exchange._leader.link.host.session.parts
            assert parts[moves[-1]].standing is Standing.ADRIFT, "nobody knows how far it came"
            learner.log(tokens=4)
            with pytest.raises(LocalProtocolError, match="rank 0 has broken off an exchange"):
                learner.step()
        learner.close()
