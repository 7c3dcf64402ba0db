"""A live broker in a thread and learners with toy models, for tests over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from narrows.broker.config import BrokerConfig, load_config
from narrows.broker.process.service import Service
from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions
from narrows.proto.codec import F32
from narrows.proto.fragments import Fragment
from narrows.proto.messages import LayoutEntry

HANG_S = 300.0
"""Nothing in these tests takes so long, unless it hangs. On two cores with ten other busy processes
the start of a learner alone was seen to take 90 seconds."""

LAYOUT = (
    LayoutEntry("weight", (24, 16), "float32", "rda"),
    LayoutEntry("bias", (24,), "float32", "mean"),
)
ELEMENTS = 24 * 16 + 24


Run = Callable[..., tuple[int, str, str]]
"""Runs a command line; gives its exit code, output and error output."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns once `condition` holds; fails after HANG_S."""
    deadline = time.monotonic() + HANG_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        pause.wait(0.01)


class ToyHost:
    """Parameters as one flat vector in layout order; the loss is |x - target|^2 / 2."""

    def __init__(self, target: F32, start: F32 | None = None) -> None:
        self.target = target
        self.x = np.zeros_like(target) if start is None else start.copy()

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        for piece in fragment.pieces:
            first = _first(piece.tensor) + piece.start
            out[piece.offset : piece.offset + piece.count] = self.x[first : first + piece.count]

    def adopt(self, fragment: Fragment, values: F32) -> None:
        for piece in fragment.pieces:
            first = _first(piece.tensor) + piece.start
            self.x[first : first + piece.count] = values[piece.offset : piece.offset + piece.count]

    def step(self, rate: float) -> None:
        self.x -= np.float32(rate) * (self.x - self.target)


def _first(tensor: int) -> int:
    return 0 if tensor == 0 else 24 * 16


def vector(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)


def broker_config(folder: Path, **flags: object) -> BrokerConfig:
    """Port 0, quick beats; `flags` with __ for dots."""
    named = {key.replace("__", "."): value for key, value in flags.items()}
    defaults: dict[str, object] = {
        "broker.listen": "tcp://127.0.0.1:0",
        "broker.state_dir": str(folder / "state"),
        "broker.beat": "100ms",
        "fragments.count": 2,
    }
    if named.get("run.mode") == "diloco":
        defaults["fragments.count"] = 1
    return load_config(None, {**defaults, **named})


@contextmanager
def live_broker(config: BrokerConfig, *, events: Path | None = None) -> Generator[Service]:
    """A serving broker; its thread's error, if any, is raised at the end."""
    service = Service(config, events=events)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            service.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield service
    finally:
        if thread.is_alive():
            service.stop("the test is over")
        thread.join(HANG_S)
        assert not thread.is_alive(), "the broker does not stop"
        if errors:
            raise errors[0]


def client(service: Service, name: str, host: ToyHost, **options: object) -> Client:
    return Client(
        ClientOptions(
            broker=service.wires.address,
            name=name,
            layout=LAYOUT,
            frozen_digest=0,
            host=host,
            join_timeout_s=HANG_S,
            **options,  # type: ignore[arg-type]
        )
    )


def train(
    service: Service,
    hosts: Mapping[str, ToyHost],
    *,
    rate: float,
    steps_max: int = 100_000,
    step_s: float = 0.0,
) -> None:
    """Trains all hosts at once, a thread each, until the run's goal or `steps_max`.

    step_s: how long an inner step takes; a toy's own steps are faster than any network.
    """
    errors: list[BaseException] = []
    pace = threading.Event()

    def loop(name: str, host: ToyHost) -> None:
        try:
            learner = client(service, name, host)
            learner.start()
            for _ in range(steps_max):
                if learner.should_stop:
                    break
                host.step(rate)
                pace.wait(step_s)
                learner.boundary(1, float(np.abs(host.x - host.target).mean()))
            learner.finish(HANG_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=item) for item in hosts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a learner hangs"
    if errors:
        raise errors[0]
