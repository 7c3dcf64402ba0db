"""Outer optimizers: a merged outer gradient becomes new global parameters. [pure]

All arithmetic is float32, with one rounding per operation, in the order that is written here. The
result has the same bits on every machine. The outer gradient points from the merged
local parameters to the base (base - local), so the optimizers descend along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from narrows.broker.config import OUTER_OPTIMIZERS
from narrows.proto.codec import F32, empty_f32, kernel, read_only
from narrows.proto.config import nearest
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError


class OuterOptimizer(Protocol):
    """A rule for the outer step. Stateless: the momentum comes in and goes out."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        """Returns new parameters and new momentum, both (n,) like all arguments.

        The arguments stay untouched. Raises LocalProtocolError MISUSE if the arrays do not fit
        together. The results may be NaN or infinite: the caller checks them before it commits.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """p <- p - lr * d. At lr 1 with one learner: the learner's own parameters."""

    lr: float
    momentum: float = 0.0
    """Ignored; kept so that a configuration can change the optimizer alone."""
    name: str = "sgd"

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        _check(params, momentum_state, outer_grad)
        updated = empty_f32(params.size)
        sgd_step(read_only(params), read_only(outer_grad), np.float32(self.lr), updated)
        assert updated is not params and updated.size == params.size
        return updated, momentum_state.copy()


@dataclass(frozen=True)
class Nesterov:
    """b <- mu*b + d, then p <- p - lr * (d + mu*b).

    Source: DiLoCo (arXiv 2311.08105) with the recursion of torch.optim.SGD(nesterov=True). A
    first step from b = 0 moves by lr * (1 + mu) * d.
    """

    lr: float
    momentum: float
    name: str = "nesterov"

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        _check(params, momentum_state, outer_grad)
        updated, velocity = empty_f32(params.size), empty_f32(params.size)
        inputs = read_only(params), read_only(momentum_state), read_only(outer_grad)
        nesterov_step(*inputs, np.float32(self.lr), np.float32(self.momentum), updated, velocity)
        assert updated.size == velocity.size == params.size
        return updated, velocity


@kernel
def sgd_step(params: F32, grad: F32, lr: np.float32, updated: F32) -> None:
    """Sets updated (n,) to params - lr * grad."""
    for i in range(updated.size):
        updated[i] = params[i] - grad[i] * lr


@kernel
def nesterov_step(
    params: F32,
    momentum: F32,
    grad: F32,
    lr: np.float32,
    mu: np.float32,
    updated: F32,
    velocity: F32,
) -> None:
    """Sets velocity = mu * momentum + grad and updated = params - lr * (grad + mu * velocity)."""
    # This order of products and sums is promised, bit by bit.
    for i in range(updated.size):
        speed = momentum[i] * mu + grad[i]
        velocity[i] = speed
        updated[i] = params[i] - (grad[i] + speed * mu) * lr


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    ones = np.ones(3, np.float32)
    # With the types of a real step, or numba would compile again at the first merge.
    for maker in _OPTIMIZERS.values():
        maker(0.5, 0.5).step(ones, ones, ones)


Maker: TypeAlias = Callable[[float, float], OuterOptimizer]
_OPTIMIZERS: Final[dict[str, Maker]] = {"nesterov": Nesterov, "sgd": Sgd}
assert tuple(_OPTIMIZERS) == OUTER_OPTIMIZERS


def outer_optimizer(name: str, *, lr: float, momentum: float) -> OuterOptimizer:
    """Makes the optimizer of that name. Raises ConfigError for an unknown name or a bad value."""
    if name not in _OPTIMIZERS:
        raise ConfigError(
            "no such outer optimizer",
            expected=f"one of {', '.join(_OPTIMIZERS)}",
            got=repr(name),
            remedy=nearest(name, OUTER_OPTIMIZERS),
        )
    if not 0 < lr < np.inf:
        raise ConfigError("outer learning rate", expected="a positive number", got=str(lr))
    if not 0 <= momentum < 1:
        raise ConfigError("outer momentum", expected="0 up to but not 1", got=str(momentum))
    return _OPTIMIZERS[name](lr, momentum)


def _check(*arrays: F32) -> None:
    # A float64 or a shorter array would silently change the precision or be broadcast.
    kinds = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    if arrays[0].ndim != 1 or arrays[0].dtype != np.float32 or len(set(kinds)) > 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE, "outer step", expected="float32 arrays (n,)", got=", ".join(kinds)
        )
