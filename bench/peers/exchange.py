"""One member of a measured average: the common part of the scripts of all other systems.

Runs in the environment of another system, so it may import only torch and the standard library.
Members meet at a TCPStore that the coordinator holds. The store has the address of the system's own
coordinator, and every exchange starts at the same time for all members.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    Store,
    TCPStore,
)

PLACE: Final = "place"
"""Key under which the coordinator writes the address of its system."""

MEETING_TIMEOUT: Final = timedelta(minutes=10)
"""Longest meeting. Over a slow line an exchange takes minutes; the bench has limits of its own."""

SIOCGIFADDR: Final = 0x8915
"""Linux: IPv4 address of an interface."""


@dataclass(frozen=True)
class Task:
    """Task of one process of a measurement."""

    rank: int
    world: int
    """Number of members, without the coordinator."""
    host: str
    """IPv4 address by which others reach this process."""
    meeting: tuple[str, int]
    """Address and port of the store."""
    params: int
    """float32 elements that are averaged."""
    exchanges: int
    warmup: int
    """Exchanges before the measured ones."""
    variant: str
    coordinator: bool

    def store(self) -> TCPStore:
        """The meeting place: the coordinator holds it, all others dial it."""
        host, port = self.meeting
        return TCPStore(
            host,
            port,
            is_master=self.coordinator,
            wait_for_workers=False,
            timeout=MEETING_TIMEOUT,
        )


def task_of(variants: Sequence[str], arguments: Sequence[str] | None = None) -> Task:
    """Reads the command line of a script that has these variants; ends the process if it is
    wrong."""
    parser = argparse.ArgumentParser(description="one member of a measured average")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of the coordinator")
    parser.add_argument("--host", default="", help="own IPv4 address; default: by the route")
    parser.add_argument("--params", type=int, default=0)
    parser.add_argument("--exchanges", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--coordinator", action="store_true")
    options = parser.parse_args(arguments)
    host, _, port = options.address.rpartition(":")
    if not (host and port.isdecimal()):
        parser.error(f"--address: expected HOST:PORT, got {options.address!r}")
    if not options.coordinator and (options.params < 1 or not 0 <= options.rank < options.world):
        parser.error("expected --params >= 1 and 0 <= --rank < --world")
    return Task(
        rank=options.rank,
        world=options.world,
        host=options.host or (host if options.coordinator else own_address(host)),
        meeting=(host, int(port)),
        params=options.params,
        exchanges=options.exchanges,
        warmup=options.warmup,
        variant=options.variant,
        coordinator=options.coordinator,
    )


def own_address(other: str) -> str:
    """Our IPv4 address on the way to `other`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        address: str = probe.getsockname()[0]
        return address


def use_interface_of(host: str) -> None:
    """Makes Gloo listen at `host`; it would take the address that the host name resolves to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:
                continue  # An interface without an IPv4 address.
            if socket.inet_ntoa(answer[20:24]) == host:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return
    raise ValueError(f"no interface has the address {host}")


def hold(store: Store, place: str = "") -> None:
    """Acts as coordinator, whose system listens at `place`, until SIGTERM."""
    store.set(PLACE, place)
    # Children of the system would inherit ignored signals; a blocked signal can be waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})


def measure(
    task: Task,
    store: Store,
    average: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    prepare: Callable[[Tensor], None] | None = None,
) -> None:
    """Averages a known tensor again and again; a JSON line for each exchange after the warm-up.

    `average` gets this member's values, float32 (params,), and returns the mean over all members;
    only this call is timed. `prepare` gets the values before the members start. Raises
    ArithmeticError if the distance of the result from the mean is more than `tolerance`, relative
    in the 2-norm.
    """
    base = torch.randn(task.params, generator=torch.Generator().manual_seed(0))
    values = torch.empty_like(base)
    for number in range(-task.warmup, task.exchanges):
        # Another mean in every exchange, so that a stale result is found.
        shift = 1 + task.warmup + number
        torch.mul(base, shift + task.rank, out=values)
        if prepare is not None:
            prepare(values)
        meet(store, task.world, f"start{number}")
        cpu_before_s, started_s = tree_cpu_s(os.getpid()), time.perf_counter()
        result = average(values)
        seconds = time.perf_counter() - started_s
        cpu_s = tree_cpu_s(os.getpid()) - cpu_before_s
        check(result, base, shift + (task.world - 1) / 2, tolerance)
        if number >= 0:
            row = {"rank": task.rank, "exchange": number, "seconds": seconds, "cpu_s": cpu_s}
            print(json.dumps(row), flush=True)
    # A member that leaves early would take away parts that others may still need.
    meet(store, task.world, "end")


def meet(store: Store, world: int, name: str) -> None:
    """Returns when all members have come to `name`."""
    if store.add(f"{name} come", 1) == world:
        store.set(f"{name} go", "")
    store.wait([f"{name} go"], MEETING_TIMEOUT)


def check(result: Tensor, base: Tensor, factor: float, tolerance: float) -> None:
    """Raises ArithmeticError unless result is factor * base, float32 (params,)."""
    wanted = base * factor
    error = math.sqrt((result - wanted).square().sum().item() / wanted.square().sum().item())
    if not error <= tolerance:
        raise ArithmeticError(f"the average is off by {error:.2g}, at most {tolerance:.2g} is fine")


def tree_cpu_s(root: int) -> float:
    """CPU seconds so far of a process and all its living descendants (Linux)."""
    ticks: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue  # It has ended.
        # The name in parentheses may hold any character; then: state, parent, ..., utime, stime.
        fields = text.rpartition(")")[2].split()
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = float(fields[11]) + float(fields[12])
    family = [root]
    for pid in family:
        family.extend(children.get(pid, []))
    return sum(ticks.get(pid, 0.0) for pid in family) / os.sysconf("SC_CLK_TCK")
