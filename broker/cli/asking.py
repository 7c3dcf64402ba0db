"""Asks a broker one question over a connection of its own, with a key or without."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import zmq

from narrows.proto import socket_options
from narrows.proto.address import parse_address
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.frames import decode_control, encode_control
from narrows.proto.keys import MONITORED, Handshake, Handshakes, SiteKey
from narrows.proto.messages import ControlMessage, Refuse
from narrows.proto.refusal import error_of

Socket = zmq.Socket[bytes]


def ask(
    broker: str, key: SiteKey | None, question: ControlMessage, *, timeout_s: float
) -> ControlMessage:
    """The broker's answer. Raises ConfigError for a bad address, Refused for a Refuse or a key that
    is not admitted, BrokerUnreachable after `timeout_s`."""
    with _Question(broker, key, timeout_s) as connection:
        answer = connection.answer(encode_control(question))
    if isinstance(answer, Refuse):
        raise error_of(answer)
    return answer


def is_admitted(key: SiteKey, *, timeout_s: float) -> bool:
    """True if the key's broker admits it, False if it does not know it. Else as `ask`."""
    with _Question(key.broker, key, timeout_s) as connection:
        return connection.shake_hands() is Handshake.ADMITTED


@dataclass
class _Question:
    """A socket that dials; a broker of several keys is tried with each in turn."""

    broker: str
    key: SiteKey | None
    timeout_s: float
    _handshakes: Handshakes = field(init=False)
    _context: zmq.Context[Socket] = field(init=False)

    def __enter__(self) -> _Question:
        self._address = parse_address(self.broker)
        self._handshakes = Handshakes(self.broker, self.key)
        self._deadline = time.monotonic() + self.timeout_s
        self._context = zmq.Context()
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        # A question to a broker that is not there must not keep the command from ending.
        self._context.destroy(linger=0)

    def _open(self) -> None:
        self._handshakes.opened()
        self._socket = self._context.socket(zmq.DEALER)
        options: dict[str, int | bytes] = {**socket_options.CONTROL, **self._handshakes.options}
        for name, value in options.items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._socket.setsockopt(zmq.IPV6, self._address.is_ipv6)
        self._monitor: Socket = self._socket.get_monitor_socket(MONITORED)
        self._socket.connect(str(self._address))

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def shake_hands(self) -> Handshake:
        """ADMITTED or KEY_REFUSED; any other end raises its error."""
        while time.monotonic() < self._deadline:
            if time.monotonic() >= self._handshakes.reopen_at:
                self._open()
            if self._socket.closed:
                time.sleep(0.02)
                continue
            if not self._monitor.poll(50):
                continue
            outcome = self._handshakes.take(self._monitor.recv_multipart()[0], time.monotonic())
            if outcome is Handshake.BROKEN_OFF and self._handshakes.reopen_at < math.inf:
                self._close()
            if outcome is Handshake.ADMITTED or outcome is Handshake.KEY_REFUSED:
                return outcome
            if outcome is not None and outcome.gives_up:
                break
        raise self._error()

    def answer(self, question: bytes) -> ControlMessage:
        if self.shake_hands() is Handshake.KEY_REFUSED:
            raise self._error()
        try:
            self._socket.send(question, zmq.NOBLOCK)
        except zmq.Again:  # The key was refused after all: such a socket takes no message.
            raise self._error() from None
        left_s = max(0.0, self._deadline - time.monotonic())
        if not self._socket.poll(int(left_s * 1000)):
            raise self._error()
        return decode_control(self._socket.recv())

    def _error(self) -> Exception:
        return self._handshakes.error(time.monotonic()) or BrokerUnreachable(
            f"{self.broker} did not answer within {self.timeout_s:g} s",
            remedy="is `narrows broker` running there? Use the address that it printed",
        )
