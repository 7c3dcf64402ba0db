"""A learner process that only exchanges: sizes and codecs are real, nothing is trained.

`python -m narrows.bench.wan.exchanger BROKER NAME PARAMS` prints a JSON line when every round is
open (`ready`) and one per exchange. Each line that it reads starts an exchange. With the word
`endless` it goes on by itself until its input ends, so that work is always waiting.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from narrows.bench.loop.bench import Drift
from narrows.learner.transport import Client, ClientOptions
from narrows.proto.errors import NarrowsError
from narrows.proto.messages import LayoutEntry

TOKENS: Final = 1000
"""Tokens of the one inner step of an exchange."""

LOOK_S: Final = 0.02
"""Interval at which it looks for arrivals; usually it is woken earlier."""

JOIN_TIMEOUT_S: Final = 300.0


def transformer_layout(params: int) -> tuple[LayoutEntry, ...]:
    """Exactly `params` elements as tensors of a transformer.

    Blocks of attention and MLP have about three quarters of them; norms and an embedding have the
    rest. There are four blocks if there is room.
    """
    width = 8
    while 4 * _block_elements(2 * width) <= params - 2 * width:
        width *= 2
    layout: list[LayoutEntry] = []
    for index in range(4 if 4 * _block_elements(width) < params else 0):
        shapes = {"qkv": (3 * width, width), "out": (width, width)}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
        name = f"blocks.{index}"
        layout += [LayoutEntry(f"{name}.{k}", v, "float32", "rda") for k, v in shapes.items()]
        layout += [LayoutEntry(f"{name}.norm{n}", (width,), "float32", "mean") for n in (1, 2)]
    left = params - 4 * _block_elements(width) if layout else params
    rows, rest = divmod(left, width)
    if rows:
        layout.insert(0, LayoutEntry("embedding", (rows, width), "float32", "mean"))
    if rest:
        layout.append(LayoutEntry("norm", (rest,), "float32", "mean"))
    return tuple(layout)


def _block_elements(width: int) -> int:
    return 12 * width * width + 2 * width


@dataclass
class Exchanger:
    """One learner. Times are seconds on the machine's monotonic clock, the same in all processes.

    A boundary with tokens answers every open round; one without tokens only adopts.
    """

    client: Client

    def await_rounds(self) -> None:
        """Returns when a round is open for every fragment, against the version that is adopted."""
        while not self._all_open():
            self._look()

    def exchange(self) -> dict[str, Any]:
        """One exchange: from the snapshot of all fragments to the adoption of the last one's next
        version."""
        before, cpu_s = self._adopted(), time.process_time()
        started_s = time.monotonic()
        self.client.boundary(TOKENS, 1.0)
        while any(new <= old for new, old in zip(self._adopted(), before, strict=True)):
            self._look()
        ended_s = time.monotonic()
        cpu_s = time.process_time() - cpu_s
        return {"started_s": started_s, "ended_s": ended_s, "cpu_s": cpu_s}

    def exchange_for_ever(self, over: threading.Event) -> None:
        """Answers every round as soon as it can, so that something always waits to be sent."""
        while not over.is_set():
            self.client.background.wait(LOOK_S)
            self.client.boundary(TOKENS, 1.0)

    def _look(self) -> None:
        self.client.background.wait(LOOK_S)
        self.client.boundary(0, None)

    def _adopted(self) -> tuple[int, ...]:
        return self.client.background.view.session.adopted

    def _all_open(self) -> bool:
        background = self.client.background
        with background.changed:
            return all(
                each.round is not None
                and each.round.base_version == each.adopted == each.held
                and each.unanswered
                for each in background.session.fragments
            )


def run(broker: str, name: str, params: int, *, endless: bool) -> None:
    """The whole process. Raises NarrowsError when the broker is gone or refuses."""
    layout = transformer_layout(params)
    client = Client(
        ClientOptions(
            broker=broker,
            name=name,
            layout=layout,
            frozen_digest=0,
            host=Drift(layout),
            join_timeout_s=JOIN_TIMEOUT_S,
        )
    )
    client.start()
    exchanger = Exchanger(client)
    try:
        exchanger.await_rounds()
        _tell({"ready": True})
        if endless:
            over = threading.Event()
            threading.Thread(target=_await_end, args=(over,), daemon=True).start()
            exchanger.exchange_for_ever(over)
        else:
            for _ in sys.stdin:
                times = exchanger.exchange()
                exchanger.await_rounds()
                _tell(times)
    finally:
        client.abort()


def _await_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def _tell(times: dict[str, Any]) -> None:
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    try:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), endless="endless" in sys.argv[4:])
    except NarrowsError as error:
        sys.exit(str(error))
