"""`narrows learner`: one learner that trains a byte GPT. PyTorch is loaded when it runs."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from narrows.learner.site import join_target
from narrows.proto.errors import ConfigError


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
    """Where the model is trained, as PyTorch names it; on cuda matrices are bfloat16."""
    threads: int = 1
    """CPU threads of PyTorch."""
    step_wait_s: float = 0.0
    """Seconds added to every inner step, to act as a slower machine."""
    events: Path | None = None
    """File that gets one JSON line per version that becomes complete here."""
    json: Path | None = None
    """File for the summary at the end."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("step-wait-s", self.step_wait_s, 0),
            ("threads", self.threads, 1),
        ):
            if not value >= least:
                raise ConfigError(f"--{name}", expected=f">= {least}", got=str(value))


def learner(options: Options = Options()) -> None:
    """Train a compact GPT over bytes as one learner of a run.

    Ctrl-C leaves the run in order and measures the model; a second one ends at once.
    """
    need_torch()
    target = join_target(options.broker, options.name, options.key)
    options = replace(options, broker=target.broker, name=target.name)
    print(f"{options.name}: loading PyTorch, which takes seconds", flush=True)
    from narrows.bench.reference.training import train

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    summary = train(options)
    print(
        f"{options.name}: {summary['steps']:,} steps, {summary['tokens']:,} tokens,"
        f" validation loss {summary['validation_loss']:.4f}",
        flush=True,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


def need_torch() -> None:
    """Raises ConfigError without PyTorch: the package may be installed for a broker alone."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this command needs PyTorch",
            remedy="pip install '.[learner]' in the checkout (broker and status do without)",
        )
