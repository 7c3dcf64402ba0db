"""A TCP proxy in front of a broker's three ports that behaves like a bad line, on command.

It listens on the broker's port numbers at another address, because a learner looks for the data
ports at the host of its control port: 127.0.0.2 for a broker at 127.0.0.1. All of it is in user
space and needs no rights. As a process, for PORT and the two after it:

`python -m narrows.bench.kit.proxy HOST TARGET PORT ROUND_TRIP_S WINDOW_BYTES`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self

from narrows.bench.kit.lab import Direction

BLOCK_BYTES: Final = 1 << 16
WINDOW_BYTES_MAX: Final = 64 << 20
"""Bytes held at most per connection and direction without a window: 5 Gbit/s at 100 ms."""

LINGER_0: Final = struct.pack("ii", 1, 0)
"""Socket option: closing sends a reset."""

START_TIMEOUT_S: Final = 10.0


@dataclass
class ProxyWay:
    """One direction of a line. A change holds from the next block on."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Largest time that is added to the delay of a block. The order stays, as it does with TCP."""
    stall_share: float = 0.0
    """Share of the blocks before which everything waits `stall_s`, as after a lost packet."""
    stall_s: float = 0.2
    slice_bytes: int = 0
    """Largest segment: data pass on in segments of 1 to so many bytes; 0: as they come."""
    window_bytes: int = 0
    """Largest number of bytes under way per connection until their acknowledgement would be back;
    0: no limit. A connection then carries this much per round trip, as with a congestion window."""
    holds: bool = False
    """True: nothing passes, and connections stay open. Both directions together are a black
    hole."""
    trickles: set[int] = field(default_factory=set[int])
    """Ports whose connections pass one byte a second."""
    carried: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes passed on so far, by port."""
    fuses: dict[int, int] = field(default_factory=dict[int, int])
    """Byte, by port, at which a connection is reset; counted as in `carried`."""

    def cut_length(self, port: int, size: int) -> int | None:
        """Number of the next `size` bytes that pass before a fuse blows, which uses the fuse up;
        None: all."""
        fuse = self.fuses.get(port)
        carried = self.carried.get(port, 0)
        if fuse is None or carried + size <= fuse:
            return None
        del self.fuses[port]
        return max(0, fuse - carried)


class Proxy:
    """Carries `ports` from `host` to `target` while the block lasts, on its own thread."""

    def __init__(self, host: str, target: str, ports: Sequence[int], *, seed: int = 0) -> None:
        self.up, self.down = ProxyWay(), ProxyWay()
        self.host, self._target, self._ports = host, target, tuple(ports)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._open: set[_Connection] = set()
        self._listening: list[socket.socket] = []
        self._refuses = False
        self._carrying: set[asyncio.Task[None]] = set()
        #: Connections that a fuse has ended.
        self.resets = 0

    def __enter__(self) -> Self:
        """Raises OSError if one of the ports is taken at `host`."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def reset(self, port: int | None = None) -> None:
        """Resets every open connection, or those of one port; new ones are accepted."""

        def reset() -> None:
            for connection in [c for c in self._open if port in (None, c.port)]:
                connection.reset()

        self._loop.call_soon_threadsafe(reset)

    def refuse(self) -> None:
        """Resets every open connection, and each new one at once, until `release`."""
        self._refuses = True
        self.reset()

    def hold(self, *directions: Direction) -> None:
        """Lets nothing pass in these directions until `release`."""
        for direction in directions:
            (self.up if direction == "up" else self.down).holds = True

    def release(self) -> None:
        """Accepts connections and lets everything pass again. Waiting data go first, as TCP would
        send them again."""
        self._refuses = False
        self.up.holds = self.down.holds = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for listener in self._listening:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _listen(self) -> None:
        for port in self._ports:
            listener = socket.create_server((self.host, port))
            listener.setblocking(False)
            self._listening.append(listener)
            self._loop.add_reader(listener, self._accept, listener, port)

    def _accept(self, listener: socket.socket, port: int) -> None:
        # No coroutine: a cancelled one can lose a connection that it has just accepted.
        with suppress(OSError):
            learner, _ = listener.accept()
            if self._refuses:
                _reset(learner)
                return
            task = self._loop.create_task(self._serve(learner, port))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
            # A task that is cancelled before its first step closes nothing.
            task.add_done_callback(partial(_close, learner))

    async def _serve(self, learner: socket.socket, port: int) -> None:
        broker = socket.socket()
        connection = _Connection(port, learner, broker)
        try:
            for end in (learner, broker):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(broker, (self._target, port))
            if self._refuses:
                raise ConnectionResetError
            self._open.add(connection)
            ways = [
                _Carrier(self._random, self.up, port, learner, broker).run(),
                _Carrier(self._random, self.down, port, broker, learner).run(),
            ]
            connection.tasks = [self._loop.create_task(way) for way in ways]
            await asyncio.wait(connection.tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(_error_of(task) for task in connection.tasks):
                self.resets += any(isinstance(_error_of(t), _Blown) for t in connection.tasks)
                connection.reset()
        except OSError:
            connection.reset()  # No broker is there.
        finally:
            self._open.discard(connection)
            connection.close()
            await asyncio.gather(*connection.tasks, return_exceptions=True)


def _close(end: socket.socket, _: object) -> None:
    end.close()


def _reset(end: socket.socket) -> None:
    """Closes with a reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
    end.close()


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


class _Blown(Exception):
    """A fuse has blown: the connection must be reset."""


@dataclass(eq=False)
class _Connection:
    port: int
    learner: socket.socket
    broker: socket.socket
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def reset(self) -> None:
        with suppress(OSError):  # Closed already.
            for end in (self.learner, self.broker):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        for task in self.tasks:
            task.cancel()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.learner.close()
        self.broker.close()


TRICKLE_S: Final = 1.0
"""Interval of the bytes of a connection that trickles."""

HOLD_LOOK_S: Final = 0.01
"""Interval at which a held direction looks for its release."""


class _Carrier:
    """One direction of one connection: read, wait out the delay, pass on in order."""

    def __init__(
        self,
        chance: random.Random,
        way: ProxyWay,
        port: int,
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        self._chance, self._way, self._port = chance, way, port
        self._source, self._sink = source, sink
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[float, bytes]] = deque()
        self._under_way = 0
        self._due_s = 0.0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when the source has ended and everything is passed on. Raises _Blown, OSError."""
        reading = self._loop.create_task(self._read())
        try:
            await self._pass_on()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                window_bytes = self._way.window_bytes or WINDOW_BYTES_MAX
                if (room := window_bytes - self._under_way) <= 0:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                data = await self._loop.sock_recv(self._source, min(BLOCK_BYTES, room))
                self._under_way += len(data)
                self._put(data)
                if not data:
                    return
        except OSError:
            self._put(b"")

    def _put(self, data: bytes) -> None:
        way, chance = self._way, self._chance
        delay_s = way.delay_s + way.jitter_s * chance.random()
        if chance.random() < way.stall_share:
            delay_s += way.stall_s
        self._due_s = max(self._due_s, self._loop.time() + delay_s)
        self._queue.append((self._due_s, data))
        self._changed.set()

    async def _pass_on(self) -> None:
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            due_s, data = self._queue.popleft()
            if (left_s := due_s - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
            while self._way.holds:
                await asyncio.sleep(HOLD_LOOK_S)
            if not data:
                return
            await self._send(data)
            # The sender's window opens when the acknowledgement would be back.
            self._loop.call_later(self._way.delay_s, self._acknowledge, len(data))

    async def _send(self, data: bytes) -> None:
        cut = self._way.cut_length(self._port, len(data))
        for piece in self._slices(data[:cut]):
            while self._port in self._way.trickles and piece:
                await self._loop.sock_sendall(self._sink, piece[:1])
                piece = piece[1:]
                await asyncio.sleep(TRICKLE_S)
            await self._loop.sock_sendall(self._sink, piece)
        carried = self._way.carried
        carried[self._port] = carried.get(self._port, 0) + (len(data) if cut is None else cut)
        if cut is not None:
            raise _Blown

    def _slices(self, data: bytes) -> Iterator[bytes]:
        if not self._way.slice_bytes:
            yield data
            return
        start = 0
        while start < len(data):
            size = self._chance.randint(1, self._way.slice_bytes)
            yield data[start : start + size]
            start += size

    def _acknowledge(self, size: int) -> None:
        self._under_way -= size
        self._changed.set()


def main(host: str, target: str, port: int, round_trip_s: float, window_bytes: int) -> None:
    """Carries PORT and the two after it until the process is ended."""
    with Proxy(host, target, range(port, port + 3)) as proxy:
        for way in (proxy.up, proxy.down):
            way.delay_s, way.window_bytes = round_trip_s / 2, window_bytes
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
