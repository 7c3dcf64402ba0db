"""The reference worker: one learner that trains a byte GPT, behind `narrows learner`."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from narrows.learner.learner import Learner
from narrows.learner.reference.corpus import Bytes, Corpus, Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import (
    GPT,
    make_optimizer,
    parameter_count,
    preset,
    scheduled_rate,
    set_learning_rate,
    token_tensor,
    validation_loss,
)
from narrows.learner.reference.recording import recording_client
from narrows.learner.transport import Client
from narrows.proto.address import parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.units import format_bytes, format_count

REPORT_INTERVAL_S = 2.0
"""Seconds between two status lines."""

_log = logging.getLogger("narrows.worker")


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of one learner of the reference model; all others come from the broker."""

    broker: str
    """Control endpoint, such as tcp://127.0.0.1:7070."""
    name: str
    """Name of this learner, unique in the run; it also seeds the order of the text."""
    data: Path | None = None
    """Folder with text files; None: the sources of Python's standard library."""
    preset: str = "tiny"
    """Size of the model: nano, micro, tiny, small or medium. The same for all learners of a run."""
    part: str = "1/1"
    """i/n: read the i-th of n disjoint parts of the text."""
    batch: int = 0
    """Windows per inner step; 0: the preset's."""
    seed: int = 0
    """Changes the order of the text, never the model's first parameters."""
    threads: int = 1
    """CPU threads of PyTorch."""
    peak_learning_rate: float = 0.0
    """Peak of the schedule; 0: the preset's."""
    steps_max: int = 0
    """Leave after so many own steps; 0: at the end of the run."""
    step_wait_s: float = 0.0
    """Seconds added to every step, to act as a slower machine."""
    join_timeout_s: float = 60.0
    """Seconds to wait for the broker and the first parameters."""
    events: Path | None = None
    """File that gets one JSON line per event of the exchange."""
    json: Path | None = None
    """File for the summary at the end."""
    record: Path | None = None
    """File for one outer gradient of each fragment."""
    key: Path | None = None
    """Key file of the site; None: the one that NARROWS_KEY names, if it names any."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError("too few threads", expected=">= 1", got=str(self.threads))
        for name in ("batch", "peak_learning_rate", "steps_max", "step_wait_s"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} is negative", expected=">= 0", got=str(getattr(self, name))
                )
        parse_part(self.part)
        parse_address(self.broker)


def run_worker(options: WorkerOptions) -> dict[str, Any]:
    """Join the run, train until it ends (or a signal comes), return and write the summary.

    Errors: ConfigError for the options, BrokerUnreachable when no broker answers in time, Refused
    when it does not want this learner.
    """
    torch.set_num_threads(options.threads)
    config = preset(options.preset)
    corpus = load_corpus(options.data)
    windows = fixed_windows(corpus.validation, context=config.context)
    print(corpus.describe(), flush=True)
    # One seed for everybody: which learner founds the run must not matter.
    model = GPT(config, seed=0)
    loop = _Loop(options, model, corpus)
    with _stop_on_signals() as stop:
        loop.run(stop)
    print(f"{options.name}: validating", flush=True)
    summary = loop.summary() | {"validation_loss": validation_loss(model, windows)}
    _write(summary, options.json)
    return summary


class _Loop:
    """The training loop of the README with what a user wants to see of it."""

    def __init__(self, options: WorkerOptions, model: GPT, corpus: Corpus) -> None:
        self.options, self.model, self.corpus = options, model, corpus
        self.peak = options.peak_learning_rate or model.config.peak_learning_rate
        self.optimizer = make_optimizer(model, self.peak)
        self.steps = self.tokens = 0
        self.loss = float("nan")
        self.loop_s = 0.0
        self.stats: dict[str, Any] = {}
        self._printed = (0.0, 0)

    def run(self, stop: _Stop) -> None:
        options = self.options
        with Learner(
            self.model,
            self.optimizer,
            broker=options.broker,
            name=options.name,
            key=options.key,
            join_timeout_s=options.join_timeout_s,
            events=options.events,
            connect=partial(recording_client, options.record) if options.record else Client,
        ) as learner:
            # From here on a signal ends the loop in order; before it leaves at once.
            stop.joined = True
            self._train(learner, stop)
        self.stats = dict(learner.stats())

    def _train(self, learner: Learner, stop: _Stop) -> None:
        started_s = time.monotonic()
        self._printed = (started_s, 0)
        for x, y in learner.until_end(self._reader(learner)):
            self._step(learner, x, y)
            self.loop_s = time.monotonic() - started_s
            self._print_status(learner)
            if stop.asked or self.steps == self.options.steps_max:
                break

    def _reader(self, learner: Learner) -> Reader:
        # A learner that returns goes on in the text where the run stands: the text before has been
        # contributed, by its last life or by the others.
        return Reader(
            self.corpus.train,
            batch=self.options.batch or self.model.config.batch,
            context=self.model.config.context,
            name=self.options.name,
            seed=self.options.seed,
            part=parse_part(self.options.part),
            start_batch=int(learner.run_step),
        )

    def _step(self, learner: Learner, x: Bytes, y: Bytes) -> None:
        rate = scheduled_rate(learner.progress, learner.run_step, self.peak)
        set_learning_rate(self.optimizer, rate * learner.lr_scale)
        loss = self.model.loss(token_tensor(x), token_tensor(y))
        loss.backward()  # type: ignore[no-untyped-call]
        learner.log(tokens=x.size, loss=loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Waits for the device; a loop that cares for speed keeps the tensor.
        self.loss = loss.item()
        self.steps += 1
        self.tokens += x.size
        if self.options.step_wait_s:
            time.sleep(self.options.step_wait_s)

    def _print_status(self, learner: Learner) -> None:
        now_s = time.monotonic()
        printed_s, printed_tokens = self._printed
        # A step may take a millisecond: a line for each would hide the training.
        if now_s - printed_s < REPORT_INTERVAL_S:
            return
        self._printed = (now_s, self.tokens)
        stats = learner.stats()
        goal = f" ({learner.progress:.0%})" if learner.progress else ""
        tokens_per_s = (self.tokens - printed_tokens) / (now_s - printed_s)
        print(
            f"{self.options.name}: step {self.steps:,}  loss {self.loss:.3f}"
            f"  {tokens_per_s:,.0f} tokens/s  {stats['versions_adopted']:,} versions adopted"
            f"  up {format_bytes(stats['up_bytes'])}  down {format_bytes(stats['down_bytes'])}"
            f"  run {format_count(learner.run_tokens)} tokens{goal}  {learner.health}",
            flush=True,
        )

    def summary(self) -> dict[str, Any]:
        """JSON-ready; `loop_s` are the wall seconds of the loop, all waiting included."""
        options = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.options).items()}
        return {
            "name": self.options.name,
            "options": options,
            "corpus_digest": self.corpus.corpus_digest,
            "parameters": parameter_count(self.model),
            "steps": self.steps,
            "tokens": self.tokens,
            "train_loss": self.loss if self.steps else None,
            "loop_s": self.loop_s,
            "cpu_s": time.process_time(),
            "tokens_per_s": self.tokens / self.loop_s if self.loop_s else 0.0,
            "stats": self.stats,
        }


def parse_part(text: str) -> tuple[int, int]:
    """`2/4` -> (2, 4); ConfigError unless 1 <= i <= n."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ConfigError("this is no part", expected="i/n with 1 <= i <= n", got=repr(text))
    return int(i), int(n)


@dataclass
class _Stop:
    """Whether a signal asked for the end, and whether the loop is there to hear of it."""

    asked: bool = False
    joined: bool = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A second signal, or one while we still wait for the broker, leaves at once.
        if self.asked or not self.joined:
            raise KeyboardInterrupt
        self.asked = True
        _log.warning("%s: leaving after this step", signal.Signals(number).name)


@contextmanager
def _stop_on_signals() -> Generator[_Stop]:
    """SIGINT and SIGTERM end the loop in order; Python allows this in the main thread only."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.on_signal) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _write(summary: dict[str, Any], path: Path | None) -> None:
    loss = summary["validation_loss"]
    print(
        f"{summary['name']}: {summary['steps']:,} steps, {summary['tokens']:,} tokens,"
        f" {summary['tokens_per_s']:,.0f} tokens/s, validation loss {loss:.4f}",
        flush=True,
    )
    if path is not None:
        path.write_text(json.dumps(summary, indent=2) + "\n")
