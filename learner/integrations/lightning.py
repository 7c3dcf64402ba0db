"""Takes part in a run with Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.pytorch import Callback
except ImportError:  # The package under its older name.
    from pytorch_lightning import Callback

from narrows.integrations.membership import Membership, positions_of
from narrows.learner.learner import Learner
from narrows.learner.loop import Loss


class NarrowsCallback(Callback):
    """`Trainer.fit` takes part in the run of a broker.

        callback = NarrowsCallback(broker="tcp://HOST:7070", name="site-a")
        trainer = Trainer(max_epochs=1000, callbacks=[callback])
        trainer.fit(module, loader)

    Training ends at the run's goal, and `fit` returns with the run's final model in the module:
    `max_epochs` or `max_steps` must be above what the run takes. A LambdaLR that is stepped at
    every step is read at the run's progress, if there are a goal and an end of the epochs.

    tokens: counts those of a batch; without it the elements of its `input_ids` count, padding
    included. options: those of `Learner`, such as `broker`, `name` and `key`.

    `fit` raises what entering and leaving a `Learner` raises. When anything raises, the run is left
    at once.
    """

    def __init__(self, *, tokens: Callable[[Any], int] = positions_of, **options: Any) -> None:
        self._tokens = tokens
        self._member = Membership(options)
        self._pause = ExitStack()
        self._loss: Loss | None = None
        """That of the newest batch. The optimizer steps before anybody else sees it, so it is
        logged with the next one."""
        self._counted_steps = self._made_steps = 0
        """Steps of all optimizers, as Lightning counts them and as they were made."""

    @property
    def learner(self) -> Learner:
        """That of the training under way, or of the last one. Raises before the first."""
        assert self._member.learner is not None, "training has not begun"
        return self._member.learner

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # First, so that we have left before another callback swaps averaged weights in.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        configs = [
            each
            for each in trainer.lr_scheduler_configs
            if each.interval == "step" and each.frequency == 1
        ]
        total_steps = trainer.estimated_stepping_batches if configs else 0
        schedulers = [each.scheduler for each in configs]
        self._member.join(pl_module, trainer.optimizers, schedulers, total_steps)
        self._loss = None
        self._counted_steps = trainer.global_step
        self._made_steps = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._pause.close()
        self.learner.log(self._tokens(batch), self._loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach() * trainer.accumulate_grad_batches
        steps = trainer.global_step
        if steps == self._counted_steps:
            return  # The gradients of this batch wait for more.
        if self._member.steps == self._made_steps:
            self.learner.discard()  # A GradScaler has skipped the step.
        every = trainer.log_every_n_steps
        if every and steps // every > self._counted_steps // every:
            self._log_metrics(trainer, steps)
        self._counted_steps = steps
        self._made_steps = self._member.steps
        trainer.should_stop |= self.learner.should_stop

    def _log_metrics(self, trainer: Any, step: int) -> None:
        metrics = self._member.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        trainer.callback_metrics.update({name: torch.tensor(metrics[name]) for name in metrics})

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause.close()
        self._pause.enter_context(self._member.pause("evaluating"))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._pause.enter_context(self._member.pause("saving"))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause.close()
        self._member.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._pause.close()
        self._member.close()
