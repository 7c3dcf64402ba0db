"""`narrows learner`: an ordinary PyTorch loop that trains a byte GPT as one learner of a run.

Importing this module does not load PyTorch; training does.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cyclopts import Parameter

from narrows.bench.reference.text import load_text
from narrows.learner.site import join_target
from narrows.proto.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from narrows.bench.reference.gpt import GPT

PRINT_S: Final = 2.0
"""Seconds between two lines about the training: a step, which may take a millisecond, has none."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one learner; all others come from the broker."""

    broker: str | None = None
    """Address that `narrows broker` prints, tcp://HOST:PORT (default: the key's)."""
    name: str | None = None
    """Name of this learner, unique in the run; one that returns takes its old name (default: the
    key's)."""
    key: Path | None = None
    """Key file of this site (default: the one that NARROWS_KEY names, if it names any)."""
    data: Path | None = None
    """Folder with text files (default: the sources of Python's standard library)."""
    preset: Literal["nano", "micro", "tiny", "small", "medium", "large"] = "tiny"
    """Size of the model, the same for all: 0.12, 0.43, 0.8, 4.8, 25 or 85 million parameters."""
    seed: int = 0
    """Changes the order of the text, never the model's first parameters."""
    device: str = "cpu"
    """Where the model is trained, as PyTorch names it; on cuda matrices are bfloat16, and each
    process of a host has a GPU of its own."""
    fsdp: bool = False
    """Shard the model over the processes that torchrun has started: they are one learner."""
    threads: int = 1
    """CPU threads of PyTorch."""
    step_wait_s: float = 0.0
    """Seconds added to every inner step, to act as a slower machine."""
    events: Path | None = None
    """File that gets one JSON line per version that becomes complete here."""
    json: Path | None = None
    """File for the summary at the end."""
    save: Path | None = None
    """File for the model at the end, safetensors."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("step-wait-s", self.step_wait_s, 0),
            ("threads", self.threads, 1),
        ):
            if not value >= least:
                raise ConfigError(f"--{name}", expected=f">= {least}", got=str(value))


def learner(options: Options = Options()) -> None:
    """Train a compact GPT over bytes as one learner of a run.

    Ctrl-C leaves the run in order and measures the model; a second one ends at once, and so does
    the first while the run has not begun. SIGUSR1 has it write its last inputs, for a report of a
    bug. Under torchrun, with --fsdp, all processes are one learner.
    """
    need_torch()
    _check_ranks(options)
    # Unheard it would end the process; before there is a Learner it has nothing to write.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    target = join_target(options.broker, options.name, options.key)
    options = replace(options, broker=target.broker, name=target.name)
    say(f"{options.name}: loading PyTorch, which takes seconds")
    level = logging.WARNING if rank() else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    summary = train(options)
    say(
        f"{options.name}: {summary['steps']:,} steps, {summary['tokens']:,} tokens,"
        f" validation loss {summary['validation_loss']:.4f}"
    )
    if options.json is not None and rank() == 0:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


def train(options: Options) -> dict[str, Any]:
    """Trains until the run ends or a signal comes; returns the summary.

    Losses are nats per byte, `loop_s` the wall seconds of the loop. Raises ConfigError, and what
    Learner raises.
    """
    import torch

    from narrows.bench.reference import gpt
    from narrows.learner import Learner

    torch.set_num_threads(options.threads)
    own_gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    is_any_gpu = options.fsdp and options.device == "cuda"
    device = gpt.usable_device(own_gpu if is_any_gpu else options.device)
    preset = gpt.PRESETS[options.preset]
    text = load_text(options.data)
    say(str(text))
    # Every learner begins with the same parameters: it must not matter whose become version 0.
    model = gpt.GPT(preset, seed=0).to(device)
    if options.fsdp:
        _shard(model, device)
    optimizer = gpt.make_optimizer(model, preset.peak_learning_rate)
    learner = Learner(
        model,
        optimizer,
        broker=options.broker,
        name=options.name,
        key=options.key,
        events=options.events,
    )
    steps = 0
    signal.signal(signal.SIGUSR1, lambda *_: learner.write_inputs())
    # Whoever waits for the run to begin has nothing to leave in order: it ends at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order = f"{options.seed}:{options.name}"
    if rank():
        order += f":{rank()}"
    with learner:
        stop = _stop_on_signal(learner_name=str(options.name))
        # It begins where the run stands: others have learned from the text before.
        batches = text.tokens(
            batch=preset.batch,
            context=preset.context,
            order=order,
            skip=int(learner.run_step),
        )
        # A text that ends ends the loop of all ranks at the same step; a break would not.
        wanted = itertools.takewhile(lambda _: not stop.is_set(), batches)
        started_s = printed_s = time.monotonic()
        for x, y in learner.until_end(wanted):
            peak = preset.peak_learning_rate * learner.lr_scale
            for group in optimizer.param_groups:
                group["lr"] = gpt.learning_rate(learner.progress, learner.run_step, peak)
            loss = model.loss(torch.from_numpy(x), torch.from_numpy(y))
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=x.size, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

            if options.step_wait_s:
                time.sleep(options.step_wait_s)
            if time.monotonic() > printed_s + PRINT_S:
                printed_s = time.monotonic()
                goal = f"{learner.progress:4.0%}  " if learner.progress else ""
                say(
                    f"{options.name}: {goal}step {steps:,}  loss {loss.item():.3f}"
                    f"  {learner.health}"
                )
        loop_s = time.monotonic() - started_s
    if options.save is not None:
        learner.save(options.save)
    summary = {
        "name": options.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "tokens": steps * preset.batch * preset.context * ranks(),
        "loop_s": loop_s,
        "cpu_s": time.process_time(),
        "validation_loss": model.validation_loss(text.validation_windows(context=preset.context)),
        "stats": learner.stats(),
    }
    if options.fsdp:
        torch.distributed.destroy_process_group()
    return summary


def rank() -> int:
    """The number of this process among those that torchrun has started; 0 without it."""
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def say(text: str) -> None:
    """Prints a line, once for all ranks."""
    if rank() == 0:
        print(text, flush=True)


def _check_ranks(options: Options) -> None:
    """Raises ConfigError where torchrun and --fsdp do not go together."""
    if options.fsdp and "RANK" not in os.environ:
        raise ConfigError(
            "--fsdp",
            expected="processes that torchrun has started",
            got="one that was started without it",
            remedy="torchrun --nproc-per-node 2 -m narrows learner --fsdp ...",
        )
    if ranks() > 1 and not options.fsdp:
        raise ConfigError(
            "processes of one learner",
            expected="--fsdp, which shards the model over them",
            got=f"WORLD_SIZE={ranks()}",
            remedy="add --fsdp; for learners of their own start each without torchrun",
        )


def _shard(model: GPT, device: torch.device) -> None:
    """Shards the model over all ranks by FSDP2, in place."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (ranks(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _stop_on_signal(learner_name: str) -> threading.Event:
    """An event that SIGINT or SIGTERM sets, so that the loop ends in order, and says so.

    A second signal raises KeyboardInterrupt, for whoever cannot wait.
    """
    asked = threading.Event()
    told = f"{learner_name}: leaves the run in order; a second Ctrl-C ends at once\n".encode()

    def on_signal(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        if rank() == 0:
            os.write(1, told)  # print() might be under way where the signal came.

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)
    return asked


def need_torch() -> None:
    """Raises ConfigError without PyTorch, which a package installed for a broker alone lacks."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this command needs PyTorch",
            remedy="pip install '.[learner]' in the checkout (broker and status do without)",
        )
