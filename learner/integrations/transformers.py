"""Takes part in a run with the Trainer of transformers and those that are built on it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback

from narrows.integrations.membership import Membership, positions_of
from narrows.learner.learner import Learner
from narrows.learner.parameters import misuse


@contextmanager
def joined(
    trainer: Trainer, *, tokens: Callable[[Any], int] = positions_of, **options: Any
) -> Generator[Joined]:
    """Every `trainer.train()` in the block takes part in the run of a broker.

        with joined(trainer, broker="tcp://HOST:7070", name="site-a"):
            trainer.train()
        trainer.save_model("site-a")

    Training ends at the run's goal, and `train()` returns with the run's final model in
    `trainer.model`: `max_steps` or `num_train_epochs` must be above what the run takes. In a run
    with a goal the learning rate is that of `lr_scheduler_type` at the run's progress, if the
    schedule is a LambdaLR, as all are but `reduce_lr_on_plateau` and `greedy`.

    tokens: counts those of the inputs of one `training_step`; without it the elements of their
    `input_ids` count, padding included. options: those of `Learner`, such as `broker`, `name` and
    `key`.

    Raises LocalProtocolError MISUSE for what cannot take part; `trainer.train()` raises what
    entering and leaving a `Learner` raises. When anything raises, the run is left at once.
    """
    if trainer.args.load_best_model_at_end:
        raise misuse(
            "load_best_model_at_end would put old weights in the place of the run's model",
            expected="load_best_model_at_end=False",
            got="True",
            remedy="Set it to False: the run's final model is in trainer.model after train().",
        )
    if trainer.is_deepspeed_enabled:
        raise misuse(
            "DeepSpeed keeps the weights in its own optimizer, where nothing can be adopted",
            expected="Trainer without DeepSpeed",
            got=f"deepspeed={trainer.args.deepspeed}",
        )
    member = Membership(options)
    callback = Joined(member)

    def logged(training_step: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        learner = member.learner
        assert learner is not None, "a step without training"
        count = tokens(inputs)
        loss = training_step(model, inputs, *more, **named)
        # Trainer has divided it by the batches of this step, so that their sum is the step's mean.
        learner.log(count, loss * trainer.current_gradient_accumulation_steps)
        return loss

    def with_metrics(log: Any, logs: dict[str, float], *more: Any, **named: Any) -> Any:
        return log({**logs, **member.metrics()}, *more, **named)

    def evaluating(evaluate: Any, *given: Any, **named: Any) -> Any:
        with member.pause("evaluating"):
            return evaluate(*given, **named)

    def saving(save: Any, *given: Any, **named: Any) -> Any:
        with member.pause("saving"):
            return save(*given, **named)

    wrappers: dict[str, Callable[..., Any]] = {
        "training_step": logged, "log": with_metrics,
        "evaluate": evaluating, "_save_checkpoint": saving,
    }  # fmt: skip
    with ExitStack() as undone:
        undone.callback(member.close)
        # First, so that we have left before another callback swaps averaged weights in.
        trainer.callback_handler.callbacks.insert(0, callback)
        undone.callback(trainer.remove_callback, callback)
        for name, wrapper in wrappers.items():
            method = getattr(trainer, name)
            undone.callback(setattr, trainer, name, method)
            setattr(trainer, name, partial(wrapper, method))
        yield callback


class Joined(TrainerCallback):
    """Joins when training begins and its checkpoint is loaded, and leaves when it ends."""

    def __init__(self, member: Membership) -> None:
        self._member = member

    @property
    def learner(self) -> Learner:
        """That of the training under way, or of the last one. Raises before the first."""
        assert self._member.learner is not None, "training has not begun"
        return self._member.learner

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        schedulers = [given["lr_scheduler"]]
        self._member.join(given["model"], given["optimizer"], schedulers, state.max_steps)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if getattr(given["optimizer"], "step_was_skipped", False):  # A GradScaler's overflow.
            self.learner.discard()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop |= self.learner.should_stop

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._member.leave()
