"""A bad line costs no bit; a line carries its budget and no more, counted outside the product.

Both pass through a TCP proxy before a broker's three ports, which counts, and is a bad line on
command. It listens on the broker's port numbers at 127.0.0.2, because a learner looks for the data
ports at the host of its control port, and carries to 127.0.0.1, on threads of the test.
"""

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple, Self, get_args

from acceptance.kit import LOSSLESS, OTHER_LOOPBACK, Site
from acceptance.test_keys import Keys

from narrows.bench.kit.processes import LOOPBACK, wait_until

Direction = Literal["up", "down"]

CONTROL, PUSHES, PUBLICATIONS = range(3)
"""The ports, counted from the broker's first."""

LINGER_0: Final = struct.pack("ii", 1, 0)
"""Socket option: closing sends a reset."""

CUTS: Final[list[tuple[int, Direction, int]]] = [
    (PUSHES, "up", 5_000),
    (PUBLICATIONS, "down", 5_000),
    (CONTROL, "up", 500),
    (CONTROL, "down", 500),
]
"""Port, direction, and bytes until the reset: half a fragment, or some reports or beats."""

ALTERED: Final[list[tuple[int, Direction, tuple[int, Direction, int] | None]]] = [
    (PUBLICATIONS, "down", None),
    (PUBLICATIONS, "up", (PUBLICATIONS, "down", 500)),
    (PUSHES, "up", None),
    (PUSHES, "down", (PUSHES, "up", 500)),
    (CONTROL, "up", None),
    (CONTROL, "down", None),
    (PUBLICATIONS, "down", None),
]
"""Port and direction in which a byte is altered, and the reset that makes bytes go there: on a
standing connection none go up from a learner that listens, nor down to one that pushes."""

RATE_BYTES_S: Final = 4e6 / 8
LATE_S: Final = 0.5
"""Seconds of its rate that may pass at once: a sender that was late makes up for 0.1 s, and the
proxy may stand still on a busy machine and then find what has gathered meanwhile."""

MEAN_MAX: Final = 1.03
"""Largest mean of some six seconds, as a share of the rate: a proxy that stood still at their
begin counts a little too much. Data may use 0.985 of a budget, so 10 % too much would be 1.08."""

SEGMENT_BYTES: Final = 1448
HEADER_BYTES: Final = 66
"""Ethernet, IPv4 and TCP with time stamps, for each full segment and for each acknowledgement."""

ROUNDS: Final = 55
"""Each carries 58 kB in both directions, for 0.12 s: six and a half seconds."""


class Passage(NamedTuple):
    """Bytes that have passed together, and the monotonic time."""

    at_s: float
    direction: Direction
    size: int


class Proxy:
    """Carries the three ports from `first` on while the block lasts: a thread for each port, and
    one for each direction of a connection."""

    def __init__(self, first: int) -> None:
        """Raises OSError if one of the ports is taken."""
        self.address = f"tcp://{OTHER_LOOPBACK}:{first}"
        self.cuts = 0
        """Connections that `cut_after` has reset."""
        self.alters: set[tuple[int, Direction]] = set()
        """Ports and directions in which one byte of what comes next is altered."""
        self.held: set[tuple[int, Direction]] = set()
        """Ports and directions in which nothing passes, connections stay open."""
        self.passed: list[Passage] = []
        """Blocks of bytes that have passed, in order."""
        self._carried: Counter[tuple[int, Direction]] = Counter()
        self._fuses: dict[tuple[int, Direction], int] = {}
        self._flows = threading.Event()
        self._over = threading.Event()
        self._ends: list[socket.socket] = []
        for port in range(3):
            server = socket.create_server((OTHER_LOOPBACK, first + port))
            self._ends.append(server)
            self._start(self._accept, port, first + port, server)

    def __enter__(self) -> Self:
        self.release()
        return self

    def __exit__(self, *_: object) -> None:
        self._reset(*self._ends)
        self.held.clear()
        self.release()

    def cut_after(self, port: int, direction: Direction, size: int) -> None:
        """Resets the connection that carries the byte after the next `size` of this direction."""
        self._fuses[port, direction] = self._carried[port, direction] + size

    def hold(self) -> None:
        """Lets nothing pass, connections stay open; until `release`."""
        self._flows.clear()

    def release(self) -> None:
        """Lets everything pass again, waiting bytes first, as TCP would send them again."""
        self._flows.set()

    @staticmethod
    def _start(target: Callable[..., None], *given: object) -> None:
        threading.Thread(target=target, args=given, daemon=True).start()

    def _accept(self, port: int, number: int, server: socket.socket) -> None:
        with suppress(OSError):  # The block is left, or the broker is not there.
            while True:
                learner, _ = server.accept()
                broker = socket.create_connection((LOOPBACK, number))
                self._ends += [learner, broker]
                self._start(self._carry, port, "up", learner, broker)
                self._start(self._carry, port, "down", broker, learner)

    def _carry(
        self, port: int, direction: Direction, source: socket.socket, sink: socket.socket
    ) -> None:
        """Passes on until one of them ends; then both are reset."""
        key = (port, direction)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                while key in self.held:
                    self._over.wait(0.02)
                allowed = self._fuses.get(key, 1 << 62) - self._carried[key]
                passes = data[: max(0, allowed)]
                if passes and key in self.alters:
                    self.alters.remove(key)
                    passes = passes[:-1] + bytes([passes[-1] ^ 1])
                sink.sendall(passes)
                self._carried[key] += len(passes)
                self.passed.append(Passage(time.monotonic(), direction, len(passes)))
                if len(passes) < len(data):
                    self._fuses.pop(key, None)
                    self.cuts += 1
                    break
        self._reset(source, sink)

    @staticmethod
    def _reset(*ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
                end.shutdown(socket.SHUT_RD)  # Else a thread that reads would keep it open.
            end.close()


def test_resets_and_a_black_hole_cost_no_bit(site: Site) -> None:
    broker = site.broker(*LOSSLESS)
    with Proxy(site.port) as proxy:
        a = site.learner("a", seed=1, width=96)
        b = site.learner("b", seed=2, width=96, broker=proxy.address)

        def b_takes_part() -> None:
            site.contribute("b", count=2)  # The second builds on what it has adopted meanwhile.
            site.adopt("b")

        b_takes_part()
        for number, cut in enumerate(CUTS, 1):
            proxy.cut_after(*cut)
            wait_until(lambda: proxy.cuts >= number, f"the reset {cut}", broker, a, b)  # noqa: B023
            b_takes_part()
        assert proxy.cuts == len(CUTS)

        proxy.hold()
        before = len(site.merges())
        wait_until(
            lambda: any(len(event["live"]) == 1 for event in site.merges()[before:]),
            "the run to go on without b", broker, a, b,
        )  # fmt: skip
        site.contribute("a", count=2)
        proxy.release()
        b_takes_part()
        for learner in (a, b):
            learner.kill()
        broker.stop()
    site.check_run("a", "b")


def test_an_altered_byte_shuts_nobody_out(site: Site) -> None:
    """With keys, libzmq ends a session for it, and dials again only from the other end."""
    keys = Keys(site)
    for name in ("a", "b"):
        keys.make(f"{name}.key", name, is_admitted=True)
    broker = site.broker(keys="keys")
    with Proxy(site.port) as proxy:
        a = site.learner("a", seed=1, key=str(site.folder / "a.key"))
        b = site.learner("b", seed=2, key=str(site.folder / "b.key"), broker=proxy.address)
        site.contribute("b", count=2)
        for port, direction, cut in ALTERED:
            proxy.alters.add((port, direction))
            if cut is not None:
                proxy.cut_after(*cut)
            wait_until(lambda: not proxy.alters, f"{direction} at {port}", broker, a, b)
            site.contribute("b", count=2)
            site.adopt("b")
        for learner in (a, b):
            learner.kill()
        broker.stop()
    assert "were altered on their way" in b.log and "has no keys" not in b.log
    site.check_copies("a", "b")


def wire_bytes(passage: Passage, direction: Direction) -> float:
    """Bytes of this direction on an Ethernet: data with headers, or TCP's acknowledgement of data
    that passed the other way, one for two segments."""
    segments = passage.size / SEGMENT_BYTES
    if passage.direction == direction:
        return passage.size + HEADER_BYTES * segments
    return HEADER_BYTES * segments / 2


def check_rate(passed: Sequence[Passage], direction: Direction) -> None:
    """No stretch of time, of whatever length T, has more than RATE_BYTES_S * (T + LATE_S)."""
    surplus = highest = 0.0
    last_s = passed[0].at_s
    for one in passed:
        surplus = max(0.0, surplus - (one.at_s - last_s) * RATE_BYTES_S)
        surplus += wire_bytes(one, direction)
        last_s = one.at_s
        highest = max(highest, surplus)
    assert highest <= LATE_S * RATE_BYTES_S, f"{direction}: {highest:,.0f} bytes too many"


def test_a_line_carries_its_budget_and_no_more(site: Site) -> None:
    broker = site.broker("wan.up=4Mbit/s", "wan.down=4Mbit/s", *LOSSLESS)
    with Proxy(site.port) as proxy:
        learner = site.learner("a", width=240, broker=proxy.address)
        site.merge(1)
        busy = len(proxy.passed)
        site.merge(ROUNDS)
        learner.kill()
        broker.stop()
    steady = proxy.passed[busy:]
    for direction in get_args(Direction):
        check_rate(proxy.passed, direction)
        size = sum(wire_bytes(one, direction) for one in steady)
        mean = size / (steady[-1].at_s - steady[0].at_s)
        assert 0.7 <= mean / RATE_BYTES_S <= MEAN_MAX, f"{direction}: {mean:,.0f} bytes/s"
