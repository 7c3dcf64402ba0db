"""Tokens and losses logged for the coming step, and which of them no step ever used."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from narrows.proto.errors import ErrorCode, LocalProtocolError

Loss: TypeAlias = float | Tensor


@dataclass
class Logged:
    """Tokens of one step and their mean loss."""

    tokens: int = 0
    loss: Loss | None = None
    """Weighted by tokens, over those that came with a loss."""
    _loss_tokens: int = 0

    def add(self, tokens: int, loss: Loss | None) -> None:
        self.tokens += tokens
        if loss is None:
            return
        self._loss_tokens += tokens
        # Always a new tensor: the graph that made this one may overwrite it at the next step.
        share = tokens / self._loss_tokens
        self.loss = loss * share + (0.0 if self.loss is None else self.loss) * (1.0 - share)


class StepLog:
    """Collects what is logged until a step takes it; tells `skipped` what was thrown away.

    Gradients that are cleared without a step between (AMP skips steps that overflow) take their
    tokens with them. But many loops clear them between forward and backward: what was logged
    before is set aside, and thrown away only if something is logged after it, before the step.
    """

    def __init__(self, skipped: Callable[[int], None]) -> None:
        self._skipped = skipped
        self._fresh = Logged()
        self._aside = Logged()

    def add(self, tokens: int, loss: Loss | None) -> None:
        """See Learner.log; never waits for a device."""
        self._fresh.add(_counted(tokens), None if loss is None else detached(loss))

    def set_aside(self) -> None:
        """The gradients were cleared."""
        if self._fresh.tokens:
            self._throw_away(self._aside)
            self._aside, self._fresh = self._fresh, Logged()

    def take(self) -> Logged:
        """A step was made: what it learned from; no tokens if nothing was logged."""
        self.set_aside()
        taken, self._aside = self._aside, Logged()
        return taken

    def discard(self) -> None:
        """No further step will be made."""
        self._throw_away(self.take())

    def _throw_away(self, logged: Logged) -> None:
        if logged.tokens:
            self._skipped(logged.tokens)


class HostLoss:
    """Brings losses from a device to the host without ever waiting for the device."""

    def __init__(self) -> None:
        self._newest: float | None = None
        self._coming: tuple[Tensor, torch.Event] | None = None

    def newest(self, loss: Loss | None) -> float | None:
        """The newest loss that has arrived: `loss` itself if it is on the host, else one from a
        few steps ago, None before the first."""
        if self._coming is not None and self._coming[1].query():
            self._newest = self._coming[0].item()
            self._coming = None
        if not isinstance(loss, Tensor):
            self._newest = self._newest if loss is None else loss
        elif self._coming is None:
            self._coming = loss.to("cpu", non_blocking=True), event_after_queued(loss.device)
        return self._newest


def event_after_queued(device: torch.device) -> torch.Event:
    """An event that has happened once the device has done what is queued on it now."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _counted(tokens: int) -> int:
    if isinstance(tokens, Tensor):
        raise LocalProtocolError(
            ErrorCode.MISUSE,
            "tokens is a tensor, reading it could stop the device",
            expected="an int",
            remedy="Count on the host, for instance batch.numel().",
        )
    count = operator.index(tokens)
    if count <= 0:
        raise LocalProtocolError(
            ErrorCode.BAD_TOKENS, "tokens must be positive", expected="> 0", got=str(count)
        )
    return count


def detached(loss: Loss) -> Loss:
    """A float if the loss is on the host, else a tensor without its graph."""
    if not isinstance(loss, Tensor):
        return float(loss)
    if loss.numel() != 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE,
            "loss is not one number",
            expected="a float or a tensor of one element",
            got=f"shape {tuple(loss.shape)}",
            remedy="Log its mean: loss.mean().",
        )
    value = loss.detach()
    return value.item() if value.is_cpu else value
