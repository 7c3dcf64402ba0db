"""Notices when a loop clears the model's gradients, and when AMP withholds an optimizer's step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from narrows.learner.module.parameters import unwrapped

AnyMethod: TypeAlias = Callable[..., Any]


@dataclass(eq=False)
class GradientWatch:
    """Calls back when something happens to the gradients of a module and its optimizers."""

    module: nn.Module
    """Inside all wrappers."""
    optimizers: Sequence[Optimizer]
    steps: Callable[[], int]
    """Counts the steps that these optimizers have made."""
    cleared: Callable[[], None]
    """Called before the gradients are cleared, perhaps those of one optimizer only."""
    withheld: Callable[[], None]
    """Called when a GradScaler did not let an optimizer step: gradients were not finite."""

    def start(self) -> ExitStack:
        """Starts to watch; closing the result ends it.

        Methods of torch's classes are wrapped for the module, since a method on the module itself
        would be copied and pickled with it, and for the scaler, which only the loop knows.
        """
        undo = ExitStack()
        for optimizer in self.optimizers:
            undo.callback(_wrap(optimizer, "zero_grad", self._telling))
        for shared in (_MODULE_CLEARS, _SCALER_STEPS):
            undo.callback(shared.add(self))
        return undo

    def _telling(self, original: AnyMethod) -> AnyMethod:
        def zero_grad(*arguments: Any, **options: Any) -> Any:
            self.cleared()
            return original(*arguments, **options)

        return zero_grad


class _Shared:
    """A method of a class of torch's, wrapped as long as anybody watches."""

    def __init__(
        self, owner: type, name: str, wrapper: Callable[[AnyMethod, list[GradientWatch]], AnyMethod]
    ) -> None:
        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._watches: list[GradientWatch] = []
        self._lock = threading.Lock()
        self._undo = ExitStack()

    def add(self, watch: GradientWatch) -> Callable[[], None]:
        """Begins to tell `watch`; returns the function that ends it."""
        with self._lock:
            if not self._watches:
                self._undo.callback(_wrap(self._owner, self._name, self._telling))
            self._watches.append(watch)
        return functools.partial(self._remove, watch)

    def _telling(self, original: AnyMethod) -> AnyMethod:
        return self._wrapper(original, self._watches)

    def _remove(self, watch: GradientWatch) -> None:
        with self._lock:
            self._watches.remove(watch)
            if not self._watches:
                self._undo.close()


def _module_clears(original: AnyMethod, watches: list[GradientWatch]) -> AnyMethod:
    def zero_grad(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # A loop may clear the gradients of a wrapper, such as DistributedDataParallel.
        inside = unwrapped(self)
        for watch in [watch for watch in watches if watch.module is inside]:
            watch.cleared()
        return original(self, *arguments, **options)

    return zero_grad


def _scaler_steps(original: AnyMethod, watches: list[GradientWatch]) -> AnyMethod:
    def step(self: GradScaler, optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        before = [
            (watch, watch.steps())
            for watch in watches
            if any(optimizer is ours for ours in watch.optimizers)
        ]
        # The scaler does not tell what it did: a step that was not made is one that it withheld.
        result = original(self, optimizer, *arguments, **options)
        for watch, steps in before:
            if watch.steps() == steps:
                watch.withheld()
        return result

    return step


_MODULE_CLEARS = _Shared(nn.Module, "zero_grad", _module_clears)
_SCALER_STEPS = _Shared(GradScaler, "step", _scaler_steps)


def _wrap(owner: Any, name: str, wrapper: Callable[[AnyMethod], AnyMethod]) -> Callable[[], None]:
    """Puts wrapper(method) in the place of a method; returns a function that puts it back."""
    own: Any = owner.__dict__
    before = own.get(name)
    original = getattr(owner, name)
    ours = functools.wraps(original)(wrapper(original))
    setattr(owner, name, ours)

    def restore() -> None:
        # Other code may have wrapped it after us: to put ours back would remove theirs.
        if own.get(name) is not ours:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore
