"""A rank that ends while a sum is on its way, and another one that waits for it elsewhere: a
program, since a fork of the tests' server would end without Python's clearing up."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from narrows.learner.parameters import Parameters
from narrows.learner.ranks.meeting import TIMEOUT, Ranks

if __name__ == "__main__":
    _, place, own_rank = sys.argv
    dist.init_process_group("gloo", init_method=place, rank=int(own_rank), world_size=2)
    ranks = Ranks(Parameters(nn.Linear(2, 2)), counts=True)
    ranks.start_sum(np.zeros(4))(TIMEOUT)
    if ranks.rank == 0:
        dist.all_reduce(torch.zeros(1))  # Training's own.
    ranks.start_sum(np.zeros(4))
    ranks.leave()
    raise RuntimeError("this rank ends")
