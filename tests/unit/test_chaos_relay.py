"""A learner's relay: it carries, holds back while its line is cut, and resets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from running import HANG_S

from narrows.bench.chaos_relay import Relays

ONE, OTHER = "127.77.1.1", "127.77.1.2"


@pytest.fixture
def broker() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(HANG_S)
        yield server


@pytest.fixture
def relays(broker: socket.socket) -> Iterator[Relays]:
    with Relays("127.0.0.1", [broker.getsockname()[1]], (ONE, OTHER)) as relays:
        yield relays


def connected(broker: socket.socket, host: str) -> tuple[socket.socket, socket.socket]:
    """A connection through the relay: the learner's end and the broker's."""
    learner = socket.create_connection((host, broker.getsockname()[1]), HANG_S)
    end, _ = broker.accept()
    end.settimeout(HANG_S)
    return learner, end


def test_bytes_pass_both_ways(broker: socket.socket, relays: Relays) -> None:
    learner, end = connected(broker, ONE)
    with learner, end:
        learner.sendall(b"push")
        assert end.recv(9) == b"push"
        end.sendall(b"publication")
        assert learner.recv(99) == b"publication"


def test_the_end_of_one_side_ends_the_other(broker: socket.socket, relays: Relays) -> None:
    learner, end = connected(broker, ONE)
    with learner:
        end.close()
        try:
            assert learner.recv(1) == b""
        except ConnectionResetError:
            pass


def test_a_cut_line_holds_back_and_goes_on(broker: socket.socket, relays: Relays) -> None:
    learner, end = connected(broker, ONE)
    other, other_end = connected(broker, OTHER)
    with learner, end, other, other_end:
        relays.cut(ONE)
        learner.sendall(b"held back")
        # The other learner's line carries; its bytes came later and would arrive later.
        other.sendall(b"passes")
        assert other_end.recv(9) == b"passes"
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(9)
        end.settimeout(HANG_S)
        relays.restore(ONE)
        assert end.recv(9) == b"held back"


def test_a_connection_made_while_cut_is_carried_afterwards(
    broker: socket.socket, relays: Relays
) -> None:
    relays.cut(ONE)
    learner = socket.create_connection((ONE, broker.getsockname()[1]), HANG_S)
    relays.restore(ONE)
    end, _ = broker.accept()
    with learner, end:
        learner.sendall(b"hello")
        assert end.recv(9) == b"hello"


def test_a_reset_ends_old_and_new_connections(broker: socket.socket, relays: Relays) -> None:
    learner, end = connected(broker, ONE)
    with learner, end:
        relays.reset(ONE)
        with pytest.raises(ConnectionResetError):
            learner.recv(1)
        with (
            pytest.raises(ConnectionError),
            socket.create_connection((ONE, broker.getsockname()[1]), HANG_S) as refused,
        ):
            refused.sendall(b"hello")
            if refused.recv(1) == b"":
                raise ConnectionError
        relays.restore(ONE)
        again, again_end = connected(broker, ONE)
        with again, again_end:
            again.sendall(b"back")
            assert again_end.recv(9) == b"back"
