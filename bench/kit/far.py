"""A line with a delay each way and a rate, between two ends that speak real TCP.

The kernel's netem is often missing, so a process carries the packets between two TUN devices. They
are larger than usual: so they are few enough for it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

from narrows.bench.kit.line import Line, enter, ip
from narrows.bench.kit.run import end_with_bench

MTU: Final = 32000
QUEUE_S: Final = 0.1
"""The line's queue at its rate: one round trip, as routers are often set up."""
PACKETS_PER_TURN: Final = 64
TUNSETIFF: Final = 0x400454CA
WITHOUT_HEADER: Final = 0x1001
"""IFF_TUN | IFF_NO_PI: bare IP packets."""


class FarLine(Line):
    """A Line whose devices are this process's; counters lack the headers of Ethernet."""

    def __init__(self, delay_s: float, rate: float) -> None:
        super().__init__()
        forks = get_context("forkserver")
        self._ready, told = forks.Pipe()
        given = (self.hub, self.site, delay_s, rate, told)
        self._carrier = forks.Process(target=_carry, args=given, daemon=True)

    def connect(self) -> None:
        self._carrier.start()
        self._ready.recv()
        for name in (self.hub, self.site):
            ip("-n", name, "link", "set", "eth0", "mtu", str(MTU))

    def remove(self) -> None:
        self._carrier.kill()
        self._carrier.join()
        super().remove()


def _carry(hub: str, site: str, delay_s: float, rate: float, told: Connection) -> None:
    """Reads packets at either end and writes each at the other when it would have arrived."""
    threading.Thread(target=end_with_bench, daemon=True).start()
    ends: list[int] = []
    for namespace in (hub, site):
        enter(namespace)
        ends.append(end := os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"eth0", WITHOUT_HEADER))
    told.send("ready")
    ways: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    """Packets from the hub and from the site, each with the time of its arrival."""
    free_at = [0.0, 0.0]
    while True:
        due = min((way[0][0] for way in ways if way), default=time.monotonic() + 1)
        readable, _, _ = select.select(ends, [], [], max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for end in readable:
            way = ends.index(end)
            with suppress(BlockingIOError):
                for _ in range(PACKETS_PER_TURN):
                    packet, start = os.read(end, 1 << 16), max(now, free_at[way])
                    if start < now + QUEUE_S:  # Else the queue is full, and it is dropped.
                        free_at[way] = start + 8 * len(packet) / rate
                        ways[way].append((free_at[way] + delay_s, packet))
        for index, way_ in enumerate(ways):
            while way_ and way_[0][0] <= now:
                with suppress(OSError):  # The device is not up yet.
                    os.write(ends[1 - index], way_.popleft()[1])
