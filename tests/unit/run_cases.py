"""A real broker in a thread, and small training loops that join it over loopback."""

import itertools
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrows.bench.kit.processes import WAIT_S, EventReader
from narrows.broker.config import load_broker
from narrows.broker.process.service import Service
from narrows.learner import Learner
from narrows.learner.exchange import Exchange
from narrows.proto.keys import AllowList, SiteKey, create_broker_key, new_pair, write_site_key

STEP = threading.Event()
"""Never set."""


class Broker:
    """A broker that serves a state directory on loopback."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        flags = {
            "fragments.count": 2,
            "fragments.sync_period_steps": 4,
            "fragments.overlap_steps": 1,
            "broker.state_dir": str(folder / "state"),
            "broker.listen": "tcp://127.0.0.1:0",
        }
        reader = EventReader(folder / "broker.jsonl")
        self.events = reader.events
        self.service = Service(load_broker(None, flags | settings), events=reader.path)
        self.address = self.service.sockets.listens_on
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def stop(self) -> None:
        """Ends it in order."""
        self.service.stop("the test stops it")
        self.join()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the broker does not end"


@contextmanager
def broker(folder: Path, **settings: object) -> Iterator[Broker]:
    """A broker while the block lasts; settings with __ for the dot."""
    made = Broker(folder, {name.replace("__", "."): value for name, value in settings.items()})
    try:
        yield made
    finally:
        made.stop()


def admitted(folder: Path, *more: str) -> Path:
    """The key file of site-a, which trusts these keys and that of the broker with FOLDER/keys, and
    is admitted there."""
    keys = folder / "keys"
    pair = new_pair()
    file = folder / "site-a.key"
    write_site_key(file, SiteKey("site-a", pair, (*more, create_broker_key(keys).public)))
    AllowList.allow(keys, "site-a", pair.public)
    return file


@contextmanager
def stranger(says: bytes | None) -> Iterator[str]:
    """The address of a program that is no broker: it says this once it is asked, "SSH" unasked.
    None: it hangs up at once, as a broker with keys does on who has none."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                if says is None:
                    return
                if says.startswith(b"SSH"):
                    self.request.sendall(says)
                while asked := self.request.recv(4096):
                    if b"\r\n\r\n" in asked:
                        self.request.sendall(says)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def tiny(seed: int = 0) -> nn.Sequential:
    """About 3,000 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def train(
    learner: Learner,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    until: Callable[[], object] = lambda: False,
) -> None:
    """The loop of the documentation; at most WAIT_S."""
    give_up = time.monotonic() + WAIT_S
    for _ in learner.until_end(itertools.repeat(None)):
        if until():
            return
        assert time.monotonic() < give_up, f"in vain: {learner.stats()}"
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        learner.log(tokens=8, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        STEP.wait(0.002)  # A step of a real model takes time; without it nothing could overlap.


class Loop:
    """A model, an optimizer and a learner."""

    def __init__(self, address: str, name: str, model: nn.Module | None = None, **options: Any):
        self.model = model or tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        optimizer = options.pop("optimizer", self.optimizer)
        self.learner = Learner(self.model, optimizer, broker=address, name=name, **options)

    @property
    def exchange(self) -> Exchange:
        """Returns that of a single process."""
        assert isinstance(self.learner._exchange, Exchange)
        return self.learner._exchange

    @property
    def versions(self) -> list[int]:
        return self.learner.stats()["versions"]  # type: ignore[no-any-return]

    def train(self, until: Callable[[], object] = lambda: False) -> None:
        """A whole life."""
        with self.learner:
            self.train_on(until)

    def train_on(self, until: Callable[[], object]) -> None:
        """Steps in an open block."""
        train(self.learner, self.model, self.optimizer, until)

    def step(self) -> None:
        """One step in an open block."""
        self.train_on(iter([False, True]).__next__)
