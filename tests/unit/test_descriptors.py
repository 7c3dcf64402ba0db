"""System calls on descriptors that another thread may close and reuse at any moment."""

from __future__ import annotations

import os
import socket

import pytest

from narrows.broker.process import descriptors


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname()[:2])
        return server.accept()[0], far


def test_a_number_that_is_reused_after_the_check_cuts_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = connected()
    other, other_far = connected()
    find_peer = descriptors._peer

    def reused(end: socket.socket) -> tuple[str, int]:
        found = find_peer(end)
        # ZeroMQ's thread closes the connection, and another one gets its number.
        os.dup2(other.fileno(), near.fileno())
        return found

    with near, far, other, other_far:
        monkeypatch.setattr(descriptors, "_peer", reused)
        assert descriptors.shut_down(near.fileno(), far.getsockname()[:2])
        other.sendall(b"still here")
        assert other_far.recv(16) == b"still here"
        assert far.recv(16) == b""


def test_the_connection_of_another_peer_is_not_cut() -> None:
    near, far = connected()
    with near, far:
        assert not descriptors.shut_down(near.fileno(), ("127.0.0.1", 1))
        near.sendall(b"still here")
        assert far.recv(16) == b"still here"
        assert descriptors.shut_down(near.fileno(), far.getsockname()[:2])
    assert not descriptors.shut_down(near.fileno(), ("127.0.0.1", 1))
