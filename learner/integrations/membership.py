"""The integrations share this: they join a run when a framework begins to train, say when it
pauses, and leave when it ends."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from narrows.integrations.rates import RunRate
from narrows.learner.learner import Learner
from narrows.learner.loop import bare_optimizers
from narrows.learner.parameters import misuse

_log = logging.getLogger("narrows.learner")


def positions_of(batch: Any) -> int:
    """Counts the positions of a batch of token ids, padding included: a shape is known on the host,
    for a mask one would wait. Raises LocalProtocolError MISUSE."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids.numel()
    raise misuse(
        "the tokens of a batch cannot be counted",
        expected="a mapping with a tensor input_ids",
        got=str([*batch]) if isinstance(batch, Mapping) else type(batch).__name__,
        remedy="Say how many a step learns from: tokens=lambda batch: ...",
    )


class Membership:
    """One training after another under one name; each has a learner of its own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: those of Learner."""
        inspect.signature(Learner).bind(None, None, **options)  # Now, not when training begins.
        self.learner: Learner | None = None
        """That of the training under way, or of the last one; None before the first."""
        self._options = options
        self._rates: list[RunRate] = []
        self._paused = False

    def join(
        self,
        model: nn.Module,
        optimizer: Any,
        schedulers: Sequence[LRScheduler],
        total_steps: float,
    ) -> Learner:
        """Joins, once the optimizer's state is loaded. Raises what entering a Learner raises.

        total_steps: length of the schedules.
        """
        self.close()  # A framework may begin anew without an end, to try a smaller batch.
        self.learner = learner = Learner(model, optimizer, **self._options)
        learner.__enter__()
        bare = bare_optimizers(optimizer)
        self._rates = [RunRate(learner, each, schedulers, total_steps) for each in bare]
        return learner

    @property
    def steps(self) -> int:
        """Steps that the optimizers have made in this training, those of each counted."""
        return sum(rate.steps for rate in self._rates)

    def metrics(self) -> dict[str, float]:
        """The learner's figures; none before the first training."""
        return {} if self.learner is None else self.learner.metrics()

    @contextmanager
    def pause(self, reason: str) -> Generator[None]:
        """Tells the broker that no steps are made in the block; one within another adds nothing."""
        if self.learner is None or self._paused:
            yield
            return
        self._paused = True
        try:
            with self.learner.pause(reason):
                yield
        finally:
            self._paused = False

    def leave(self) -> None:
        """Leaves with the run's final model, or with what this learner could still have merged.
        Raises what leaving a Learner's block raises."""
        assert self.learner is not None, "training ends that has not begun"
        if self.learner.goal_tokens and not self.learner.should_stop:
            _log.warning(
                "training ends at %.0f%% of the run's goal: the model is then this learner's, not"
                " the run's final one. Give it more steps or epochs than the run takes",
                100 * self.learner.progress,
            )
        self._remove_rates()
        self.learner.__exit__(None, None, None)

    def close(self) -> None:
        """Leaves at once; harmless outside a training."""
        self._remove_rates()
        if self.learner is not None:
            self.learner.close()

    def _remove_rates(self) -> None:
        for rate in self._rates:
            rate.remove()
