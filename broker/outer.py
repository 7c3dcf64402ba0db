"""Outer optimizers: a merged outer gradient becomes new global parameters. [pure]

All arithmetic is float32, one rounding per operation, in the order that is written here; the
result has the same bits on every machine (DESIGN 6). The outer gradient points from the merged
local parameters to the base (base - local), so the optimizers descend along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from narrows.proto.config import nearest
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.kernels import F32

BLOCK_ELEMENTS: Final = 1 << 14
"""Elements that all operations of a step are done for before the next ones: they stay in cache."""


class OuterOptimizer(Protocol):
    """A rule for the outer step. Stateless: the momentum comes in and goes out."""

    @property
    def name(self) -> str: ...
    @property
    def rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        """New parameters and new momentum, both (n,) like all arguments, which stay untouched.

        Raises LocalProtocolError MISUSE if the arrays do not fit together. The results are not
        checked: a caller that must not keep a NaN or an infinity looks before it commits.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """p <- p - rate * d. At rate 1 with one learner: the learner's own parameters."""

    rate: float
    momentum: float = 0.0
    """Ignored; it is kept so that a configuration can change the optimizer alone."""
    name: str = "sgd"

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        _check(params, momentum_state, outer_grad)
        rate, updated = np.float32(self.rate), np.empty_like(params)
        for part in _blocks(params.size):
            change = outer_grad[part] * rate
            np.subtract(params[part], change, out=updated[part])
        return updated, momentum_state.copy()


@dataclass(frozen=True)
class Nesterov:
    """b <- mu*b + d, then p <- p - rate * (d + mu*b).

    Source: DiLoCo (arXiv 2311.08105) with the recursion of torch.optim.SGD(nesterov=True). A
    first step from b = 0 moves by rate * (1 + mu) * d.
    """

    rate: float
    momentum: float
    name: str = "nesterov"

    def step(self, params: F32, momentum_state: F32, outer_grad: F32) -> tuple[F32, F32]:
        _check(params, momentum_state, outer_grad)
        rate, mu = np.float32(self.rate), np.float32(self.momentum)
        updated, velocity = np.empty_like(params), np.empty_like(params)
        for part in _blocks(params.size):
            grad, speed = outer_grad[part], velocity[part]
            np.multiply(momentum_state[part], mu, out=speed)
            np.add(speed, grad, out=speed)
            change = speed * mu
            np.add(grad, change, out=change)
            np.multiply(change, rate, out=change)
            np.subtract(params[part], change, out=updated[part])
        return updated, velocity


Maker: TypeAlias = Callable[[float, float], OuterOptimizer]
_OPTIMIZERS: Final[dict[str, Maker]] = {"nesterov": Nesterov, "sgd": Sgd}


def outer_optimizer(name: str, *, rate: float, momentum: float) -> OuterOptimizer:
    """The optimizer of that name. Raises ConfigError for a name or a value it cannot have."""
    if name not in _OPTIMIZERS:
        raise ConfigError(
            "no such outer optimizer",
            expected=f"one of {', '.join(_OPTIMIZERS)}",
            got=repr(name),
            remedy=nearest(name, optimizer_names()),
        )
    if not 0 < rate < np.inf:
        raise ConfigError("outer rate", expected="a positive number", got=str(rate))
    if not 0 <= momentum < 1:
        raise ConfigError("outer momentum", expected="0 up to but not 1", got=str(momentum))
    return _OPTIMIZERS[name](rate, momentum)


def optimizer_names() -> tuple[str, ...]:
    """Names of all outer optimizers."""
    return tuple(_OPTIMIZERS)


def _blocks(count: int) -> list[slice]:
    return [slice(start, start + BLOCK_ELEMENTS) for start in range(0, count, BLOCK_ELEMENTS)]


def _check(*arrays: F32) -> None:
    # A float64 or a shorter array would silently change the precision or be broadcast.
    kinds = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    if arrays[0].ndim != 1 or arrays[0].dtype != np.float32 or len(set(kinds)) > 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE, "outer step", expected="float32 arrays (n,)", got=", ".join(kinds)
        )
