"""One lasting connection to a broker, over which its status is asked again and again."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import zmq

from narrows.proto.config import parse_address
from narrows.proto.errors import BrokerUnreachable, ErrorCode, NarrowsError, Refused
from narrows.proto.keys import SiteKey, servers_of
from narrows.proto.messages import CONTROL_BYTES_MAX, AskStatus, Phase, Refuse, Status
from narrows.proto.sockets import Dial, Kind, needs_ipv6
from narrows.proto.wire import decode_control, encode_control

LOOK_S: Final = 0.1
"""Longest time between two looks at a connection that says nothing."""


class Asker:
    """Asks one broker. It belongs to one thread at a time; `close` ends its connection."""

    def __init__(self, broker: str, key: SiteKey | None) -> None:
        """`broker` is the control address. Raises ConfigError for one that is none."""
        self._address = parse_address(broker)
        self._key = key
        self._servers = list(servers_of(key))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dial: Dial | None = None

    def ask(self, timeout_s: float) -> Status:
        """The broker's status. Raises Refused, and BrokerUnreachable, after `timeout_s` unless it
        is certain before; the next call connects anew then."""
        until = time.monotonic() + timeout_s
        if self._dial is not None:
            with suppress(NarrowsError):
                return self._ask(self._dial, until)
            self._drop()
        *others, last = self._servers
        for server in others:
            # A site trusts two keys while the broker changes its own; with the other one it breaks
            # off.
            with suppress(BrokerUnreachable):
                return self._connect(server, until)
        return self._connect(last, until)

    def close(self) -> None:
        self._drop()
        self._context.destroy(linger=0)

    def _connect(self, server: str, until: float) -> Status:
        ipv6 = needs_ipv6(self._address)
        self._dial = Dial(self._context, Kind.ASKER, self._address, self._key, server, ipv6=ipv6)
        try:
            return self._ask(self._dial, until)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._dial is not None:
            self._dial.close()
            self._dial = None

    def _ask(self, dial: Dial, until: float) -> Status:
        """Asks once for each connection: a broker that ends before it answers, and starts again,
        has not heard the question."""
        trouble: NarrowsError | None = None
        now = time.monotonic()
        dial.look(now)
        while dial.socket.poll(0):
            # The answer to a question that was given up, or the last words of a broker: it ends
            # with its run, maybe between two questions, and tells so unasked.
            said = decode_control(dial.socket.recv_multipart(), CONTROL_BYTES_MAX)
            if isinstance(said, Status) and said.phase == Phase.ENDED:
                return said
        if dial.connected:
            self._send(dial)
        while now < until:
            zmq.select([dial.socket, dial.monitor], [], [], min(LOOK_S, until - now))
            if dial.look(now):
                self._send(dial)
            trouble = dial.error(now)
            # Silence decides nothing: a broker that is frozen may answer yet.
            if trouble is not None and not dial.is_silent:
                raise trouble
            if dial.socket.poll(0):
                said = decode_control(dial.socket.recv_multipart(), CONTROL_BYTES_MAX)
                if isinstance(said, Status):
                    return said
                if isinstance(said, Refuse):
                    raise Refused(
                        ErrorCode(said.code),
                        said.message,
                        expected=said.expected,
                        got=said.got,
                        remedy=said.remedy,
                    )
            now = time.monotonic()
        raise trouble or BrokerUnreachable(
            f"{self._address} did not answer",
            remedy="is the broker running, and is this its control port? It ends with its run",
        )

    @staticmethod
    def _send(dial: Dial) -> None:
        with suppress(zmq.Again):  # The connection is gone already, and comes again.
            dial.socket.send_multipart(encode_control(AskStatus()), zmq.NOBLOCK)
