"""Joins a PyTorch training loop to a run: the context manager that user code sees."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from narrows.learner.exchange import Exchange
from narrows.learner.gpu import TorchIsland
from narrows.learner.handover import AdamMoments
from narrows.learner.link import Link
from narrows.learner.loop import Loss, StepLog, bare_optimizers, once_a_step, ramp_steps
from narrows.learner.parameters import Parameters, misuse
from narrows.learner.ranks.exchange import RanksExchange
from narrows.learner.ranks.meeting import Ranks, counts_tokens, is_one_of_several
from narrows.learner.site import join_target
from narrows.learner.weights import WeightWatch
from narrows.proto.ports import Island

Batch = TypeVar("Batch")

HEALTH_NUMBERS: Final[Mapping[str, int]] = {
    "connected": 0, "final": 0, "ended": 0, "joining": 1, "waiting": 1, "blocked": 2, "offline": 2,
    "refused": 2,
}  # fmt: skip
"""Each word of `Learner.health` as `Learner.metrics` has it."""

_log = logging.getLogger("narrows.learner")


class Learner:
    """Joins a training loop to the run of a broker while its block lasts.

        with Learner(model, optimizer, broker="tcp://HOST:7070", name="site-a") as learner:
            for batch in learner.until_end(loader):
                loss = model(batch)
                loss.backward()
                learner.log(tokens=batch.numel(), loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    Entering blocks until every fragment is adopted. It raises BrokerUnreachable after
    `join_timeout_s` seconds without a broker or without progress; later an outage never raises.
    Each step of the optimizer, with several that of the last one, is a boundary at which fragments
    are read and adopted. With `boundary="manual"` the loop calls `step()` instead, for an optimizer
    that steps within backward.

    Leaving takes the final model of a run that has reached its goal, or raises Unfinished; it waits
    at most `leave_timeout_s` seconds (None: while something moves, and half a minute). When the
    body raised, it leaves at once.

    `optimizer` may be a list, or a wrapper around torch optimizers. `broker`, `name`, `key` (the
    key file of the site) and `workers` (threads that code in the background; else a quarter of the
    cores, at most 8) may come from NARROWS_BROKER, NARROWS_NAME, NARROWS_KEY and NARROWS_WORKERS.
    `merge_rules` is described at Parameters. `events` is a file that gets one JSON line per event.

    Several ranks of torch.distributed are one learner: every rank makes a Learner and the same
    steps, rank 0 speaks with the broker, and all read one clock. Each rank logs its own tokens.
    Where some learn from the same batch, as with tensor or context parallelism, `data_parallel` is
    the part of the device mesh along which batches differ, such as `mesh["dp"]`.

    Raises LocalProtocolError MISUSE for a model or a loop that cannot take part, and Refused (also
    from `optimizer.step()`) when the broker does not want this learner.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        broker: str | None = None,
        name: str | None = None,
        key: str | os.PathLike[str] | None = None,
        merge_rules: Mapping[str, str] | None = None,
        boundary: Literal["step", "manual"] = "step",
        join_timeout_s: float = 60.0,
        leave_timeout_s: float | None = None,
        events: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        data_parallel: Any = None,
    ) -> None:
        is_rank = is_one_of_several()
        self._optimizers = bare_optimizers(optimizer)
        self._parameters = Parameters(model, merge_rules)
        self._watch = WeightWatch(self._parameters, self._optimizers)
        moments = AdamMoments(self._parameters, self._optimizers)
        self._boundary = boundary
        self._leave_timeout_s = leave_timeout_s

        def exchange_over(island: Island) -> Exchange:
            link = Link(
                join_target(broker, name, key, workers), self._parameters.layout, island,
                events=None if events is None else Path(events),
            )  # fmt: skip
            return Exchange(link, join_timeout_s=join_timeout_s, adopting=self._watch.adopting)

        self._exchange: Exchange | RanksExchange
        if is_rank:
            counts = counts_tokens(self._parameters, data_parallel)
            ranks = Ranks(self._parameters, counts=counts, moments=moments)
            self._exchange = RanksExchange(ranks, exchange_over, self._watch.adopting)
        else:
            self._exchange = exchange_over(TorchIsland(self._parameters, moments.hand_over))
        self._log = StepLog()
        self._hooks: list[RemovableHandle] = []
        self._entered = self._closed = False
        self._progress = self._code_s = 0.0
        self._measured = time.monotonic(), 0, 0
        """When `metrics` was called last, and the bytes up and down until then."""

    def __enter__(self) -> Self:
        if self._entered:
            raise misuse("a Learner can be entered once", remedy="Make a new one to join again.")
        self._entered = True
        try:
            self._watch.start()
            # Not sooner: between the constructor and here the optimizers' state may be loaded.
            self._exchange.join(ramp_steps(self._optimizers))
            if self._boundary == "step":
                first = self._optimizers[0]
                last = self._optimizers[-1]
                self._hooks = [
                    first.register_step_pre_hook(once_a_step(first, self._before_step)),
                    last.register_step_post_hook(once_a_step(last, self.step)),
                ]
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None or self._closed:
            self._abort()
            return
        try:
            self._remove_hooks()
            self._watch.look_at_buffers()
            self._exchange.finish(self._leave_timeout_s, disowned=self._watch.is_foreign())
        except BaseException:
            self._abort()
            raise

    def close(self) -> None:
        """Leaves at once, as when the body raises: for a loop that another program owns. Steps that
        were not pushed are lost. The learner makes no boundary any more and cannot be entered; a
        second call, and leaving the block after it, are harmless."""
        self._entered = self._closed = True
        self._remove_hooks()
        self._exchange.abort()

    def until_end(self, loader: Iterable[Batch]) -> Generator[Batch]:
        """Yields the loader's batches until it ends or `should_stop`; never starts it anew. Of
        several ranks each yields as many as every other: until one of their loaders ends."""
        yield from self._exchange.batches(loader)

    def log(self, tokens: int, loss: Loss | None = None) -> None:
        """Counts what the coming step learns from; any number of times before each step.

        tokens: number in this batch, positive. loss: mean over them, a number or a tensor of one
        element; a tensor on a device is not waited for. Raises LocalProtocolError MISUSE.
        """
        started = time.perf_counter()
        self._log.add(tokens, loss)
        self._code_s += time.perf_counter() - started

    def discard(self) -> None:
        """Drops what was logged since the last step: call it when the loop skips a step."""
        self._log.discard()

    def _before_step(self) -> None:
        started = time.perf_counter()
        self._watch.before_step()
        self._code_s += time.perf_counter() - started

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """The boundary after an inner step. The optimizer's hook calls it, unless the loop does
        (`boundary="manual"`). Raises LocalProtocolError MISUSE, Refused."""
        started = time.perf_counter()
        tokens, loss = self._log.take()
        if not tokens:
            raise misuse(
                "the optimizer made a step without logged tokens",
                remedy="Add before optimizer.step():"
                " learner.log(tokens=batch.numel(), loss=loss). Within Trainer or Lightning use"
                " narrows.integrations.transformers or narrows.integrations.lightning instead.",
            )
        self._watch.stepped()
        try:
            self._exchange.boundary(tokens, loss)
        finally:  # Also where an exception has broken an adoption off.
            self._watch.boundary_over()
        self._code_s += time.perf_counter() - started

    @contextmanager
    def pause(self, reason: str = "evaluating") -> Generator[None]:
        """Tells the broker that no steps are made while in the block, so that no round waits."""
        self._exchange.set_paused(reason)
        try:
            yield
        finally:
            self._exchange.set_paused(None)

    @property
    def should_stop(self) -> bool:
        """The run has reached its goal: do not step any more."""
        return self._exchange.view().stopping

    @property
    def run_tokens(self) -> float:
        """The run's clock in tokens of all learners. It never falls."""
        return self._exchange.view().run_tokens

    @property
    def run_step(self) -> float:
        """The run's clock in steps: learning-rate schedules follow it."""
        view = self._exchange.view()
        if not view.step_tokens:
            return 0.0
        return view.run_tokens / view.step_tokens

    @property
    def goal_tokens(self) -> int:
        """Tokens after which the run ends; 0 in a run without a goal, and before the block."""
        return self._exchange.view().goal_tokens

    @property
    def progress(self) -> float:
        """Fraction of the run's goal that is reached, 0 to 1, never falling; 0 without a goal."""
        view = self._exchange.view()
        if view.goal_tokens:
            reached = min(1.0, view.run_tokens / view.goal_tokens)
            # Another life of the broker may have a larger goal.
            self._progress = max(self._progress, reached)
        return self._progress

    @property
    def lr_scale(self) -> float:
        """Factor for the learning rate of the next step, above 0 and at most 1.

        It rises step by step for a learner that joined a run under way without the inner state of
        its optimizers, and is 1 for every other one.
        """
        view = self._exchange.view()
        steps = view.ramp_steps
        if not self._entered:
            steps = ramp_steps(self._optimizers)
        return min(1.0, (view.steps + 1) / max(1, steps))

    @property
    def health(self) -> str:
        """One word: joining, connected, waiting, blocked, offline, refused, final or ended."""
        return self._exchange.view().health

    def state_dict(self) -> dict[str, Any]:
        """The model's state under clean names; the tensors share the model's memory."""
        return self._parameters.state_dict()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file; its metadata name the run, the version of each fragment, and
        whether this is the final model. Of several ranks all call it, and rank 0 writes."""
        metadata = self._exchange.metadata()
        self._parameters.save(path, metadata, writes=self._exchange.leads)

    def stats(self) -> dict[str, Any]:
        """Counters of the exchange; `code_s`: seconds of the training thread in our code."""
        return {**self._exchange.stats(), "code_s": self._code_s}

    def metrics(self) -> dict[str, float]:
        """The figures of a chart, for wandb.log, trackio.log or TensorBoard's add_scalar.

        Tokens and steps are counts; `versions_behind` is that of the fragment that is furthest
        behind; bits per second are those on the line since the last call. `health` is 0 where all
        is well, 1 where the learner joins or waits, 2 for trouble: blocked, offline or refused. Of
        several ranks rank 0 has all of them, the others those that all ranks agree on.
        """
        figures = {
            "run_tokens": self.run_tokens, "run_step": self.run_step, "progress": self.progress,
            "health": HEALTH_NUMBERS[self.health],
        }  # fmt: skip
        if self._exchange.leads:
            now = time.monotonic()
            stats = self._exchange.stats()
            since, up_bytes, down_bytes = self._measured
            self._measured = now, stats["up_bytes"], stats["down_bytes"]
            bits_per_byte_s = 8 / max(now - since, 1e-3)
            figures |= {
                "merged_tokens": stats["merged_tokens"], "lost_tokens": stats["lost_tokens"],
                "versions_behind": stats["versions_behind"],
                "up_bits_per_s": (stats["up_bytes"] - up_bytes) * bits_per_byte_s,
                "down_bits_per_s": (stats["down_bytes"] - down_bytes) * bits_per_byte_s,
            }  # fmt: skip
        return {f"narrows/{name}": float(figure) for name, figure in figures.items()}

    def write_inputs(self) -> None:
        """Writes what this learner heard and decided last, for a report of a bug: beside the events
        file, else into a new folder for temporary files. The log names the file. Safe from signal
        handlers."""
        self._exchange.write_inputs()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _abort(self) -> None:
        """Cleans up while an exception is under way; an error here must not hide it."""
        try:
            self._remove_hooks()
            self._exchange.abort()
        except Exception:
            _log.exception("cleaning up after an error failed too; the first error is raised")
