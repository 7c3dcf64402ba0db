"""The learners of `narrows bench chaos`: inner steps are timed waits, the exchange is real."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from narrows.bench.kit.nursery import serve
from narrows.bench.loop.bench import Drift, layout_of
from narrows.learner.module import RAMP_STEPS_MIN
from narrows.learner.transport import Client, ClientOptions
from narrows.proto.codec import warm_up

TOKENS_PER_STEP: Final = 1000

JOIN_TIMEOUT_S: Final = 600.0
"""A line may be cut while a learner joins. The bench would start that learner again, so it may as
well wait."""

FINISH_TIMEOUT_S: Final = 30.0


@dataclass
class _StopSignal:
    asked: bool = False

    def on_signal(self, *_: object) -> None:
        self.asked = True


class Life:
    """Record of one process, line by line, in a file that outlives its SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def tell(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"time_s": time.time(), "event": event, **facts}) + "\n")


def learn(folder: Path, params: int, step_s: float, name: str, broker: str) -> None:
    """One life of a learner: joins, steps until SIGTERM, leaves in order and writes its ledger."""
    stop = _StopSignal()
    signal.signal(signal.SIGTERM, stop.on_signal)
    life, layout = Life(folder / f"{name}.life"), layout_of(params)
    life.tell("started")
    options = ClientOptions(
        broker=broker,
        name=name,
        layout=layout,
        frozen_digest=0,
        host=Drift(layout),
        join_timeout_s=JOIN_TIMEOUT_S,
        contribute_after_steps=RAMP_STEPS_MIN,
        events=folder / f"{name}.jsonl",
    )
    learner = Client(options)
    learner.start()
    life.tell("joined", incarnation=options.incarnation)
    while not stop.asked:
        time.sleep(step_s)
        life.tell("step")  # Before it is counted, so that no journal can know of more.
        learner.boundary(TOKENS_PER_STEP, 1.0)
    learner.finish(FINISH_TIMEOUT_S)
    life.tell("left", ledger=learner.stats()["ledger"])


def main(folder: Path, params: int, step_s: float) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    warm_up()
    serve(folder, lambda name, broker: learn(folder, params, step_s, name, broker))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
