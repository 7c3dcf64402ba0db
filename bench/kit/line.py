"""A line between two network namespaces, whose traffic the kernel counts byte by byte.

Learners run at the `site`, the broker at the `hub`. Segmentation by the interface is switched off:
else its counters see one header for up to 64 KiB, and real lines carry one for each 1,448 bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Final, NamedTuple, Self

from narrows.proto.errors import ErrorCode, NarrowsError

HUB_ADDRESS: Final = "10.77.0.1"
SITE_ADDRESS: Final = "10.77.0.2"
CLONE_NEWNET: Final = 0x4000_0000

SAMPLE_S: Final = 0.1
WINDOW_S: Final = 1.0

BUCKET_S: Final = 0.05
"""Longest time that a packet waits for the token bucket."""
BURST_S: Final = 0.005
"""Time at its rate that the line may send at once."""

MTU: Final = 32000
QUEUE_S: Final = 0.1
"""The line's queue at its rate: one round trip, as routers are often set up."""
PACKETS_PER_TURN: Final = 64
TUNSETIFF: Final = 0x400454CA
WITHOUT_HEADER: Final = 0x1001
"""IFF_TUN | IFF_NO_PI: bare IP packets."""


class Sample(NamedTuple):
    """Bytes that have crossed the line, headers of Ethernet, IP and TCP included."""

    at_s: float
    up: int
    down: int


def available() -> bool:
    """Whether this user may make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Line:
    """The pair of namespaces and a thread that samples the counters, while the block lasts.

    With a rate the kernel's token bucket holds each end to it. Raises NarrowsError if the kernel
    refuses a part of it.
    """

    def __init__(self, bits_per_s: float = 0.0) -> None:
        self._bits_per_s = bits_per_s
        self.hub, self.site = (f"narrows-{os.getpid()}-{end}" for end in ("hub", "site"))
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Self:
        try:
            for name in (self.hub, self.site):
                ip("netns", "add", name)
            self.connect()
            for name, address in ((self.hub, HUB_ADDRESS), (self.site, SITE_ADDRESS)):
                ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth0", "up")
            self.samples.append(self.read())
        except BaseException:
            self.remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.remove()

    def connect(self) -> None:
        """Makes a device eth0 in each namespace; bytes that one sends arrive at the other."""
        ip("-n", self.hub, "link", "add", "eth0", "type", "veth",
            "peer", "name", "eth0", "netns", self.site)  # fmt: skip
        rate = self._bits_per_s
        burst = max(16_000, int(BURST_S * self._bits_per_s / 8))
        for name in (self.hub, self.site) if rate else ():
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
                "rate", f"{rate:.0f}bit", "burst", str(burst),
                "latency", f"{1e3 * BUCKET_S:.0f}ms")  # fmt: skip

    def read(self) -> Sample:
        """The counters now."""
        before_s = time.monotonic()
        (link,) = json.loads(ip("-n", self.site, "-s", "-j", "link", "show", "eth0"))
        counts = link["stats64"]
        at_s = (before_s + time.monotonic()) / 2
        return Sample(at_s, counts["tx"]["bytes"], counts["rx"]["bytes"])

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.samples.append(self.read())

    def remove(self) -> None:
        for name in (self.hub, self.site):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class FarLine(Line):
    """A line with a delay each way and a rate, between two ends that speak real TCP.

    The kernel's netem is often missing, so a process carries the packets between two TUN devices.
    They are larger than usual: so they are few enough for it. Counters lack the headers of
    Ethernet.
    """

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
                    packet = os.read(end, 1 << 16)
                    start = max(now, free_at[way])
                    if start < now + QUEUE_S:  # Else the queue is full, and it is dropped.
                        free_at[way] = start + 8 * len(packet) / rate
                        ways[way].append((free_at[way] + delay_s, packet))
        for index, way_ in enumerate(ways):
            while way_ and way_[0][0] <= now:
                with suppress(OSError):  # The device is not up yet.
                    os.write(ends[1 - index], way_.popleft()[1])


def peak_bits_per_s(samples: Sequence[Sample]) -> tuple[float, float]:
    """The fullest second, up and down; 0 where the samples span less than one.

    A window is the shortest span of samples that is a second or longer, at its own length.
    """
    first = 0
    up = 0.0
    down = 0.0
    for last, end in enumerate(samples):
        while first < last and end.at_s - samples[first + 1].at_s >= WINDOW_S:
            first += 1
        begin = samples[first]
        if (span_s := end.at_s - begin.at_s) >= WINDOW_S:
            up = max(up, 8 * (end.up - begin.up) / span_s)
            down = max(down, 8 * (end.down - begin.down) / span_s)
    return up, down


def enter(namespace: str) -> None:
    """Moves this thread, and those that it will start, into a namespace. Raises OSError."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


def end_with_bench() -> None:
    """Whoever kills a bench leaves no process of it behind."""
    bench = parent_process()
    assert bench is not None
    wait([bench.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def ip(*arguments: str) -> str:
    """The output of an `ip` command. Raises NarrowsError."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NarrowsError(
            ErrorCode.MISUSE,
            "the line cannot be built",
            expected=" ".join(("ip", *arguments)),
            got=done.stderr.strip() or f"exit code {done.returncode}",
            remedy="run it as root; the kernel needs network namespaces and veth",
        )
    return done.stdout
