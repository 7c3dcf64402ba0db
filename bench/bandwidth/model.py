"""The event model behind the published bandwidth table: from bandwidth to compute utilisation.

Two replicas train in step. An inner step is a chain of 3 L - 1 equal operations: the forward pass
of each layer, then, from the last layer down, the gradients by activations (the first layer needs
none) and by weights. The all-reduce of a layer may start once its gradient is there. One channel
carries the all-reduces in that order. A layer's forward pass waits for its all-reduce,
`overlap_steps` steps later. Source: Streaming DiLoCo (arXiv 2501.18512), appendix. The text leaves
some choices open. They were made on the rows of 1B and 10B; docs/benchmarks.md lists them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from narrows.proto.codec import F64

SYNC_PERIOD_STEPS: Final = 100
"""H."""

LAYERS_PER_FRAGMENT: Final = 3

BITS: Final = 16.0
"""Bits per parameter and all-reduce. A ring of M replicas sends 2 (1 - 1/M) of them: once with two.
"""

FP4_BITS: Final = 4.0

GRID_GBPS: Final[F64] = np.logspace(-1, 3, 50)
"""Bandwidths that the authors tried: every printed value is one of them, up to its last digit."""


@dataclass(frozen=True)
class Setup:
    """A model of the table and the time of its inner step."""

    name: str
    params: float
    layers: int
    step_s: float

    @property
    def fragments(self) -> int:
        return self.layers // LAYERS_PER_FRAGMENT

    @property
    def spacing_steps(self) -> int:
        """Inner steps between the syncs of two fragments: 11, 5 and 2 in the paper."""
        return SYNC_PERIOD_STEPS // (self.fragments + 1)


@dataclass(frozen=True)
class Method:
    """A method: the layers that it exchanges, and the steps at which it does."""

    name: str
    bits_per_param: float = BITS
    overlap_steps: int = 0
    """tau: inner steps that may pass before the result of an exchange is needed."""


SETUPS: Final = (
    Setup("1B", 1e9, 24, 0.1),
    Setup("10B", 1e10, 48, 0.8),
    Setup("100B", 1e11, 108, 4.9),
)
METHODS: Final = (
    Method("data_parallel"),
    Method("diloco"),
    Method("streaming"),
    Method("overlap", overlap_steps=1),
    Method("overlap_fp4", FP4_BITS, overlap_steps=1),
)


def compute_utilization(setup: Setup, method: Method, gbps: F64) -> F64:
    """Share of the time of one sync period in which something is computed, per bandwidth (n,)."""
    operation_s = setup.step_s / (3 * setup.layers)
    reduce_s = method.bits_per_param * setup.params / setup.layers / (gbps * 1e9)
    now_s, channel_free_s = np.zeros_like(gbps), np.zeros_like(gbps)
    needed: dict[tuple[int, int], F64] = {}
    for step in range(SYNC_PERIOD_STEPS):
        for layer in range(setup.layers):
            reduced_s = needed.pop((step, layer), None)
            if reduced_s is not None:
                now_s = np.maximum(now_s, reduced_s)
            now_s = now_s + operation_s
        synced = _synced_layers(setup, method, step)
        for layer in reversed(range(setup.layers)):
            now_s = now_s + operation_s * (2 if layer else 1)
            if layer in synced:
                channel_free_s = np.maximum(channel_free_s, now_s) + reduce_s
                needed[step + 1 + method.overlap_steps, layer] = channel_free_s
    for reduced_s in needed.values():
        now_s = np.maximum(now_s, reduced_s)
    return SYNC_PERIOD_STEPS * (3 * setup.layers - 1) * operation_s / now_s


def _synced_layers(setup: Setup, method: Method, step: int) -> Collection[int]:
    """Layers whose all-reduce starts in the backward pass of this step."""
    if method.name == "data_parallel":
        return range(setup.layers)
    if method.name == "diloco":
        return range(setup.layers) if step == SYNC_PERIOD_STEPS - 1 else ()
    fragment, since_due = divmod(step, setup.spacing_steps)
    if since_due or fragment >= setup.fragments:
        return ()
    # Strided: a fragment's layers are spread over the depth of the model.
    return range(fragment, setup.layers, setup.fragments)


def reaching(utilization: F64, target_percent: float) -> int:
    """Index of the first bandwidth of the grid that reaches the target; its length if none does."""
    enough = np.flatnonzero(utilization >= target_percent / 100)
    return int(enough[0]) if enough.size else utilization.size


def printed_index(utilization: F64, target_percent: float) -> int:
    """Index of the bandwidth that the published table prints: the last one that falls short.

    A fit: with this rule 46 of the 50 known cells are the very grid points. The first one that
    reaches the target, which the caption suggests, would fit with 13.4 bits instead of 16.
    """
    return max(0, reaching(utilization, target_percent) - 1)


def nearest_index(gbps: float) -> int:
    """Index of the grid point that a printed value stands for."""
    return int(np.argmin(np.abs(np.log(GRID_GBPS / gbps))))


# The second model: the tool that the first author published, and the headline of the announcement.

BUCKETS: Final = 128
BACKWARD_SHARE: Final = 2 / 3


def ring_factor(sites: int) -> float:
    """Data that a ring all-reduce sends per site, in units of the model: 2 (1 - 1/M)."""
    return 2 * (1 - 1 / sites)


def data_parallel_gbps(
    params: float, step_s: float, sites: int, utilization: float, bits: float = BITS
) -> float:
    """Gbit/s per site so that data parallelism computes in this share of the time.

    Gradients leave in 128 equal buckets, released evenly over the backward pass, the last two
    thirds of a step. Stall: max(B / bw - T_b (1 - 1/K), B / (K bw)) with B bits per site and step.
    Source: the bandwidth tool of the first author of Decoupled DiLoCo.
    """
    sent_gbit = params * bits * ring_factor(sites) / 1e9
    stall_s = step_s * (1 / utilization - 1)
    hidden_s = BACKWARD_SHARE * step_s * (1 - 1 / BUCKETS)
    return max(sent_gbit / (stall_s + hidden_s), sent_gbit / BUCKETS / stall_s)


def decoupled_gbps(
    params: float, step_s: float, sync_period_steps: int, bits_per_param: float
) -> float:
    """Gbit/s per site and direction that hide the whole exchange: all parameters once per H."""
    return params * bits_per_param / (sync_period_steps * step_s) / 1e9
