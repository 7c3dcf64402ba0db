"""A line between two network namespaces, whose traffic the kernel counts byte by byte.

Learners run at the `site`, the broker at the `hub`. Segmentation by the interface is switched off.
With it the counters would see one header for up to 64 KiB, where real lines carry one for each
1,448 bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, Self

from narrows.bench.kit.processes import end_with_parent
from narrows.proto.errors import ErrorCode, NarrowsError

HUB_ADDRESS: Final = "10.77.0.1"
SITE_ADDRESS: Final = "10.77.0.2"
CLONE_NEWNET: Final = 0x4000_0000

SAMPLE_S: Final = 0.1
WINDOW_S: Final = 1.0

BUCKET_S: Final = 0.05
"""Longest time that a packet waits for the token bucket."""
BURST_S: Final = 0.005
"""The line may send at once what it carries in this time."""

MTU: Final = 32000
QUEUE_S: Final = 0.1
"""The line's queue holds what the line carries in this time: one round trip, as routers are often
set up."""
PACKETS_PER_TURN: Final = 64
"""Packets that are read from one end before the other has its turn."""
TUNSETIFF: Final = 0x400454CA
"""The request that makes a TUN device; Python does not name it."""
WITHOUT_HEADER: Final = 0x1001
"""IFF_TUN | IFF_NO_PI: bare IP packets."""


class Sample(NamedTuple):
    """Bytes that have crossed the line, with the headers of Ethernet, IP and TCP.

    Up is from the site to the hub.
    """

    at_s: float
    up: int
    down: int


def available() -> bool:
    """Whether this user may make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Line:
    """The pair of namespaces and a thread that samples the counters, while the block lasts.

    With a rate, the kernel's token bucket holds each end to it. Entering the block raises
    NarrowsError if the kernel refuses a part.
    """

    def __init__(self, bits_per_s: float = 0.0) -> None:
        self._bits_per_s = bits_per_s
        self.hub = f"narrows-{os.getpid()}-hub"
        self.site = f"narrows-{os.getpid()}-site"
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
        """Makes a device eth0 in each namespace; what one sends arrives at the other."""
        ip("-n", self.hub, "link", "add", "eth0", "type", "veth",
            "peer", "name", "eth0", "netns", self.site)  # fmt: skip
        if self._bits_per_s == 0:
            return
        burst_bytes = max(16_000, int(BURST_S * self._bits_per_s / 8))
        for name in (self.hub, self.site):
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
                "rate", f"{self._bits_per_s:.0f}bit", "burst", str(burst_bytes),
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
    Packets are larger than usual, so that they are few enough for it. The counters lack the headers
    of Ethernet.
    """

    def __init__(self, delay_s: float, rate: float) -> None:
        super().__init__()
        forks = get_context("forkserver")
        self._ready, told = forks.Pipe()
        self._carrier = forks.Process(
            target=_carry, args=(self.hub, self.site, delay_s, rate, told), daemon=True
        )

    def connect(self) -> None:
        self._carrier.start()
        self._ready.recv()
        for name in (self.hub, self.site):
            ip("-n", name, "link", "set", "eth0", "mtu", str(MTU))

    def remove(self) -> None:
        self._carrier.kill()
        self._carrier.join()
        super().remove()


class Packet(NamedTuple):
    """A packet on its way."""

    due_s: float
    content: bytes


def _carry(hub: str, site: str, delay_s: float, rate: float, told: Connection) -> None:
    """Reads packets at either end, and writes each at the other when it is due to arrive."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    ends: list[int] = []
    for namespace in (hub, site):
        enter(namespace)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        ends.append(end)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"eth0", WITHOUT_HEADER))
    told.send("ready")
    queues: tuple[deque[Packet], ...] = (deque(), deque())
    """Packets from the hub and from the site that have not arrived."""
    free_at_s = [0.0, 0.0]
    """The time from which each direction can carry the next packet."""
    while True:
        due_s = min((queue[0].due_s for queue in queues if queue), default=time.monotonic() + 1)
        readable, _, _ = select.select(ends, [], [], max(0.0, due_s - time.monotonic()))
        now = time.monotonic()
        for end in readable:
            index = ends.index(end)
            with suppress(BlockingIOError):
                for _ in range(PACKETS_PER_TURN):
                    content = os.read(end, 1 << 16)
                    start_s = max(now, free_at_s[index])
                    if start_s < now + QUEUE_S:  # Else the queue is full, and it is dropped.
                        free_at_s[index] = start_s + 8 * len(content) / rate
                        queues[index].append(Packet(free_at_s[index] + delay_s, content))
        for queue, other_end in zip(queues, reversed(ends), strict=True):
            while queue and queue[0].due_s <= now:
                with suppress(OSError):  # The device is not up yet.
                    os.write(other_end, queue.popleft().content)


def peak_bits_per_s(samples: Sequence[Sample]) -> tuple[float, float]:
    """The rates of the fullest second, up and down; 0 if the samples span less than a second.

    For each sample the window is the shortest span before it of WINDOW_S or longer. Its rate is
    taken over its own length.
    """
    first = 0
    up = down = 0.0
    for last, end in enumerate(samples):
        while first < last and end.at_s - samples[first + 1].at_s >= WINDOW_S:
            first += 1
        begin = samples[first]
        span_s = end.at_s - begin.at_s
        if span_s >= WINDOW_S:
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
