"""Momentum hand-over: at an adoption Adam's first moments turn to where the published copies went.

A learner's first moment knows its own gradients alone. What all learners have found together is in
the movement of the published copies. So that takes the place of a share of each moment, in the
length that Adam would have given it:

    m = (1 - share) * m + share * (1 - beta1**t) * sqrt(v / (1 - beta2**t)) * movement / rate

`movement` is (old - new) / steps of the exact copies in float32, what the run has moved in one
inner step at its mean pace. Over the learning rate of now it is in units of Adam's step, and the
factors before it undo what Adam does to a moment. `t` is the number of Adam's own steps. Epsilon
and decay are not taken out.

Nothing here waits for a device on which the moments lie: where t or the rate lies there, both are
used there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from narrows.learner.island import hand_over_kernel
from narrows.learner.parameters import Parameters, elements_of, local_part
from narrows.proto.codec import read_only
from narrows.proto.layout import Fragment

BLOCK: Final = 1 << 18
"""Elements mended at once in host memory: they stay in a core's cache."""
DEVICE_BLOCK: Final = 1 << 24
"""Elements mended at once on a device: enough to fill it, few enough to bound the memory that it
takes besides (8 bytes an element)."""

_log = logging.getLogger("narrows.learner")


class Part(NamedTuple):
    """The movement of some elements of a parameter."""

    tensor: int
    """Number of the parameter in the layout."""
    take: Callable[[Tensor], Tensor]
    """Takes these elements of a tensor that lies in memory as this process's part of the parameter
    does."""
    movement: Tensor
    """float32, in the shape that `take` gives, on any device."""


class Held(NamedTuple):
    """The moments and the settings that an optimizer has for one parameter."""

    group: dict[str, Any]
    first: Tensor
    second: Tensor
    """Moments of this process's part of the parameter."""
    step: Tensor
    """Number of Adam's steps, one element on any device."""


