"""Broker and learners with a bad line between: slices, resets at every stage, cuts, black holes.

Whatever the line does, every version that a learner installs is, bit for bit, one that the broker
made, and the learner contributes again once the line works.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_run import Run
from running import HANG_S, wait_until

from narrows.bench.kit.lab import Direction
from narrows.bench.kit.processes import Processes
from narrows.bench.kit.proxy import Proxy, ProxyWay

pytestmark = pytest.mark.slow

CONTROL, UPLINK, DOWNLINK = range(3)
"""Places in Run.ports."""


class BadLine:
    """A run whose learner b is behind a proxy; a, which founds the run, too if asked for."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        self.run, self._stack = run, stack
        run.broker("--set", "liveness.late=0.5s", "--set", "liveness.lost=2s")

    def proxy(self, host: str = "127.0.0.2") -> Proxy:
        return self._stack.enter_context(Proxy(host, "127.0.0.1", self.run.ports))

    def learner(self, name: str, host: str = "127.0.0.1") -> None:
        self.run.learner(name, "--preset", "nano", host=host)

    def pair(self) -> None:
        """Starts a, and b behind the proxy; returns when both contribute."""
        self.learner("a")
        self.learner("b", "127.0.0.2")
        wait_until(lambda: self.run.contributions("a") >= 2, "a to contribute")
        wait_until(lambda: self.run.contributions("b") >= 2, "b to contribute")

    def arm(self, way: ProxyWay, place: int, after_bytes: int) -> None:
        """Has the connection reset that carries so many more bytes to or from this port."""
        port = self.run.ports[place]
        way.fuses[port] = way.carried.get(port, 0) + after_bytes

    def contributes(self, name: str) -> None:
        """Waits for two further contributions, the second of which is based on an adoption."""
        before = self.run.of(name)
        assert before is not None

        def more() -> bool:
            now = self.run.of(name)
            if now is None:
                return False
            base = before.contributions if now.incarnation == before.incarnation else 0
            # A learner that was counted as lost starts from 0.
            base = base if now.contributions >= base else 0
            return now.contributions >= base + 2

        wait_until(more, f"{name} to contribute")

    def finish(self, *names: str) -> None:
        for name in (*names, "broker"):
            self.run.processes.kill(name, signal.SIGTERM)
            assert self.run.processes.wait(name, HANG_S) == 0, self.run.processes.tail(name, 20)
        self.run.check_digests(*names)


@pytest.fixture
def line(tmp_path: Path, data: Path) -> Generator[BadLine]:
    with Processes(tmp_path) as processes, ExitStack() as stack:
        yield BadLine(Run(tmp_path, data, processes), stack)


def test_slices_of_a_few_bytes_change_nothing(line: BadLine) -> None:
    proxy = line.proxy()
    proxy.up.slice_bytes = proxy.down.slice_bytes = 16
    line.learner("a", "127.0.0.2")
    wait_until(lambda: line.run.contributions("a") >= 2, "contributions through slices")
    line.learner("b", "127.0.0.2")
    wait_until(lambda: line.run.contributions("b") >= 2, "a joiner through slices")
    line.finish("a", "b")
    assert proxy.resets == 0


@pytest.mark.parametrize(
    ("place", "after_bytes"), [(CONTROL, 100), (UPLINK, 100_000)], ids=["hello", "founding"]
)
def test_a_reset_while_the_run_is_founded(line: BadLine, place: int, after_bytes: int) -> None:
    proxy = line.proxy()
    line.arm(proxy.up, place, after_bytes)
    line.learner("a", "127.0.0.2")
    wait_until(lambda: line.run.contributions("a") >= 2, "the run to begin")
    assert proxy.resets == 1
    line.finish("a")


def test_a_reset_in_the_middle_of_a_state(line: BadLine) -> None:
    line.learner("a")
    wait_until(lambda: line.run.merges() >= 2, "some merges")
    proxy = line.proxy()
    line.arm(proxy.down, DOWNLINK, 100_000)
    line.learner("b", "127.0.0.2")
    wait_until(lambda: line.run.contributions("b") >= 2, "b to contribute")
    assert proxy.resets == 1
    line.finish("a", "b")


@pytest.mark.parametrize(
    ("direction", "place"),
    [("up", UPLINK), ("down", DOWNLINK), ("up", CONTROL), ("down", CONTROL)],
    ids=["push", "publication", "reports", "beats"],
)
def test_a_reset_in_a_running_exchange(line: BadLine, direction: Direction, place: int) -> None:
    proxy = line.proxy()
    line.pair()
    for resets in range(1, 4):
        line.arm(proxy.up if direction == "up" else proxy.down, place, 5_000)
        await_resets(proxy, resets)
    line.contributes("b")
    line.finish("a", "b")


def await_resets(proxy: Proxy, count: int) -> None:
    wait_until(lambda: proxy.resets >= count, f"reset {count}")


@pytest.mark.parametrize("closes", [False, True], ids=["black-hole", "cut"])
def test_a_line_that_is_gone_for_a_while(line: BadLine, closes: bool) -> None:
    proxy = line.proxy()
    line.pair()
    proxy.hold("up", "down")
    if closes:
        proxy.reset()
    wait_until(lambda: (s := line.run.of("b")) is None or s.state == "lost", "b to be lost")
    merges = line.run.merges()
    wait_until(lambda: line.run.merges() >= merges + 4, "merges without b")
    proxy.release()
    line.contributes("b")
    line.finish("a", "b")


@pytest.mark.parametrize(
    ("direction", "noticed"),
    [("up", "b left: nothing heard"), ("down", "nothing heard from the broker")],
)
def test_a_line_that_is_cut_one_way(line: BadLine, direction: Direction, noticed: str) -> None:
    proxy = line.proxy()
    line.pair()
    proxy.hold(direction)
    log = "broker" if direction == "up" else "b"
    wait_until(lambda: noticed in line.run.log(log), f"{log} to notice")
    proxy.release()
    line.contributes("b")
    line.finish("a", "b")
