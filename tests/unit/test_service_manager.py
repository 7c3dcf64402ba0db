"""The broker tells the service manager that started it how it is. A real notify socket hears that
it is ready after its replay, alive while its loop turns, and stopping before it writes for long."""

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_cases import broker

from narrows.bench.kit.processes import WAIT_S
from narrows.broker.config import load_broker
from narrows.broker.process.manager import ServiceManager
from narrows.broker.process.service import Service

PERIOD_S = 0.2


class Manager:
    """The other end of the socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)

    def hear(self, timeout_s: float = WAIT_S) -> str:
        """The next message; "" if none comes."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(4096).decode()
        except (TimeoutError, BlockingIOError):
            return ""

    def hear_until(self, start: str) -> list[str]:
        """All messages up to the first one that begins so."""
        heard = [self.hear()]
        while not heard[-1].startswith(start):
            assert heard[-1], f"no {start} after {heard}"
            heard.append(self.hear())
        return heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manager]:
    address = str(tmp_path / "notify")
    if request.param == "abstract":
        address = f"@narrows-{tmp_path}"
    made = Manager(address.replace("@", "\0", 1))
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(PERIOD_S * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    yield made
    made.close()


def test_a_life_of_the_broker_is_told(manager: Manager, tmp_path: Path) -> None:
    with broker(tmp_path) as made:
        heard = manager.hear_until("WATCHDOG=1")
        assert heard == [f"READY=1\nSTATUS=serves on {made.address}", "WATCHDOG=1"]
        assert manager.hear() == "WATCHDOG=1"
        made.service.stop("the test stops it")
        *alive, stopping = manager.hear_until("STOPPING=1")
        assert set(alive) <= {"WATCHDOG=1"}
        made.join()
    assert stopping.startswith("STOPPING=1\nSTATUS=") and manager.hear(0.0) == ""


def test_the_broker_is_ready_when_it_has_replayed_and_not_before(
    manager: Manager, tmp_path: Path
) -> None:
    flags = {"broker.state_dir": str(tmp_path / "state"), "broker.listen": "tcp://127.0.0.1:0"}
    service = Service(load_broker(None, flags), events=None)
    assert manager.hear(0.0) == ""
    service.stop("the test stops it")
    service.run()
    assert manager.hear(0.0).startswith("READY=1")


def test_a_loop_that_hangs_is_not_alive(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    with broker(tmp_path) as made:
        turn: Callable[[float], None] = made.service.host.turn

        def hang(now: float) -> None:
            hangs.set()
            goes_on.wait(WAIT_S)
            turn(now)

        monkeypatch.setattr(made.service.host, "turn", hang)
        assert hangs.wait(WAIT_S)
        while manager.hear(0.0):
            pass
        said = manager.hear(3 * PERIOD_S)
        goes_on.set()
        assert said == "" and manager.hear() == "WATCHDOG=1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "x"},
        {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "100"},
        {"NOTIFY_SOCKET": "x" * 300},
    ],
)
def test_without_a_manager_nothing_is_told_and_nothing_fails(environment: dict[str, str]) -> None:
    nobody = ServiceManager(environment)
    nobody.tell("READY=1")
    nobody.alive(0.0)


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    theirs = {"NOTIFY_SOCKET": "x", "WATCHDOG_USEC": "100", "WATCHDOG_PID": "1"}
    assert ServiceManager(theirs).due_at == math.inf
    assert ServiceManager(theirs | {"WATCHDOG_PID": str(os.getpid())}).due_at < math.inf