class AdamMoments:
    """The moments of Adam and AdamW over these parameters.

    It leaves alone what other optimizers keep and where the rule would be wrong, and a line in the
    log says why, once for each reason.
    """

    def __init__(self, parameters: Parameters, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._told: set[str] = set()

    def hand_over(self, fragment: Fragment, movement: Any, share: float) -> None:
        """`movement` is float32 (n,), in host memory or on a device."""
        moved = movement if isinstance(movement, Tensor) else torch.from_numpy(movement)
        parts = [
            Part(
                piece.tensor,
                partial(elements_of, piece=piece),
                moved[piece.offset : piece.offset + piece.count],
            )
            for piece in fragment.pieces
        ]
        self.mend(parts, share)

    @torch.no_grad()
    def mend(self, parts: Iterable[Part], share: float) -> None:
        """Applies the rule of this module to elements that this process holds."""
        if not any(optimizer.state for optimizer in self._optimizers):
            return  # Nobody has made a step: a newcomer, or a learner that waits.
        owners = {
            id(tensor): (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        batches: dict[tuple[int, torch.device], list[tuple[Part, Held]]] = {}
        """By group and device: the factors of many small tensors are computed at once."""
        for part in parts:
            held = self._held(part.tensor, owners)
            if held is not None:
                batch = batches.setdefault((id(held.group), held.step.device), [])
                batch.append((part, held))
        for batch in batches.values():
            kept, scales = _factors([held for _, held in batch], share)
            for (part, held), keep, scale in zip(batch, kept, scales, strict=True):
                _mix(part.take(held.first), part.take(held.second), part.movement, keep, scale)

    def _held(
        self, number: int, owners: dict[int, tuple[Optimizer, dict[str, Any]]]
    ) -> Held | None:
        """The moments of a parameter; None: the rule cannot mend them."""
        tensor = self._parameters.tensors[number]
        if id(tensor) not in owners:
            self._tell(number, "no optimizer of this learner holds it")
            return None
        optimizer, group = owners[id(tensor)]
        state = optimizer.state.get(tensor, {})
        obstacle = _obstacle(optimizer, group, state)
        if obstacle:
            self._tell(number, obstacle)
            return None
        first, second = (local_part(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        return Held(group, first, second, state["step"])

    def _tell(self, number: int, obstacle: str) -> None:
        if obstacle not in self._told:
            self._told.add(obstacle)
            name = self._parameters.names[number][0]
            _log.warning(
                "fragments.handover: none for %r, nor for others like it: %s",
                name,
                obstacle,
            )


def _obstacle(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> str:
    """Why the rule cannot mend what is held of a parameter; "": it can."""
    kind = type(optimizer).__name__
    kept = [state.get(name) for name in ("exp_avg", "exp_avg_sq", "step")]
    has_all = {"lr", "betas"} <= group.keys() and (
        not state or all(isinstance(each, Tensor) for each in kept)
    )
    is_adam = isinstance(optimizer, Adam | AdamW)
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    is_still = is_adam and has_all and (_is_known_zero(group["lr"]) or _is_known_zero(kept[2]))
    obstacles = {
        f"{kind} is neither Adam nor AdamW of torch": not is_adam,
        f"{kind} keeps other things than torch's own": not has_all,
        "AMSGrad steps by the largest second moment there was": group.get("amsgrad"),
        "Adam has its weight decay in the gradients (L2); AdamW has not": (
            group.get("weight_decay") and not is_decoupled
        ),
        "its learning rate is 0, or its optimizer has made no step with it": is_still,
    }
    return next((obstacle for obstacle, holds in obstacles.items() if holds), "")


def _is_known_zero(number: float | Tensor | None) -> bool:
    """Whether it is 0, or there is none; that of a device is not asked for, which would wait."""
    return (not isinstance(number, Tensor) or number.is_cpu) and not number


def _factors(held: Sequence[Held], share: float) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
    """The factors of m and of sqrt(v) * movement in the rule, for parameters of one group whose
    steps are counted on one device; they stay there, or go to that of the rate or of a beta."""
    group = held[0].group
    t = torch.stack([each.step.reshape(()) for each in held]).to(torch.float32)
    rate = group["lr"]
    for number in (rate, *group["betas"]):
        if isinstance(number, Tensor) and not number.is_cpu:
            # torch refuses a vector in host memory beside a number on a device.
            t = t.to(number.device, non_blocking=True)
    first, second = (_reached(beta, t) for beta in group["betas"])
    scale = share * first / (second.sqrt() * rate)
    is_sound = (t > 0) & (rate > 0)
    kept = torch.where(is_sound, 1 - share, 1.0)
    return kept.unbind(), torch.where(is_sound, scale, 0.0).unbind()


def _reached(beta: float | Tensor, t: Tensor) -> Tensor:
    """1 - beta**t in float32, exact where that is small."""
    return -torch.expm1(t * torch.as_tensor(beta, dtype=torch.float64).log())


def _mix(first: Tensor, second: Tensor, movement: Tensor, keep: Tensor, scale: Tensor) -> None:
    """first = keep * first + scale * sqrt(second) * movement, block by block, in float32."""
    movement = movement.to(first.device).view(first.shape)
    # To host memory this waits, as the optimizer of such moments does in each of its steps.
    keep, scale = (each if each.is_cpu else each.to(first.device) for each in (keep, scale))
    vectors = (first, second, movement)
    if all(
        each.is_cpu and each.is_contiguous() and each.dtype == torch.float32 for each in vectors
    ):
        own, squares, moved = (each.view(-1).numpy() for each in vectors)
        hand_over_kernel(
            own, read_only(squares), read_only(moved), np.float32(keep), np.float32(scale)
        )
        return
    block = BLOCK if first.is_cpu else DEVICE_BLOCK
    rows = max(1, block * len(first) // max(1, first.numel()))
    for m, v, delta in zip(*(torch.split(each, rows) for each in vectors), strict=True):
        root = v.to(torch.float32, copy=True).sqrt_().mul_(scale)
        mixed = m.to(torch.float32)  # The moments themselves, if they are float32.
        mixed.mul_(keep).addcmul_(root, delta)
        if mixed is not m:
            m.copy_(mixed)
