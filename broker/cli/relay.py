"""A TCP relay between learners and a broker. It dissects and prints everything that it relays.

The bytes are relayed unchanged. A separate thread dissects a copy of them: if it fails or is too
slow, the peers do not notice.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Final, NamedTuple, TypeAlias

from narrows.broker.cli.dissecting import Origin, Printer
from narrows.proto.address import Address
from narrows.proto.dissector.capture import Captured, CaptureReader, packed
from narrows.proto.dissector.parts import Direction
from narrows.proto.dissector.zmtp import Stream, StreamPiece
from narrows.proto.errors import BrokerUnreachable, ConfigError, ErrorCode, NarrowsError

BLOCK_BYTES: Final = 1 << 16
BEHIND_BYTES_MAX: Final = 256 << 20
"""Most bytes that may wait to be dissected. A connection that would exceed it is not read further,
but still relayed."""

DIAL_TIMEOUT_S: Final = 5.0


class Route(NamedTuple):
    """One port that is listened at, and where its connections go."""

    listen: Address
    to: Address


@dataclass(frozen=True)
class _Bytes:
    connection: int
    direction: Direction
    at_s: float
    data: bytes


@dataclass(frozen=True)
class _Word:
    """A line about a connection. With `is_end` the connection is over; with `direction` no more
    of this direction is read."""

    connection: int
    at_s: float
    words: str
    direction: Direction | None = None
    is_end: bool = False


_Event: TypeAlias = _Bytes | _Word | None


@dataclass
class Watcher:
    """Dissects and prints the bytes that it is given, on a thread of its own."""

    printer: Printer
    out: BinaryIO | None = None
    """File for the capture."""
    behind_bytes_max: int = BEHIND_BYTES_MAX
    _queue: queue.SimpleQueue[_Event] = field(default_factory=queue.SimpleQueue[_Event])
    _waiting_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lost: set[tuple[int, Direction]] = field(default_factory=set[tuple[int, Direction]])
    _streams: dict[tuple[int, Direction], Stream] = field(
        default_factory=dict[tuple[int, Direction], Stream]
    )
    _reader: CaptureReader = field(default_factory=CaptureReader)
    _is_silent: bool = False
    """Nobody reads what is printed any more."""
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Prints everything that still waits, and the summary, before it returns."""
        self._queue.put(None)
        if self._thread:
            self._thread.join()

    def passed(self, connection: int, direction: Direction, data: bytes) -> None:
        """Takes bytes that are being relayed. Never waits for the thread, and never raises."""
        key: tuple[int, Direction] = (connection, direction)
        now = time.time()
        if key in self._lost:
            return
        with self._lock:
            is_behind = self._waiting_bytes + len(data) > self.behind_bytes_max
            self._waiting_bytes += 0 if is_behind else len(data)
        if is_behind:
            self._lost.add(key)
            words = "printing has fallen behind: not looked into any more"
            self._queue.put(_Word(connection, now, words, direction))
        else:
            self._queue.put(_Bytes(connection, direction, now, data))

    def tell(self, connection: int, words: str, *, is_end: bool = False) -> None:
        """Prints a line about a connection."""
        self._queue.put(_Word(connection, time.time(), words, is_end=is_end))

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._take(event)
                if self._queue.empty():
                    self._print(lambda: sys.stdout.flush())
            except Exception as error:
                self._give_up(event, error)
        self._print(self.printer.summary)

    def _print(self, say: Callable[[], None]) -> None:
        """Says something. When nobody reads any more, the relay goes on without a word."""
        if self._is_silent:
            return
        try:
            say()
        except BrokenPipeError:
            self._is_silent = True
            sys.stdout = None  # Else the end of the process would try to print what is left.

    def _take(self, event: _Bytes | _Word) -> None:
        if isinstance(event, _Word):
            self._take_word(event)
            return
        with self._lock:
            self._waiting_bytes -= len(event.data)
        stream = self._streams.setdefault((event.connection, event.direction), Stream())
        for piece in stream.feed(event.data):
            self._take_piece(event, piece)

    def _take_word(self, event: _Word) -> None:
        if event.direction:
            key = event.connection, event.direction
            self._streams.setdefault(key, Stream()).give_up(event.words)
        words = event.words
        if event.is_end:
            for way in ("up", "down"):
                stream = self._streams.pop((event.connection, way), Stream())
                words += f"; {stream.total_bytes} bytes {way}"
            self._reader.forget(event.connection)
        at = Origin("", event.connection, event.direction, 0, event.at_s)
        self._print(lambda: self.printer.note(words, at))

    def _take_piece(self, event: _Bytes, piece: StreamPiece) -> None:
        origin = Origin("", event.connection, event.direction, piece.index, event.at_s)
        if piece.sort in ("opaque", "skipped"):
            words = f"cannot be looked into: {piece.why}"
            self._print(lambda: self.printer.note(words, origin))
            return
        captured = Captured(
            piece.sort, event.direction, event.connection, event.at_s, piece.body, piece.index,
            piece.has_more,
        )  # fmt: skip
        self._keep(captured)
        found = self._reader.take(captured)
        self._print(lambda: self.printer.show(found, origin))

    def _keep(self, captured: Captured) -> None:
        if self.out is None:
            return
        try:
            self.out.write(packed(captured))
            self.out.flush()
        except OSError as error:
            print(f"narrows: the capture ends here: {error}", file=sys.stderr)
            self.out = None

    def _give_up(self, event: _Bytes | _Word, error: Exception) -> None:
        """Reports an error of the dissector itself, and stops reading this direction."""
        print(f"narrows: #{event.connection}: cannot be dissected: {error!r}", file=sys.stderr)
        if isinstance(event, _Bytes):
            key = event.connection, event.direction
            self._streams.setdefault(key, Stream()).give_up("an error of the dissector")


