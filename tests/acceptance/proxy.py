"""A TCP proxy before a broker's three ports: it counts, and is a bad line on command.

It listens on the broker's port numbers at 127.0.0.2, because a learner looks for the data ports at
the host of its control port, and carries to 127.0.0.1. It runs on a thread of the test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Self

Direction = Literal["up", "down"]

CONTROL, PUSHES, PUBLICATIONS = range(3)
"""The ports, counted from the broker's first."""

HOST: Final = "127.0.0.2"
TARGET: Final = "127.0.0.1"

BLOCK_BYTES: Final = 1 << 16

LINGER_0: Final = struct.pack("ii", 1, 0)
"""Socket option: closing sends a reset."""

START_S: Final = 10.0


@dataclass(frozen=True)
class Passage:
    """Bytes that have passed together."""

    at_s: float
    """Monotonic time."""
    port: int
    direction: Direction
    size: int


class Proxy:
    """Carries the three ports from `first` on while the block lasts."""

    def __init__(self, first: int) -> None:
        self.address = f"tcp://{HOST}:{first}"
        self.cuts = 0
        """Connections that `cut_after` has reset."""
        self.passed: list[Passage] = []
        """Blocks of bytes that have passed, in order."""
        self._carried: Counter[tuple[int, Direction]] = Counter()
        self._fuses: dict[tuple[int, Direction], int] = {}
        self._first = first
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[socket.socket] = set()
        self._listening: list[socket.socket] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        """Raises OSError if one of the ports is taken."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Resets all connections; new ones are accepted."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def cut_after(self, port: int, direction: Direction, size: int) -> None:
        """Resets the connection that carries the byte after the next `size` of this direction."""
        self._fuses[port, direction] = self._carried[port, direction] + size

    def hold(self) -> None:
        """Lets nothing pass, connections stay open; until `release`."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def release(self) -> None:
        """Lets everything pass again, waiting bytes first, as TCP would send them again."""
        self._loop.call_soon_threadsafe(self._flows.set)

    async def _listen(self) -> None:
        for port in range(3):
            listener = socket.create_server((HOST, self._first + port))  # Sets SO_REUSEADDR.
            listener.setblocking(False)
            self._listening.append(listener)
            self._loop.add_reader(listener, self._accept, listener, port)

    def _accept(self, listener: socket.socket, port: int) -> None:
        # No coroutine: a cancelled one can lose a connection that it has just accepted.
        with suppress(OSError):
            learner, _ = listener.accept()
            broker = socket.socket()
            pair = {learner, broker}
            for end in pair:
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= pair
            task = self._loop.create_task(self._serve(learner, broker, port))
            self._tasks.add(task)
            task.add_done_callback(lambda _: self._close(task, pair))

    def _close(self, task: asyncio.Task[None], pair: set[socket.socket]) -> None:
        self._tasks.discard(task)
        self._open -= pair
        if not task.cancelled() and task.exception():
            _will_reset(pair)
        for end in pair:
            end.close()

    async def _serve(self, learner: socket.socket, broker: socket.socket, port: int) -> None:
        await self._loop.sock_connect(broker, (TARGET, self._first + port))
        ways = [
            self._loop.create_task(self._carry(learner, broker, port, "up")),
            self._loop.create_task(self._carry(broker, learner, port, "down")),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(
        self, source: socket.socket, sink: socket.socket, port: int, direction: Direction
    ) -> None:
        """Passes on until the end of `source`. Raises OSError at a reset, or to reset both."""
        key = (port, direction)
        while True:
            data = await self._loop.sock_recv(source, BLOCK_BYTES)
            await self._flows.wait()
            if not data:
                return
            allowed = self._fuses.get(key, 1 << 62) - self._carried[key]
            whole, data = len(data), data[: max(0, allowed)]
            await self._loop.sock_sendall(sink, data)
            self._carried[key] += len(data)
            self.passed.append(Passage(time.monotonic(), port, direction, len(data)))
            if len(data) < whole:
                self._fuses.pop(key, None)
                self.cuts += 1
                raise ConnectionResetError

    def _reset_all(self) -> None:
        _will_reset(self._open)
        for task in self._tasks:
            task.cancel()

    async def _end(self) -> None:
        for listener in self._listening:
            self._loop.remove_reader(listener)
            listener.close()
        self._reset_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _will_reset(ends: set[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
