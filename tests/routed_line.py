"""Two sites with a router between them that can lose connections: network namespaces, needs root.

What the router is told to lose vanishes without an answer, as behind a stateful firewall that has
forgotten its connections, or one that lets a port's packets go nowhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack, suppress

import pytest

from narrows.bench.kit.lab import PREFIX, remove_leftovers

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None,
    reason="network namespaces need root and iproute2",
)


class RoutedLine:
    """The site `near` of a learner, the site `far` of the broker, as long as the block lasts."""

    far_address = "10.78.2.2"

    def __init__(self) -> None:
        run = f"{PREFIX}-{os.getpid()}"
        self.near, self.router, self.far = (f"{run}-{site}" for site in ("near", "router", "far"))
        self._undo = ExitStack()
        self._rules = 0

    def __enter__(self) -> RoutedLine:
        remove_leftovers()
        try:
            for name in (self.near, self.router, self.far):
                _ip("netns", "add", name)
                self._undo.callback(_ip, "netns", "delete", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for index, name in enumerate((self.near, self.far), 1):
                self._join(name, f"to{index}", f"10.78.{index}")
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _call("ip", "netns", "exec", self.router, "sh", "-c", forward)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def under(self, site: str) -> tuple[str, ...]:
        """The command under which a process runs at a site."""
        return ("ip", "netns", "exec", site)

    def lose_connections(self, ports: Iterable[int]) -> int:
        """From now on nothing passes on the present connections to these ports of the broker; a
        new one does. Returns how many they are."""
        listed = _call(*self.under(self.near), "ss", "-Htn", "state", "established")
        ours = [line.split()[2:4] for line in listed.splitlines()]
        ends = [near.rpartition(":")[2] for near, far in ours if int(far.rpartition(":")[2]) in
                set(ports)]  # fmt: skip
        for end in ends:
            self._lose("sport", end)
            self._lose("dport", end)
        return len(ends)

    def lose_port(self, port: int) -> None:
        """From now on nothing passes to this port of the broker, or from it."""
        self._lose("dport", str(port))
        self._lose("sport", str(port))

    def heal(self) -> None:
        """Everything passes again."""
        while self._rules:
            _ip("-n", self.router, "rule", "delete", "priority", "20")
            self._rules -= 1

    def _lose(self, what: str, port: str) -> None:
        rule = ("rule", "add", "priority", "20", "ipproto", "tcp", what, port, "blackhole")
        _ip("-n", self.router, *rule)
        self._rules += 1

    def _join(self, name: str, device: str, network: str) -> None:
        _ip("-n", self.router, "link", "add", device, "type", "veth", "peer", "name", "eth0",
            "netns", name)  # fmt: skip
        _ip("-n", self.router, "address", "add", f"{network}.1/24", "dev", device)
        _ip("-n", name, "address", "add", f"{network}.2/24", "dev", "eth0")
        _ip("-n", self.router, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "via", f"{network}.1")


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    with suppress(subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pytest.skip(f"no network namespaces here: {' '.join(command)} fails")
