"""The training loop of the reference worker: an ordinary PyTorch loop that joins a run."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, Final

import torch

from narrows.bench.reference.gpt import GPT, PRESETS, learning_rate, make_optimizer
from narrows.bench.reference.text import load_text
from narrows.bench.reference.worker import Options
from narrows.learner import Learner
from narrows.proto.errors import ConfigError

PRINT_S: Final = 2.0
"""Seconds between two lines about the training: a step may take a millisecond."""


def train(options: Options) -> dict[str, Any]:
    """Trains until the run ends or a signal asks; the summary.

    Losses are nats per byte, `loop_s` the wall seconds of the loop. Raises ConfigError, and what
    Learner raises.
    """
    torch.set_num_threads(options.threads)
    device = usable_device(options.device)
    preset = PRESETS[options.preset]
    text = load_text(options.data)
    print(text, flush=True)
    # The same parameters at every learner: whose become version 0 must not matter.
    model = GPT(preset, seed=0).to(device)
    optimizer = make_optimizer(model, preset.peak_learning_rate)
    learner = Learner(
        model,
        optimizer,
        broker=options.broker,
        name=options.name,
        key=options.key,
        events=options.events,
    )
    steps, tokens, stop = 0, 0, _stop_on_signal()
    with learner:
        # It begins where the run stands: the text before has been learned from, by whomever.
        batches = text.tokens(
            batch=preset.batch,
            context=preset.context,
            order=f"{options.seed}:{options.name}",
            skip=int(learner.run_step),
        )
        started_s = printed_s = time.monotonic()
        for x, y in learner.until_end(batches):
            peak = preset.peak_learning_rate * learner.lr_scale
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(learner.progress, learner.run_step, peak)
            loss = model.loss(torch.from_numpy(x), torch.from_numpy(y))
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=x.size, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + x.size
            if options.step_wait_s:
                time.sleep(options.step_wait_s)
            if time.monotonic() > printed_s + PRINT_S:
                printed_s = time.monotonic()
                goal = f"{learner.progress:4.0%}  " if learner.progress else ""
                told = f"step {steps:,}  loss {loss.item():.3f}  {learner.health}"
                print(f"{options.name}: {goal}{told}", flush=True)
            if stop.is_set():
                break
        loop_s = time.monotonic() - started_s
    return {
        "name": options.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "tokens": tokens,
        "loop_s": loop_s,
        "cpu_s": time.process_time(),
        "validation_loss": model.validation_loss(text.validation_windows(context=preset.context)),
        "stats": learner.stats(),
    }


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises ConfigError if it cannot be used here."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "--device",
            expected="a device that PyTorch can use on this machine, as cpu or cuda:0",
            got=name,
            remedy=f"see nvidia-smi and this answer of PyTorch: {str(error).splitlines()[0]}",
        ) from None


def _stop_on_signal() -> threading.Event:
    """An event that SIGINT or SIGTERM sets, so that the loop ends in order; a second one raises."""
    asked = threading.Event()

    def on_signal(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)
    return asked
