"""Cost of taking part for a training loop: the same loop with and without Narrows, in turn.

`python -m narrows.bench.overhead.bench --json FILE` runs the broker in its own process and one
learner here. Each round times both loops, so that a noisy machine disturbs both alike. Only ratios
count.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cyclopts import App

from narrows.bench.kit.machine import write_result
from narrows.bench.kit.processes import Processes, work_folder
from narrows.learner import Learner
from narrows.learner.reference.corpus import Reader, load_corpus
from narrows.learner.reference.gpt import GPT, make_optimizer, preset, token_tensor

app = App(name="narrows.bench.overhead.bench", help=__doc__)


@app.default
def overhead(
    *, rounds: int = 5, steps: int = 150, preset_name: str = "tiny", json_file: Path | None = None
) -> None:
    """Prints one row per round and the medians.

    rounds: pairs of loops. steps: inner steps per loop. json_file: file for the rows.
    """
    logging.getLogger("narrows").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    with work_folder(None, "overhead") as folder, Processes(folder) as processes:
        address = processes.start_broker(
            "--listen", "tcp://127.0.0.1:0", "--state-dir", str(folder / "state")
        )
        loop = _TimedLoop(preset_name)
        loop.plain(steps)  # Warms caches up, and raises clock rates.
        rows = [_row(loop, address, index, steps) for index in range(rounds)]
    ratio = median(row["throughput_ratio"] for row in rows)
    held_up = median(row["blocked_fraction"] for row in rows)
    print(f"median: {ratio:.1%} of the plain loop's tokens/s, held up {held_up:.2%} of the time")
    write_result(json_file, "overhead", {"seed": 0, "rows": rows})


def _row(loop: _TimedLoop, address: str, index: int, steps: int) -> dict[str, Any]:
    """One pair of loops; the order changes from row to row."""
    if index % 2:
        joined = loop.joined(address, steps)
        plain_s = loop.plain(steps)
    else:
        plain_s = loop.plain(steps)
        joined = loop.joined(address, steps)
    row = {
        "round": index,
        "plain_s": plain_s,
        **joined,
        "throughput_ratio": plain_s / joined["joined_s"],
    }
    print(json.dumps(row), flush=True)
    return row


class _TimedLoop:
    """The reference model's training loop."""

    def __init__(self, preset_name: str) -> None:
        config = preset(preset_name)
        self.model = GPT(config, seed=0)
        self.optimizer = make_optimizer(self.model, config.peak_learning_rate)
        self.reader = Reader(
            load_corpus(None).train,
            batch=config.batch,
            context=config.context,
            name="overhead",
            seed=0,
        )

    def plain(self, steps: int) -> float:
        """Seconds of `steps` inner steps without Narrows."""
        started = time.perf_counter()
        for _ in range(steps):
            self._step(lambda tokens, loss: None)
        return time.perf_counter() - started

    def joined(self, address: str, steps: int) -> dict[str, float]:
        """The same within a Learner, without joining and leaving."""
        with Learner(self.model, self.optimizer, broker=address, name="overhead") as learner:
            started = time.perf_counter()
            for _ in range(steps):
                self._step(lambda tokens, loss: learner.log(tokens=tokens, loss=loss))
            joined_s = time.perf_counter() - started
            stats = learner.stats()
        return {
            "joined_s": joined_s,
            "blocked_fraction": stats["code_s"] / joined_s,
            "versions_adopted": stats["versions_adopted"],
        }

    def _step(self, log: Callable[[int, torch.Tensor], None]) -> None:
        x, y = next(self.reader)
        loss = self.model.loss(token_tensor(x), token_tensor(y))
        loss.backward()  # type: ignore[no-untyped-call]
        log(x.size, loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    app()
