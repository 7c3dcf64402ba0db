"""The proxy over plain sockets: nothing is lost or reordered, a fuse blows at its byte."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from running import HANG_S, wait_until

from narrows.bench.kit.proxy import Proxy

HOST, FRONT = "127.0.0.1", "127.0.0.2"
DATA = random.Random(0).randbytes(1 << 18)


@contextmanager
def echo() -> Generator[tuple[Proxy, socket.socket]]:
    """A server that sends back what it gets, and a connection to it through a proxy."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                try:
                    while data := end.recv(1 << 16):
                        end.sendall(data)
                except OSError:
                    return  # Reset.

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Proxy(FRONT, HOST, [port]) as proxy:
            with socket.create_connection((FRONT, port), HANG_S) as client:
                client.settimeout(HANG_S)
                yield proxy, client
        thread.join(HANG_S)
        assert not thread.is_alive()


def send(client: socket.socket, data: bytes) -> None:
    """In the background: what comes back must be read meanwhile."""
    threading.Thread(target=lambda: _send(client, data), daemon=True).start()


def _send(client: socket.socket, data: bytes) -> None:
    try:
        client.sendall(data)
    except OSError:
        return  # The fuse has blown.


def receive(client: socket.socket, size: int) -> bytes:
    """So many bytes, or those before the end."""
    got = b""
    while len(got) < size:
        try:
            more = client.recv(1 << 16)
        except ConnectionResetError:
            return got
        if not more:
            return got
        got += more
    return got


@pytest.mark.parametrize(
    "conditions",
    [
        {},
        {"slice_bytes": 100},
        {"delay_s": 0.01, "jitter_s": 0.01},
        {"stall_share": 0.2, "stall_s": 0.01},
        {"window_bytes": 10_000, "delay_s": 0.001},
    ],
    ids=lambda c: next(iter(c), "plain"),
)
def test_everything_arrives_in_order(conditions: dict[str, float]) -> None:
    with echo() as (proxy, client):
        for way in (proxy.up, proxy.down):
            for name, value in conditions.items():
                setattr(way, name, value)
        send(client, DATA)
        assert receive(client, len(DATA)) == DATA


@pytest.mark.parametrize("fuse", [0, 1, 77_777])
def test_a_fuse_lets_exactly_so_many_bytes_pass(fuse: int) -> None:
    with echo() as (proxy, client):
        port: int = client.getpeername()[1]
        proxy.up.fuses[port] = fuse
        send(client, DATA)
        got = receive(client, len(DATA))
        assert DATA.startswith(got) and len(got) <= fuse
        wait_until(lambda: proxy.resets == 1, "the reset")
        assert proxy.up.carried[port] == fuse
        assert not proxy.up.fuses


def test_what_is_held_passes_after_the_release() -> None:
    with echo() as (proxy, client):
        client.sendall(b"before")
        assert receive(client, 6) == b"before"
        proxy.hold("down")
        client.sendall(b"after")
        wait_until(lambda: sum(proxy.up.carried.values()) == 11, "the way up to carry it")
        assert sum(proxy.down.carried.values()) == 6
        proxy.release()
        assert receive(client, 5) == b"after"


def test_a_reset_ends_what_is_open_and_takes_new_connections() -> None:
    with echo() as (proxy, client):
        place = client.getpeername()
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        proxy.reset()
        assert receive(client, 1) == b""
        with socket.create_connection(place, HANG_S) as again:
            assert again.getpeername() == place


def test_a_refusal_ends_old_and_new_connections_until_the_release() -> None:
    with socket.create_server((HOST, 0)) as broker:
        broker.settimeout(HANG_S)
        place = (FRONT, broker.getsockname()[1])
        with Proxy(FRONT, HOST, [place[1]]) as proxy:
            with socket.create_connection(place, HANG_S) as old, broker.accept()[0]:
                old.sendall(b"x")
                proxy.refuse()
                with pytest.raises(ConnectionResetError):
                    old.recv(1)
            with pytest.raises(ConnectionError), socket.create_connection(place, HANG_S) as new:
                new.recv(1)
            proxy.release()
            with socket.create_connection(place, HANG_S) as again, broker.accept()[0] as end:
                again.sendall(b"back")
                assert end.recv(9) == b"back"
