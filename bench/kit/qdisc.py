"""Byte counters of queueing disciplines in a network namespace, read from the kernel (rtnetlink).

They count the bytes that leave for the wire, with every frame's headers. An interface's own
counters do not: with segmentation offload they see one header for up to 64 KiB. Without offload
this lab would need half as much processor time again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from narrows.proto.errors import ErrorCode, NarrowsError

# From linux/rtnetlink.h, linux/netlink.h, linux/pkt_sched.h.
RTM_GETQDISC: Final = 38
NLMSG_DONE: Final = 3
NLM_F_REQUEST_DUMP: Final = 0x301
TCA_STATS: Final = 3
ROOT: Final = 0xFFFF_FFFF

HEADER: Final = struct.Struct("=IHHII")
"""Header of a message: length, type, flags, sequence, port."""
TRAFFIC: Final = struct.Struct("=BxHiIII")
"""tcmsg: family, interface, handle, parent, info."""
ATTRIBUTE: Final = struct.Struct("=HH")
REPLY_BYTES_MAX: Final = 1 << 16


class QueueCounters:
    """Bytes that the root queues of one namespace have let go, by interface."""

    def __init__(self, namespace: str) -> None:
        """Raises OSError for a namespace that is not there."""
        self._socket, self._names = _enter(namespace)

    def read(self) -> dict[str, int]:
        """Bytes since the queue was made, by the interface's name."""
        size = HEADER.size + TRAFFIC.size
        request = HEADER.pack(size, RTM_GETQDISC, NLM_F_REQUEST_DUMP, 1, 0)
        self._socket.send(request + TRAFFIC.pack(0, 0, 0, 0, 0, 0))
        counts: dict[str, int] = {}
        while True:
            reply = self._socket.recv(REPLY_BYTES_MAX)
            for kind, body in _messages(reply):
                if kind == NLMSG_DONE:
                    return counts
                _, _, interface, _, parent, _ = TRAFFIC.unpack_from(body)
                if parent == ROOT and interface in self._names:
                    counts[self._names[interface]] = _bytes_of(body[TRAFFIC.size :])

    def close(self) -> None:
        self._socket.close()


def _messages(reply: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(reply):
        length, kind, *_ = HEADER.unpack_from(reply, start)
        yield kind, reply[start + HEADER.size : start + length]
        start += (length + 3) & ~3


def _bytes_of(attributes: bytes) -> int:
    """The first field of tc_stats."""
    start = 0
    while start < len(attributes):
        length, kind = ATTRIBUTE.unpack_from(attributes, start)
        if kind == TCA_STATS:
            return int(struct.unpack_from("=Q", attributes, start + ATTRIBUTE.size)[0])
        start += (length + 3) & ~3
    raise NarrowsError(ErrorCode.MISUSE, "the kernel gave no counters of a queue")


def _enter(namespace: str) -> tuple[socket.socket, dict[int, str]]:
    """A socket that stays bound to the namespace, and its interfaces by number."""
    made: list[tuple[socket.socket, dict[int, str]]] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            handle = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            finally:
                os.close(handle)
            made.append((socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), _interfaces()))
        except OSError as error:
            failed.append(error)

    # A thread of its own, because a thread that has entered does not come back.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _interfaces() -> dict[int, str]:
    return dict(socket.if_nameindex())
