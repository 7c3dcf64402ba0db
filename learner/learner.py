"""Joins a PyTorch training loop to a run: the context manager that user code sees."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from narrows.learner.client_interface import ClientInterface
from narrows.learner.module import (
    GradientWatch,
    HostLoss,
    Loss,
    StepLog,
    StrangerWatch,
    parameters_of,
    ramp_steps,
)
from narrows.learner.site import site_of
from narrows.learner.transport import Client, ClientOptions
from narrows.proto.errors import ErrorCode, LocalProtocolError

Batch = TypeVar("Batch")

LOG_REMEDY = "Add before optimizer.step(): learner.log(tokens=batch.numel(), loss=loss)"

_log = logging.getLogger("narrows.learner")


class Learner:
    """Joins a training loop to the run of a broker; see the example in the README.

    Entering blocks until every fragment is adopted. It raises BrokerUnreachable after
    `join_timeout_s` seconds without a broker, or without progress on data that is due. Later an
    outage never raises. If the optimizers have no state yet, the learning rate ramps up: see
    `lr_scale`. Each step of the optimizer, with several that of the last one, is a boundary at
    which fragments are read and adopted.

    Leaving takes the final model of a run that has reached its goal, or raises Unfinished. It waits
    while the broker speaks and a minute more, but no longer than `leave_timeout_s` (None: no such
    limit). When the body raised, it leaves at once.

    `key` is the key file of the site (`narrows keys accept` makes one); without it the one that the
    environment names in NARROWS_KEY, if it names any. `broker` and `name` come from it then, unless
    they are given.

    `merge_rules` is described at ModuleParameters. `events` is a file that gets one JSON line per
    event. With `device_encoding` pushes are encoded where the parameters are, which takes 8 bytes
    of that memory per parameter; the default is True if they are all on one GPU. `connect` makes
    the client; tests and benches give another one.

    Errors: LocalProtocolError(MISUSE) for a model or a loop that cannot take part, Refused (also
    from `optimizer.step()`) when the broker does not want this learner.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        broker: str | None = None,
        name: str | None = None,
        key: str | os.PathLike[str] | None = None,
        merge_rules: Mapping[str, str] | None = None,
        join_timeout_s: float = 60.0,
        leave_timeout_s: float | None = None,
        events: str | os.PathLike[str] | None = None,
        device_encoding: bool | None = None,
        connect: Callable[[ClientOptions], ClientInterface] = Client,
    ) -> None:
        _refuse_several_ranks()
        site = site_of(broker, name, key)
        self._optimizers = _listed(optimizer)
        self._parameters = parameters_of(model, merge_rules, device_encoding)
        self._leave_timeout_s = leave_timeout_s
        self._ramp_steps = 0
        self._connect = connect
        # All but the ramp, which is known only when the learner is entered.
        self._options = functools.partial(
            ClientOptions,
            broker=site.broker,
            name=site.name,
            key=site.key,
            key_file=site.key_file,
            layout=self._parameters.layout,
            frozen_digest=self._parameters.frozen_digest,
            host=self._parameters,
            join_timeout_s=join_timeout_s,
            events=None if events is None else Path(events),
        )
        self._joined: ClientInterface | None = None
        self._undo = ExitStack()
        self._step_log = StepLog(lambda tokens: self._client.skipped(tokens))
        self._losses = HostLoss()
        self._strangers = StrangerWatch(self._parameters, self._optimizers)
        self._steps = 0
        self._buffers_named: set[str] = set()
        self._code_s = 0.0

    def __enter__(self) -> Self:
        if self._joined is not None:
            raise _misuse("a Learner can be entered once", remedy="Make a new one to join again.")
        self._strangers.start()
        # Not sooner: between the constructor and here the optimizers' state may be loaded.
        self._ramp_steps = ramp_steps(self._optimizers)
        self._joined = self._connect(self._options(contribute_after_steps=self._ramp_steps))
        try:
            self._joined.start()
        except BaseException:
            self._abort()
            raise
        if not self._joined.joined_version_sum:
            self._ramp_steps = 0
        watch = GradientWatch(
            self._parameters.module,
            self._optimizers,
            steps=lambda: self._step_log.steps,
            cleared=self._on_zero_grad,
            withheld=self._on_withheld,
        )
        self._undo.enter_context(watch.start())
        hooks = [o.register_step_post_hook(self._on_other_step) for o in self._optimizers[:-1]]
        hooks.append(self._optimizers[-1].register_step_post_hook(self._on_step))
        for hook in hooks:
            self._undo.callback(hook.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()
        if error is not None:
            self._abort()
            return
        try:
            self._step_log.close()
            self._warn_of_buffers()
            self._client.finish(self._leave_timeout_s)
        except BaseException:
            self._abort()
            raise

    def until_end(self, loader: Iterable[Batch]) -> Generator[Batch]:
        """Yields the loader's batches until it ends or `should_stop`; never starts it anew."""
        batches = iter(loader)
        while not self.should_stop:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def log(self, tokens: int, loss: Loss | None = None) -> None:
        """Counts what the coming step learns from; any number of times before each step.

        tokens: number in this batch, positive. loss: mean over them, a number or a tensor of one
        element. A tensor on a device is not waited for, and its graph is not kept.
        Errors: LocalProtocolError(BAD_TOKENS | MISUSE).
        """
        with self._timed():
            self._step_log.add(tokens, loss)

    def discard(self) -> None:
        """Counts all that was logged since the last step as skipped: no step learned from it.

        Call it when the loop drops gradients by hand (`p.grad = None`). A `zero_grad()` of the
        optimizer or the model without a step is noticed without it, and so is a step that a
        torch.amp.GradScaler withholds.
        """
        with self._timed():
            self._step_log.discard()

    @contextmanager
    def pause(self, reason: str = "evaluating") -> Generator[None]:
        """Declines rounds with this reason while in the block, so that nobody waits for us."""
        self._client.pause(reason)
        try:
            yield
        except BaseException:
            self._quietly(self._client.resume)
            raise
        self._client.resume()

    @property
    def should_stop(self) -> bool:
        """The run has reached its goal: do not step any more."""
        return self._client.should_stop

    @property
    def progress(self) -> float:
        """Fraction of the run's goal that is reached, 0 to 1, never falling; 0 without a goal."""
        return self._client.progress

    @property
    def run_step(self) -> float:
        """The run's clock in steps, never falling: learning-rate schedules follow it."""
        return self._client.run_step

    @property
    def run_tokens(self) -> float:
        """The run's clock in tokens of all learners, never falling."""
        return self._client.run_tokens

    @property
    def lr_scale(self) -> float:
        """Factor for the learning rate of the next step, above 0 and at most 1.

        It rises step by step for a learner that joined a run under way without the inner state of
        its optimizers, and is 1 for every other one. Before joining it is that of such a learner.
        """
        steps = ramp_steps(self._optimizers) if self._joined is None else self._ramp_steps
        return min(1.0, (self._steps + 1) / max(1, steps))

    @property
    def health(self) -> str:
        """State of the session with the broker, in a word for a display."""
        return self._client.health

    def state_dict(self) -> dict[str, Any]:
        """The model's state under clean names; see ModuleParameters.state_dict."""
        return self._parameters.state_dict()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file; its metadata say if it is the final model of the run."""
        self._parameters.save(path, self._joined.standing() if self._joined else None)

    def stats(self) -> dict[str, Any]:
        """Counters of the client; `code_s`: seconds of the training thread in our code."""
        return {**self._client.stats(), "code_s": self._code_s}

    @property
    def _client(self) -> ClientInterface:
        if self._joined is None:
            raise _misuse(
                "the learner has not joined yet", remedy="Use it inside: with Learner(...) as l:"
            )
        return self._joined

    def _on_other_step(self, *_: object) -> None:
        self._step_log.stepped()

    def _on_step(self, *_: object) -> None:
        with self._timed():
            logged = self._step_log.take()
            if not logged.tokens:
                raise _misuse("the optimizer made a step without logged tokens", remedy=LOG_REMEDY)
            self._steps += 1
            self._strangers.check()
            self._parameters.check_adopted()
            self._client.boundary(logged.tokens, self._losses.newest(logged.loss))
            # A buffer that changes at all does so mostly at the first step: look ever more rarely.
            if self._steps & (self._steps - 1) == 0:
                self._warn_of_buffers()
                self._strangers.check_model()

    def _on_zero_grad(self) -> None:
        with self._timed():
            self._step_log.cleared()

    def _on_withheld(self) -> None:
        with self._timed():
            self._step_log.withheld()

    def _warn_of_buffers(self) -> None:
        new = [n for n in self._parameters.changed_buffers() if n not in self._buffers_named]
        self._buffers_named.update(new)
        if new:
            _log.warning(
                "buffers change but do not travel, each learner keeps its own: %s", ", ".join(new)
            )

    def _abort(self) -> None:
        self._quietly(self._client.abort)

    def _quietly(self, action: Callable[[], None]) -> None:
        """Cleans up while an exception is under way; an error here must not hide it."""
        try:
            action()
        except Exception:
            _log.exception("cleaning up after an error failed too; the first error is raised")

    @contextmanager
    def _timed(self) -> Generator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._code_s += time.perf_counter() - started


def _listed(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    given: list[object] = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = [one for one in given if isinstance(one, Optimizer)]
    if not optimizers or len(optimizers) < len(given):
        raise _misuse(
            "optimizer is of the wrong kind",
            expected="one torch.optim.Optimizer or a list of them",
            got=", ".join(type(one).__name__ for one in given) or "an empty list",
        )
    return optimizers


def _refuse_several_ranks() -> None:
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    if is_initialized and (ranks := distributed.get_world_size()) > 1:
        raise _misuse(
            "torch.distributed is initialised with several ranks",
            expected="world size 1",
            got=str(ranks),
            remedy="A learner is one process: several ranks are not supported yet.",
        )


def _misuse(message: str, **detail: str) -> LocalProtocolError:
    return LocalProtocolError(ErrorCode.MISUSE, message, **detail)
