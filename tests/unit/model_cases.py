"""A small model with everything that a layout has to cope with."""

from typing import Any

import torch
from torch import Tensor, nn

torch.set_num_threads(1)

VOCABULARY = 11
WIDTH = 6


class Small(nn.Module):
    """Embedding, hidden layer, norm, head (tied on request), a scalar and two buffers."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Buffer(torch.ones(WIDTH))
        self.cache = nn.Buffer(torch.zeros(3), persistent=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.hidden(self.table(tokens)))) + self.offset
        return torch.as_tensor(self.head(hidden) * self.gain)


def small(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(5)
    return Small(tied=tied).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    """Loss of one full batch of VOCABULARY tokens."""
    tokens = torch.arange(VOCABULARY)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.flip(0))


def compiled(module: nn.Module) -> nn.Module:
    """As torch.compile wraps it, without the minutes that code takes."""
    result: Any = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result
