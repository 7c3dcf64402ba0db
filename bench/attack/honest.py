"""An honest learner of the attack bench: inner steps are timed waits, the exchange is real."""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from typing import Final

from narrows.bench.loop.bench import Drift, layout_of
from narrows.learner.transport import Client, ClientOptions
from narrows.proto.codec import warm_up
from narrows.proto.keys import SiteKey, read_site_key

TOKENS_PER_STEP: Final = 1000
FINISH_S: Final = 5.0


def keyed_client(key: SiteKey, params: int) -> Client:
    """A learner without a model to train; its parameters drift."""
    layout = layout_of(params)
    return Client(
        ClientOptions(
            broker=key.broker,
            name=key.name,
            layout=layout,
            frozen_digest=0,
            host=Drift(layout),
            key=key,
        )
    )


def learn(key_file: Path, params: int, step_s: float, joined: Path) -> None:
    """Steps until SIGTERM; `joined` appears when the learner holds version 0."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    learner = keyed_client(read_site_key(key_file), params)
    learner.start()
    joined.touch()
    while not asked:
        time.sleep(step_s)
        learner.boundary(TOKENS_PER_STEP, 1.0)
    learner.finish(FINISH_S)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    warm_up()
    learn(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
