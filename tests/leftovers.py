"""Finds what a test has left behind: processes, listening ports, network namespaces."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

WORKER: Final = "NARROWS_TEST_WORKER"
SESSION: Final = "NARROWS_TEST_SESSION"
"""Environment variables by which a process is known that a worker of the suite, or the session as a
whole, has started, itself or through others. A daemon that has cut its ties to us still has
them."""

SERVERS: Final = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Helpers of Python's multiprocessing, which stay for the whole session."""

ENDING_S: Final = 5.0
"""A process that has got its signal may need this long to go."""

NAMESPACES: Final = Path("/run/netns")

LISTENING: Final = "0A"
"""State of a socket in /proc/net/tcp."""


def mark(variable: str) -> None:
    """Marks this process's environment, before it starts others."""
    os.environ[variable] = str(os.getpid())


def children() -> set[int]:
    """Living direct children, without the servers. Cheap enough to ask around every test."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # A thread that has just ended.
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return {pid for pid in found if _lives(pid) and not _is_server(pid)}


def marked(variable: str, *, with_servers: bool = False) -> set[int]:
    """Living processes that this process has started since `mark`, directly or not."""
    wanted = f"{variable}={os.getpid()}".encode()
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            if wanted in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    found.discard(os.getpid())
    servers = {pid for pid in found if _is_server(pid) and _is_child(pid)}
    return {pid for pid in found if _lives(pid) and (with_servers or pid not in servers)}


def listening() -> set[str]:
    """Local addresses at which this process itself listens over TCP."""
    own: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and f"socket:[{words[9]}]" in own:
                    address, port = words[1].split(":")
                    found.add(f"{address}:{int(port, 16)}")
    return found


def namespaces() -> set[str]:
    """Named network namespaces, without those of other processes that live. The number of the
    process that makes one is part of its name."""
    names = os.listdir(NAMESPACES) if NAMESPACES.is_dir() else []
    return {name for name in names if not _is_of_another(name)}


def _is_of_another(name: str) -> bool:
    numbers = [int(each) for each in re.findall(r"\d{2,}", name)]
    return any(number != os.getpid() and _lives(number) for number in numbers)


def staying(pids: set[int]) -> set[int]:
    """Waits for the end of these processes; gives those that do not end."""
    deadline = time.monotonic() + ENDING_S
    while (left := {pid for pid in pids if _lives(pid)}) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return left


def describe(pids: set[int]) -> str:
    """A line for each process: number, state, age, command."""
    lines: list[str] = []
    for pid in sorted(pids):
        with suppress(psutil.Error):
            one = psutil.Process(pid)
            age_s = time.time() - one.create_time()
            command = " ".join(one.cmdline())[:160]
            lines.append(f"  {pid} {one.status()}, {age_s:.0f} s old: {command}")
    return "\n".join(lines)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _is_server(pid: int) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        return any(server in command for server in SERVERS)
    return False


def _is_child(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).ppid() == os.getpid())
    return False
