"""A compact GPT over bytes for the reference worker, the demo and the benches (nanoGPT class)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrows.learner.reference.corpus import Bytes
from narrows.proto.errors import ConfigError

VOCABULARY = 256
"""Tokens are bytes."""

WARM_UP_STEPS = 100
"""Run steps of warm-up where there is no goal of which they could be a share."""


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model and the training settings that suit it."""

    layers: int
    heads: int
    width: int
    """Elements of the residual stream, a multiple of `heads`."""
    context: int
    """Tokens in a window."""
    batch: int
    """Windows per inner step and learner."""
    peak_learning_rate: float
    """Peak of the schedule at that batch."""


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(2, 2, 64, context=64, batch=4, peak_learning_rate=8e-3),
    "micro": GPTConfig(2, 4, 128, context=64, batch=4, peak_learning_rate=6e-3),
    "tiny": GPTConfig(4, 4, 128, context=64, batch=4, peak_learning_rate=4e-3),
    "small": GPTConfig(6, 4, 256, context=256, batch=8, peak_learning_rate=1e-3),
    "medium": GPTConfig(8, 8, 512, context=512, batch=8, peak_learning_rate=6e-4),
}
"""About 0.12, 0.43, 0.8, 4.8 and 25 million parameters; the first two are for the quality bench,
which trains hundreds of them. A step of the tiny one is small on purpose: in a short
demo the noise of single batches is then what a learner alone suffers from most. Its peak suits
four learners; one alone does best at 3e-3, by 0.04 nats after 1500 steps."""


def preset(name: str) -> GPTConfig:
    """A preset by name; ConfigError names the known ones."""
    if name not in PRESETS:
        raise ConfigError("unknown preset", expected=" | ".join(PRESETS), got=name)
    return PRESETS[name]


class Block(nn.Module):
    """Pre-norm attention and feed-forward; (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), rotation)
        # Squared ReLU (So et al. 2021, 2109.08668) is cheaper than GELU and learned faster here.
        hidden: Tensor = self.hidden_out(F.relu(self.hidden(self.hidden_norm(x))).square())
        return x + hidden

    def attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, time, width = x.shape
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        q, k, v = (
            each.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(x).split(width, dim=2)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return attended


class GPT(nn.Module):
    """Decoder-only transformer; the output head is tied to the byte embedding.

    Rotary positions and a norm after the embedding let it leave the bigram plateau within some
    hundred steps, which a short demo needs: 1.87 against 2.48 nats after 1000 steps.
    """

    rotation: Tensor

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """The same seed gives the same parameters whatever was drawn before."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.embedding_norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        # Tied, as in GPT-2: fewer parameters, which matters in a model this small.
        self.head.weight = self.embedding.weight
        rotation = rotary_table(config.context, config.width // config.heads)
        # It follows from the config: a file of the model need not hold it.
        self.register_buffer("rotation", rotation, persistent=False)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Normal draws: embedding 0.02, matrices 1/sqrt(2 fan-in), residual outputs smaller."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith("embedding."):
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif parameter.dim() == 2:
                    depth = 2 * self.config.layers if "_out." in name else 1
                    std = 1 / math.sqrt(2 * parameter.shape[1] * depth)
                    parameter.normal_(0.0, std, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, time) int64, time <= context -> logits (batch, time, 256)."""
        rotation = self.rotation[:, : x.shape[1]]
        hidden = self.embedding_norm(self.embedding(x))
        for block in self.blocks:
            hidden = block(hidden, rotation)
        logits: Tensor = self.head(self.final_norm(hidden))
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte; x, y: (batch, time) int64."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


def rotary_table(context: int, head_width: int, base: float = 1000.0) -> Tensor:
    """Cosines and sines, float32 (2, context, head_width / 2). Source: RoFormer, 2104.09864."""
    frequencies = base ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(context)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn pairs (j, j + half) of x (..., time, head width) by their position's angles."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def parameter_count(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay, vectors (norms, biases) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def learning_rate(
    progress: float, peak: float, *, warm_up: float = 0.05, floor: float = 0.1
) -> float:
    """Cosine from `peak` to `floor * peak` after a linear warm-up; progress is in [0, 1]."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warm_up:
        return peak * max(progress / warm_up, 0.05)
    angle = math.pi * (progress - warm_up) / (1 - warm_up)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(angle)))


def scheduled_rate(progress: float, run_step: float, peak: float) -> float:
    """`learning_rate` by the run's progress; for a run without a goal constant after a warm-up.

    Such a run reports no progress, as one with a goal does only before its first step.
    """
    if progress > 0:
        return learning_rate(progress, peak)
    return peak * min(1.0, (run_step + 1) / WARM_UP_STEPS)


def make_optimizer(model: nn.Module, peak: float) -> torch.optim.AdamW:
    """The inner optimizer of learners and baselines alike.

    A beta2 of 0.95 (as GPT-3's) forgets within 20 steps, so a learner that returns without its
    moments contributes again after 20 steps, not after a thousand.
    """
    groups = parameter_groups(model)
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def token_tensor(tokens: Bytes) -> Tensor:
    """uint8 array -> int64 tensor of the same shape."""
    return torch.as_tensor(tokens.astype(np.int64))


def validation_loss(model: GPT, windows: Bytes, *, batch: int = 32) -> float:
    """Mean cross entropy in nats per byte over windows (count, context + 1)."""
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(windows), batch):
            tokens = token_tensor(windows[start : start + batch])
            total += model.loss(tokens[:, :-1], tokens[:, 1:]).item() * len(tokens)
    model.train(was_training)
    return total / len(windows)
