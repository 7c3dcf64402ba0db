"""System calls on the descriptors of ZeroMQ's TCP connections, and their number.

The descriptors are ZeroMQ's: a socket object that is made of one must never close it.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable
from typing import Final, TypeVar

Result = TypeVar("Result")

RESERVED: Final = 128
"""Descriptors that connections leave to the disk and to the process itself."""

CONNECTIONS_MAX: Final = 1 << 14
"""Connections at the same time, however many files may be open: an idle one takes 40 KB here."""

FEW_LEARNERS: Final = 100
"""A limit with room for fewer learners is worth a warning."""

_INFO_BYTES: Final = 136
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT: Final = 120
"""Place of tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info."""


def connections_max() -> int:
    """Connections that the process may have; raises its limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # A sandbox may forbid it; the limit stays what it is.
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return min(max(files - RESERVED, 1), CONNECTIONS_MAX)


def learners_that_fit(connections: int, streams: int) -> int:
    """Learners whose connections the process may have."""
    return connections // (2 * streams + 4)


def peer_of(descriptor: int) -> tuple[str, int] | None:
    """Address and port of the other end, None if there is none."""
    return _use(descriptor, _peer)


def byte_counts(descriptor: int) -> tuple[int, int] | None:
    """Bytes that the other end has acknowledged, and bytes received; None if it is gone."""
    return _use(descriptor, _byte_counts)


def shut_down(descriptor: int, peer: tuple[str, int]) -> bool:
    """Ends a connection at once, if the descriptor is still its own."""
    try:
        # ZeroMQ's thread may close the descriptor at any moment, and the next connection gets its
        # number. The duplicate is of one connection for as long as it is open.
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    try:
        is_its_own = _use(duplicate, _peer) == peer
        return is_its_own and _use(duplicate, _shut_down) is not None
    finally:
        os.close(duplicate)


def _use(descriptor: int, call: Callable[[socket.socket], Result]) -> Result | None:
    """Result of a call on a descriptor, None if it is no connection any more."""
    try:
        end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        return call(end)
    except (OSError, IndexError, struct.error):
        return None
    finally:
        end.detach()


def _peer(end: socket.socket) -> tuple[str, int]:
    name = end.getpeername()
    return str(name[0]), int(name[1])


def _byte_counts(end: socket.socket) -> tuple[int, int]:
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_AT)
    return acknowledged, received


def _shut_down(end: socket.socket) -> bool:
    end.shutdown(socket.SHUT_RDWR)
    return True
