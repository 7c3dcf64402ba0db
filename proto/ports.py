"""The ports of the two hosts: what a host asks of sockets and of workers.

The process gives real ports (ZeroMQ, threads), the simulator virtual ones. The time is an argument
of every call into a host, so a host needs no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Done: TypeAlias = Callable[[Any, float], None]
"""Called on the loop with the result of the work, or the exception that ended it, and the time."""


class Wires(Protocol):
    """The way out. Both calls return at once."""

    def control(self, peer: str, frames: list[bytes]) -> bool:
        """Queues a control message to a connection; "" is the broker. False: it is gone."""

    def data(self, topic: str, header: bytes, payload: bytes) -> bool:
        """Sends one data message. False: no room or no budget now; nothing was sent, try again."""


class BrokerWires(Wires, Protocol):
    """The broker's way out: a publication reaches many connections, and one must not stop all."""

    def data(self, topic: str, header: bytes, payload: bytes, lossy: bool = False) -> bool:
        """As in Wires. `lossy`: connections without room miss the message, the others get it."""


class Pool(Protocol):
    """Workers off the loop."""

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Runs `work` on a worker, then `done(result or exception, now)` on the loop."""