class Relay:
    """Relays every connection to the routes until it is stopped."""

    def __init__(self, routes: Sequence[Route], watcher: Watcher) -> None:
        self._routes, self._watcher = routes, watcher
        self.listening = asyncio.Event()
        """Set once all ports take connections."""
        self.ports: list[int] = []
        """Where it listens, in the order of the routes."""
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, stop: asyncio.Event) -> None:
        """Raises NarrowsError if a port cannot be listened at."""
        servers: list[asyncio.Server] = []
        try:
            for route in self._routes:
                servers.append(await self._listen(route))
                self.ports.append(servers[-1].sockets[0].getsockname()[1])
                ours = route.listen._replace(port=self.ports[-1])
                print(f"relaying {ours} to {route.to}", file=sys.stderr, flush=True)
            self.listening.set()
            await stop.wait()
        finally:
            for server in servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, route: Route) -> asyncio.Server:
        try:
            return await asyncio.start_server(
                partial(self._accept, route), _host(route.listen), route.listen.port
            )
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            raise NarrowsError(
                ErrorCode.PORT_IN_USE if in_use else ErrorCode.CONFIG,
                f"cannot listen at {route.listen}", got=str(error),
                remedy="choose a free address of this machine, such as 127.0.0.2",
            ) from error  # fmt: skip

    async def _accept(
        self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._count += 1
        number = self._count
        peer = "{}:{}".format(*(writer.get_extra_info("peername") or ("?", "?"))[:2])
        self._watcher.tell(number, f"from {peer} to {route.to}")
        end = "the relay stops"
        try:
            end = await self._carry(route, number, reader, writer)
        except asyncio.CancelledError:
            pass  # The streams of Python 3.11 would log a handler that ends as cancelled.
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
            self._watcher.tell(number, f"is over: {end}", is_end=True)

    async def _carry(
        self, route: Route, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        """Relays both directions until the end, and returns the reason for it."""
        try:
            dialled = asyncio.open_connection(_host(route.to), route.to.port)
            far_reader, far_writer = await asyncio.wait_for(dialled, DIAL_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            return f"{route.to} cannot be reached: {error or 'no answer'}"
        ways = [
            asyncio.ensure_future(self._pump(number, "up", reader, far_writer)),
            asyncio.ensure_future(self._pump(number, "down", far_reader, writer)),
        ]
        try:
            await asyncio.gather(*ways)
        except OSError as error:
            return str(error)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()
        return "both sides have closed it"

    async def _pump(
        self, number: int, direction: Direction, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        while data := await reader.read(BLOCK_BYTES):
            # First: else an answer could be printed before what it answers.
            self._watcher.passed(number, direction, data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        await writer.drain()


def _host(address: Address) -> str:
    return address.host.strip("[]")


def run_relay(routes: Sequence[Route], watcher: Watcher) -> None:
    """Relays until SIGINT or SIGTERM. Raises BrokerUnreachable if nobody answers at the first
    address at the start, and NarrowsError if a port is taken."""
    first = routes[0].to
    try:
        socket.create_connection((_host(first), first.port), DIAL_TIMEOUT_S).close()
    except OSError as error:
        raise BrokerUnreachable(
            f"{first}: {error}", remedy="start the broker first, or correct --to"
        ) from error
    with ExitStack() as stack:
        watcher.start()
        stack.callback(watcher.stop)
        asyncio.run(_until_signal(Relay(routes, watcher)))


async def _until_signal(relay: Relay) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await relay.serve(stop)


def check_route(route: Route, *, insecure: bool) -> None:
    """Raises ConfigError, or INSECURE for an address beyond loopback."""
    if route.listen.port and route.listen == route.to:
        raise ConfigError(f"--listen and --to are both {route.to}", expected="two addresses")
    if not (route.listen.is_loopback or insecure):
        raise NarrowsError(
            ErrorCode.INSECURE, "anybody who reaches this address reaches the broker",
            expected="--listen at a loopback address, or --insecure", got=str(route.listen),
            remedy="pass --insecure on a network that you trust",
        )  # fmt: skip
