"""A relay in front of the broker for each learner, so that its line alone can be cut."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

BLOCK_BYTES = 1 << 16
START_TIMEOUT_S = 10.0
LINGER_0 = struct.pack("ii", 1, 0)
"""Close with a reset."""


class _Line:
    """What one learner's relay does with its connections."""

    def __init__(self, broker_host: str) -> None:
        self._broker_host = broker_host
        self._carries = asyncio.Event()
        self._carries.set()
        self._refuses = False
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one connection to the same port of the broker until either end closes it."""
        ends = {writer}
        self._open.add(writer)
        try:
            await self._carries.wait()
            if not self._refuses:
                answers, broker = await asyncio.open_connection(self._broker_host, port)
                ends.add(broker)
                self._open.add(broker)
                ways = (self._carry(reader, broker), self._carry(answers, writer))
                tasks = [asyncio.ensure_future(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            pass  # A broker that is not there, an end that was reset.
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(BLOCK_BYTES):
            await self._carries.wait()
            sink.write(data)
            await sink.drain()

    def cut(self) -> None:
        """Nothing passes any more; connections stay open, and new ones are taken by nobody."""
        self._carries.clear()

    def reset(self) -> None:
        """Ends all connections, and each new one at once."""
        self._refuses = True
        for writer in self._open:
            end = writer.get_extra_info("socket")
            # Without it a connection on which nothing waits would be closed in order.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
            writer.transport.abort()

    def restore(self) -> None:
        self._refuses = False
        self._carries.set()


class Relays:
    """Listens on the broker's ports at a loopback address per learner; use as a context manager.

    127.0.0.0/8 belongs to the machine on Linux; elsewhere each address must be configured.
    """

    def __init__(self, broker_host: str, ports: Sequence[int], hosts: Sequence[str]) -> None:
        self._broker_host, self._ports, self._hosts = broker_host, ports, hosts
        self._lines: dict[str, _Line] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-relays", daemon=True)

    def __enter__(self) -> Self:
        """Raises OSError if an address cannot be listened on."""
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        try:
            listening.result(START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def cut(self, host: str) -> None:
        self._tell(self._lines[host].cut)

    def reset(self, host: str) -> None:
        self._tell(self._lines[host].reset)

    def restore(self, host: str) -> None:
        self._tell(self._lines[host].restore)

    def _tell(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # Transports that were told to abort close their sockets here.

    async def _listen(self) -> None:
        for host in self._hosts:
            line = self._lines[host] = _Line(self._broker_host)
            for port in self._ports:
                server = await asyncio.start_server(_served(line, port), host, port)
                self._servers.append(server)

    def _end(self) -> None:
        self._tell(self._loop.stop)
        self._thread.join()


def _served(
    line: _Line, port: int
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await line.serve(port, reader, writer)

    return serve
