"""A compact GPT over bytes (nanoGPT class), and the optimizer and schedule that suit it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrows.bench.reference.text import Tokens
from narrows.proto.errors import ConfigError

VOCABULARY: Final = 256
"""Tokens are bytes."""

WARM_UP: Final = 0.05
"""Share of the run in which the learning rate rises, and WARM_UP_STEPS in a run without a goal."""
WARM_UP_STEPS: Final = 100

RATE_FLOOR: Final = 0.1
"""Share of the peak that is left of the learning rate at the end."""


@dataclass(frozen=True)
class Preset:
    """Shape of a model, and the training settings that suit it."""

    layers: int
    heads: int
    width: int
    """Elements of the residual stream, a multiple of `heads`."""
    context: int
    """Tokens in a window."""
    batch: int
    """Windows per inner step and learner."""
    peak_learning_rate: float


# About 0.12, 0.43, 0.8, 4.8, 25 and 85 million parameters. The step of the tiny one is small on
# purpose. It makes the noise of single batches large, and averaging over learners takes that away:
# even a short demo shows it.
PRESETS: Final = {
    "nano": Preset(2, 2, 64, context=64, batch=4, peak_learning_rate=8e-3),
    "micro": Preset(2, 4, 128, context=64, batch=4, peak_learning_rate=6e-3),
    "tiny": Preset(4, 4, 128, context=64, batch=4, peak_learning_rate=4e-3),
    "small": Preset(6, 4, 256, context=256, batch=8, peak_learning_rate=1e-3),
    "medium": Preset(8, 8, 512, context=512, batch=8, peak_learning_rate=6e-4),
    "large": Preset(12, 12, 768, context=1024, batch=16, peak_learning_rate=6e-4),
}


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises ConfigError if it cannot be used here."""
    try:
        tried = torch.ones(1, device=name)
        tried.item()  # This fails on the device meta, which has no memory.
        return tried.device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(
            "--device",
            expected="a device that PyTorch can use on this machine, as cpu or cuda:0",
            got=name,
            remedy=f"PyTorch says: {str(error).splitlines()[0]}",
        ) from None


class Block(nn.Module):
    """Pre-norm attention and feed-forward; (batch, time, width) -> the same."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.heads = preset.heads
        width = preset.width
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, time, width = x.shape
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        parts = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q = rotate(q, rotation)
        k = rotate(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        # Squared ReLU (So et al. 2021, 2109.08668) is cheaper than GELU and learned faster here.
        hidden: Tensor = self.hidden_out(F.relu(self.hidden(self.hidden_norm(x))).square())
        return x + hidden


class GPT(nn.Module):
    """Decoder-only transformer; the output head is tied to the byte embedding.

    Rotary positions and a norm after the embedding let it leave the bigram plateau within some
    hundred steps, which a short demo needs: 1.87 against 2.48 nats after 1000 steps.
    """

    rotation: Tensor

    def __init__(self, preset: Preset, *, seed: int = 0) -> None:
        """The same seed gives the same parameters, whatever was drawn before."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, preset.width)
        self.embedding_norm = nn.LayerNorm(preset.width)
        self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.layers))
        self.final_norm = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        rotation = rotary_table(preset.context, preset.width // preset.heads)
        # The preset determines it, so a file of the model need not hold it.
        self.register_buffer("rotation", rotation, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith("embedding."):
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif parameter.dim() == 2:
                    # Two matrices of each layer add to the residual stream: they begin smaller, so
                    # that the sum over all layers does not grow with the depth.
                    depth = 2 * preset.layers if "_out." in name else 1
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
        """Mean cross entropy in nats per byte; x, y: (batch, time) int64, on any device."""
        device = self.rotation.device
        # A GPU multiplies matrices in bfloat16 many times as fast; the parameters stay float32.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = self(x.to(device, non_blocking=True))
        return F.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten())

    @torch.no_grad()
    def validation_loss(self, windows: Tokens) -> float:
        """Mean cross entropy in nats per byte over windows (count, context + 1)."""
        total = 0.0
        for start in range(0, len(windows), 32):
            each = torch.from_numpy(windows[start : start + 32])
            total += self.loss(each[:, :-1], each[:, 1:]).item() * len(each)
        return total / len(windows)


def rotary_table(context: int, head_width: int, base: float = 1000.0) -> Tensor:
    """Cosines and sines, float32 (2, context, head_width / 2). Source: RoFormer, 2104.09864."""
    frequencies = base ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(context)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns pairs (j, j + half) of x (..., time, head width) by their position's angles."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def make_optimizer(
    model: nn.Module, peak: float, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices alone.

    A beta2 of 0.95 (as GPT-3's) forgets within 20 steps. So a learner that returns without its
    moments contributes again after 20 steps, and not after a thousand.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=betas, fused=True)


def learning_rate(progress: float, run_step: float, peak: float) -> float:
    """Cosine from `peak` to RATE_FLOOR of it over the run, after a linear warm-up.

    `progress` is the share of the run's goal that is reached, 0 to 1. It stays 0 in a run without a
    goal: there the rate is constant once `run_step` has passed WARM_UP_STEPS.
    """
    if not progress:
        return peak * min(1.0, (run_step + 1) / WARM_UP_STEPS)
    if progress < WARM_UP:
        return peak * max(progress / WARM_UP, 0.05)
    angle = math.pi * (min(progress, 1.0) - WARM_UP) / (1 - WARM_UP)
    return peak * (RATE_FLOOR + (1 - RATE_FLOOR) * 0.5 * (1 + math.cos(angle)))
