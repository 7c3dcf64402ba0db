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
from functools import partial
from itertools import chain
from typing import Final, Literal, NamedTuple, Self

Direction = Literal["up", "down"]

CONTROL, PUSHES, PUBLICATIONS = range(3)
"""The ports, counted from the broker's first."""

HOST: Final = "127.0.0.2"
TARGET: Final = "127.0.0.1"
BLOCK_BYTES: Final = 1 << 16
START_S: Final = 10.0

LINGER_0: Final = struct.pack("ii", 1, 0)
"""Socket option: closing sends a reset."""


class Passage(NamedTuple):
    """Bytes that have passed together, and the monotonic time."""

    at_s: float
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
        self._first = first
        self._carried: Counter[tuple[int, Direction]] = Counter()
        self._fuses: dict[tuple[int, Direction], int] = {}
        self._serving: dict[asyncio.Task[None], set[asyncio.StreamWriter]] = {}
        """Both ends of each connection, by the task that carries it."""
        self._flows = asyncio.Event()
        self._flows.set()
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
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
        self._loop.call_soon_threadsafe(lambda: self._reset(*self._serving.values()))

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
            serve = partial(self._serve, port)
            self._servers.append(await asyncio.start_server(serve, HOST, self._first + port))

    async def _serve(
        self, port: int, reader: asyncio.StreamReader, learner: asyncio.StreamWriter
    ) -> None:
        task, ends = asyncio.current_task(), {learner}
        assert task is not None
        self._serving[task] = ends
        try:
            answers, broker = await asyncio.open_connection(TARGET, self._first + port)
            ends.add(broker)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(port, "up", reader, broker))
                ways.create_task(self._carry(port, "down", answers, learner))
        except* OSError:
            self._reset(ends)
        finally:
            del self._serving[task]

    async def _carry(
        self,
        port: int,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        """Passes on until the end of `source`. Raises OSError at a reset, or to reset both."""
        key = (port, direction)
        while data := await source.read(BLOCK_BYTES):
            await self._flows.wait()
            allowed = self._fuses.get(key, 1 << 62) - self._carried[key]
            whole, data = len(data), data[: max(0, allowed)]
            sink.write(data)
            await sink.drain()
            self._carried[key] += len(data)
            self.passed.append(Passage(time.monotonic(), direction, len(data)))
            if len(data) < whole:
                self._fuses.pop(key, None)
                self.cuts += 1
                raise ConnectionResetError
        sink.close()

    @staticmethod
    def _reset(*connections: set[asyncio.StreamWriter]) -> None:
        for end in chain(*connections):
            with suppress(OSError):
                made = end.get_extra_info("socket")
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
            end.transport.abort()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        self._flows.set()
        self._reset(*self._serving.values())
        await asyncio.gather(*self._serving)
