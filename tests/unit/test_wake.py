"""Waking the thread that owns the sockets: it never blocks, however busy that thread is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from running import HANG_S, LAYOUT, ToyHost, broker_config, vector

from narrows.broker.process.service import Service
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.thread import Background
from narrows.proto.shell import WakePipe

WAKES = 70_000
"""More bytes than a pipe holds (65,536 on Linux)."""


def repeat(action: Callable[[], None]) -> None:
    """Runs `action` WAKES times; fails if it blocks."""

    def run() -> None:
        for _ in range(WAKES):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "waking blocks while nobody reads"


def test_a_learner_is_woken_while_its_background_thread_is_busy() -> None:
    ran: list[int] = []
    background = Background(
        ClientOptions(
            broker="tcp://127.0.0.1:9",
            name="a",
            layout=LAYOUT,
            frozen_digest=0,
            host=ToyHost(vector(1)),
        )
    )
    # Not started, it reads as little as one that is busy. The encoders post once per chunk.
    repeat(lambda: background.later(lambda: ran.append(1)))
    background.start()
    background.close()
    assert len(ran) == WAKES


def test_a_broker_is_woken_while_its_loop_is_busy(tmp_path: Path) -> None:
    service = Service(broker_config(tmp_path))
    repeat(lambda: service.stop("the test is over"))
    assert service.run() == "the test is over"


def test_a_wake_after_the_end_wakes_nobody_and_meets_no_other_file(tmp_path: Path) -> None:
    wake = WakePipe()
    wake.close()
    others = [(tmp_path / str(number)).open("wb") for number in range(4)]
    wake.wake()
    for other in others:
        other.close()
    assert all((tmp_path / str(number)).read_bytes() == b"" for number in range(4))
