"""The training loop's part: it logs tokens and losses of a step, and its optimizers tell how long a
newcomer warms up."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from narrows.learner.parameters import misuse

Loss: TypeAlias = float | Tensor

STEP_FILE: Final = torch_optimizer.__file__
"""Where torch wraps the steps of optimizers, to call hooks."""

RAMP_STEPS: Final = 20
"""Measured: with empty Adam moments a full learning rate gains nothing in the first 20 steps. After
them the second moment is a mean of 20 squared gradients, which is what beta2 0.95 has for ever.
With a beta2 nearer to 1 the mean goes on growing longer, and a longer ramp lost."""


class StepLog:
    """Tokens and the mean loss of the batches that the coming step learns from.

    Batches that were logged since the last step count for the next one; a loop that skips a step
    says so with `discard`, because nobody sees a step that was not made. It never waits for a
    device.
    """

    def __init__(self) -> None:
        self._tokens = self._loss_tokens = 0
        self._loss: Loss | None = None
        self._newest: float | None = None
        self._coming: tuple[Tensor, torch.Event] | None = None
        """A loss on its way from its device, and the event that says that it is here."""

    def add(self, tokens: int, loss: Loss | None) -> None:
        """Raises LocalProtocolError MISUSE."""
        if isinstance(tokens, Tensor):  # Reading it could wait for its device.
            raise misuse(
                "tokens is a tensor",
                expected="an int",
                remedy="Count on the host, for instance batch.numel().",
            )
        count = operator.index(tokens)
        if count <= 0:
            raise misuse("tokens must be positive", expected="> 0", got=str(count))
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise misuse(
                    "loss is not one number",
                    expected="a float or a tensor of one element",
                    got=f"shape {tuple(loss.shape)}",
                    remedy="Log its mean: loss.mean().",
                )
            # A copy: the graph that made it may overwrite it at the next step.
            loss = loss.item() if loss.is_cpu else loss.detach().clone()
        self._tokens += count
        if loss is not None:
            self._loss_tokens += count
            if self._loss is None:
                self._loss = loss
            else:
                share = count / self._loss_tokens
                self._loss = loss * share + self._loss * (1.0 - share)

    def discard(self) -> None:
        """Drops what was logged since the last step."""
        self._tokens = self._loss_tokens = 0
        self._loss = None

    def take(self) -> tuple[int, float | None]:
        """Tokens that were logged since the last call, and the newest mean loss on the host.

        A loss that was computed there is this step's. One of a device arrives a few steps later;
        before the first one the loss is None.
        """
        tokens = self._tokens
        loss = self._loss
        self.discard()
        if self._coming is not None:
            copy, arrived = self._coming
            if arrived.query():
                self._newest = copy.item()
                self._coming = None
        # One copy is on its way at a time: one of each step would queue up behind a slow device.
        if isinstance(loss, Tensor) and self._coming is None:
            arrived = torch.Event(device=loss.device)
            copy = loss.to("cpu", non_blocking=True)
            arrived.record(torch.accelerator.current_stream(loss.device))
            self._coming = copy, arrived
        elif not isinstance(loss, Tensor | None):
            self._newest = float(loss)
        return tokens, self._newest


def bare_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers in `optimizer`: one, a sequence of them, or a wrapper such as
    Accelerate's (`.optimizer`) or torchtitan's (`.optimizers`). Raises LocalProtocolError MISUSE.
    """
    # Two wrappers are optimizers by their type. Accelerate's only lends the groups of the one that
    # it wraps. torchtitan's has groups of its own, and its state is in those that it holds.
    has_groups = isinstance(optimizer, Optimizer) and "param_groups" in vars(optimizer)
    if has_groups and not getattr(optimizer, "optimizers", None):
        return [optimizer]
    if isinstance(optimizer, Sequence) and len(optimizer):
        return [bare for each in optimizer for bare in bare_optimizers(each)]
    inside = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if inside is not None:
        return bare_optimizers(inside)
    raise misuse(
        "optimizer is of the wrong kind",
        expected="a torch.optim.Optimizer, a list of them, or a wrapper around one",
        got="an empty list" if isinstance(optimizer, Sequence) else type(optimizer).__name__,
    )


def ramp_steps(optimizers: Sequence[Optimizer]) -> int:
    """Steps until the optimizers' empty moments mean something: RAMP_STEPS, or 0 if each of them
    has its state or, as plain SGD, keeps none."""
    for optimizer in optimizers:
        groups = optimizer.param_groups
        keeps_state = not isinstance(optimizer, SGD) or any(group["momentum"] for group in groups)
        if keeps_state and not optimizer.state:
            return RAMP_STEPS
    return 0


def once_a_step(optimizer: Optimizer, hook: Callable[[], None]) -> Callable[..., None]:
    """A hook of the optimizer's step that runs once for each step.

    torch wraps the `step` of every class of which there has been an instance. An optimizer whose
    own `step` calls that of its base class then runs its hooks twice, the inner ones too soon.
    """
    owners = [each for each in type(optimizer).__mro__ if "step" in vars(each)]
    has_one = len(owners) <= 2  # Its own, and the abstract one of Optimizer.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def guarded(*_: object) -> None:
        if has_one or _steps_under_way(optimizer) == 1:
            hook()

    return guarded  # type: ignore[no-any-return]


def _steps_under_way(optimizer: Optimizer) -> int:
    """Calls of torch's wrapper of `step` for this optimizer. They are read off the stack: a count
    of our own would be wrong after a step that raises."""
    count = 0
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        is_wrapper = frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == STEP_FILE
        count += is_wrapper and frame.f_locals.get("self") is optimizer
    return count
