"""Attackers without a key, or with one that nobody admits."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import zmq

from narrows.bench.attack.target import AttackTarget, Socket, frame, greeting
from narrows.proto.keys import new_pair

HANDSHAKES_PER_S: Final = 500
HALF_HANDSHAKES: Final = 5000
IDLE_CONNECTIONS: Final = 1000


def null_client(target: AttackTarget) -> Iterator[int]:
    """Speaks ZeroMQ without encryption: on all ports, control frames, data and subscriptions."""
    body = frame(b"NRW", more=False) * 20
    while True:
        for port in target.ports:
            with suppress(OSError), target.dial(port) as line:
                line.sendall(
                    greeting("NULL") + frame(b"\x05READY\x0bSocket-Type\0\0\0\3PUB") + body
                )
                line.settimeout(0.2)
                line.recv(4096)
            yield 1
        time.sleep(0.01)


def unknown_key(target: AttackTarget) -> Iterator[int]:
    """Three sockets with a key that is in no ring; they dial again whenever they are refused."""
    while True:
        context: zmq.Context[Socket] = zmq.Context()
        kinds = zip((zmq.DEALER, zmq.PUB, zmq.SUB), target.ports, strict=True)
        sockets = [target.stranger(context, kind, port) for kind, port in kinds]
        for each in sockets[:2]:
            with suppress(zmq.Again):
                each.send_multipart([b"x" * 100], zmq.NOBLOCK)
        time.sleep(0.1)
        context.destroy(linger=0)
        yield len(sockets)


def wrong_server_key(target: AttackTarget) -> Iterator[int]:
    """Sockets that take another key for the broker's."""
    context: zmq.Context[Socket] = zmq.Context()
    for port in target.ports:
        made = target.connect(context, zmq.DEALER, port, server=new_pair().public)
        made.setsockopt(zmq.RECONNECT_IVL, 10)
    while True:
        time.sleep(0.1)
        yield 1


def handshakes(target: AttackTarget) -> Iterator[int]:
    """HANDSHAKES_PER_S whole handshakes a second with keys that no ring holds."""
    context: zmq.Context[Socket] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 4000)
    pair, began, made = new_pair(), time.monotonic(), 0
    open_: deque[tuple[float, Socket]] = deque()
    while True:
        now = time.monotonic()
        while made < (now - began) * HANDSHAKES_PER_S:
            open_.append((now, target.connect(context, zmq.DEALER, target.ports[0], pair=pair)))
            made += 1
        while open_ and open_[0][0] < now - 0.5:
            open_.popleft()[1].close()
            yield 1
        time.sleep(0.002)


def half_handshakes(target: AttackTarget) -> Iterator[int]:
    """HALF_HANDSHAKES connections at a time that greet and then say nothing."""
    yield from _held(target, HALF_HANDSHAKES, greeting("CURVE"))


def idle_connections(target: AttackTarget) -> Iterator[int]:
    """IDLE_CONNECTIONS connections at a time that say nothing at all."""
    yield from _held(target, IDLE_CONNECTIONS, b"")


def _held(target: AttackTarget, count: int, first: bytes) -> Iterator[int]:
    """Keeps `count` connections open; those that the broker closes are opened again."""
    raise_descriptors(count + 200)
    lines: deque[socket.socket] = deque()
    while True:
        for _ in range(50):
            if len(lines) >= count and not _is_closed(lines[0]):
                lines.rotate(-1)
                continue
            if len(lines) >= count:
                lines.popleft().close()
            try:
                line = target.dial(target.ports[len(lines) % 3])
                line.sendall(first)
            except OSError:
                time.sleep(0.01)
                continue
            line.setblocking(False)
            lines.append(line)
            yield 1
        time.sleep(0.01)
        yield 0


def random_bytes(target: AttackTarget) -> Iterator[int]:
    """Random bytes, alone and after a correct greeting."""
    while True:
        for port in target.ports:
            for first in (b"", greeting("CURVE"), greeting("NULL")):
                with suppress(OSError), target.dial(port) as line:
                    line.sendall(first + os.urandom(2000))
                yield 1
        time.sleep(0.01)


def raise_descriptors(needed: int) -> None:
    """Lets this process open as many descriptors as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def _is_closed(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
