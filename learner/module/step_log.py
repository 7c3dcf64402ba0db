"""Collects tokens and losses for the coming step, and finds those that no step ever used."""

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
    """Mean over the tokens that came with a loss."""
    _loss_tokens: int = 0

    def add(self, tokens: int, loss: Loss | None) -> None:
        self.merge(Logged(tokens, loss, 0 if loss is None else tokens))

    def merge(self, other: Logged) -> None:
        self.tokens += other.tokens
        if other.loss is None:
            return
        self._loss_tokens += other._loss_tokens
        share = other._loss_tokens / self._loss_tokens
        if self.loss is None:
            self.loss = other.loss
        else:
            self.loss = other.loss * share + self.loss * (1.0 - share)


class StepLog:
    """Collects what is logged until a step takes it; tells `skipped` what was thrown away.

    A step that AMP withholds throws away what was logged for it. So do gradients that are cleared
    without a step between. But many loops clear between forward and backward: there, what was
    logged before still counts. Which of the two it is shows when the clearing follows a step, made
    or withheld: then it threw nothing away. Otherwise what was logged before is lost if more is
    logged before the step.
    """

    def __init__(self, skipped: Callable[[int], None]) -> None:
        self._skipped = skipped
        #: Steps of all optimizers.
        self.steps = 0
        #: Logged, and used by an optimizer that is not the last one of several.
        self._used = Logged()
        #: Logged for a step that was withheld; another optimizer may still make it.
        self._withheld = Logged()
        #: Logged before the gradients were last cleared, and since.
        self._before = Logged()
        self._since = Logged()
        #: A step has come since the gradients were last cleared, or they never were.
        self._stepped = True
        #: `_before` counts, whatever is logged after it.
        self._before_counts = False

    def add(self, tokens: int, loss: Loss | None) -> None:
        """See Learner.log; never waits for a device."""
        count, value = _counted(tokens), None if loss is None else detached(loss)
        self._withheld = self._throw_away(self._withheld)
        self._since.add(count, value)

    def cleared(self) -> None:
        """The gradients were cleared."""
        if self._since.tokens:
            forward_first = self._stepped or (self._before_counts and self._before.tokens > 0)
            self._throw_away(self._before)
            self._before, self._since = self._since, Logged()
            self._before_counts = forward_first
        self._stepped = False

    def stepped(self) -> None:
        """An optimizer has made a step on what is logged so far."""
        self.steps += 1
        self._used.merge(self._withheld)
        self._used.merge(self._gathered())
        self._withheld = Logged()

    def withheld(self) -> None:
        """An optimizer did not make the step on what is logged so far."""
        self._withheld.merge(self._gathered())

    def take(self) -> Logged:
        """A step is complete: returns all that it learned from; no tokens if nothing was logged."""
        self.stepped()
        taken, self._used = self._used, Logged()
        return taken

    def discard(self) -> None:
        """No optimizer steps on what is logged so far."""
        self.withheld()
        self._withheld = self._throw_away(self._withheld)

    def close(self) -> None:
        """No further step will be made."""
        self._throw_away(self.take())

    def _gathered(self) -> Logged:
        """Takes out all that a step would learn from now; begins anew."""
        if self._since.tokens and not self._before_counts:
            self._before = self._throw_away(self._before)
        gathered = self._before
        gathered.merge(self._since)
        self._before, self._since = Logged(), Logged()
        self._stepped, self._before_counts = True, False
        return gathered

    def _throw_away(self, logged: Logged) -> Logged:
        """Counts it as skipped; returns an empty log to take its place."""
        if logged.tokens:
            self._skipped(logged.tokens)
        return Logged()


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
            # One at a time: with one per step they would queue up behind a slow device.
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
    # A copy: the graph that made it may overwrite it at the next step.
    return value.item() if value.is_cpu else value.clone()
