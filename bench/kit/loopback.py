"""A loopback interface that belongs to one run, and the bytes that the kernel counted on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from narrows.proto.errors import ErrorCode, NarrowsError


@dataclass(frozen=True)
class Loopback:
    """127.0.0.1 in a network namespace, or the machine's own."""

    namespace: str = ""
    """"": the machine's own namespace, where the traffic of all other programs is counted too."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that runs there."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()

    def carried_bytes(self) -> int:
        """Bytes so far with all headers. Each byte is counted once: one end sends what the other
        gets."""
        where = ("-n", self.namespace) if self.namespace else ()
        (link,) = json.loads(_ip("-j", "-s", *where, "link", "show", "dev", "lo"))
        carried: int = link["stats64"]["tx"]["bytes"]
        return carried


@contextmanager
def own_loopback() -> Generator[Loopback]:
    """A new namespace with root and iproute2, otherwise the machine's loopback."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield Loopback()
        return
    name = f"narrows-peers-{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "dev", "lo", "up")
        yield Loopback(name)
    finally:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NarrowsError(
            ErrorCode.CONFIG, "no byte counters", got=str(error), remedy="install iproute2"
        ) from None
    if result.returncode:
        raise NarrowsError(
            ErrorCode.CONFIG,
            f"`{' '.join(command)}` failed",
            got=result.stderr.strip(),
            remedy="network namespaces need root and a kernel that has them",
        )
    return result.stdout
