"""A broker with keys over real sockets: who may connect, and what each key may say."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest
import zmq
from running import HANG_S, broker_config, live_broker, wait_until

from narrows.broker.process.service import Service
from narrows.proto import messages as msg
from narrows.proto.frames import decode_control, encode_control
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import BrokerKey, KeyPair, Keyring, edit_ring, new_broker_key, new_pair
from narrows.proto.keys.ring import write_ring


class Keys:
    """A directory of keys, with a pair for each name."""

    def __init__(self, directory: Path, names: str) -> None:
        self.directory = directory
        self.broker: BrokerKey = new_broker_key(directory)
        self.pairs = {name: new_pair() for name in names.split()}
        ring = Keyring()
        for name, pair in self.pairs.items():
            role = KeyRole(name) if name in tuple(KeyRole) else KeyRole.LEARNER
            ring = ring.allow(KeyHolder(name, role), pair.public, now=time.time())
        write_ring(directory, ring)

    def revoke(self, name: str) -> None:
        with edit_ring(self.directory) as rings:
            rings[0] = rings[0].revoke(name)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys", "a b operator monitor")


@pytest.fixture(scope="module")
def service(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    folder = tmp_path_factory.mktemp("broker")
    config = broker_config(folder, security__keys=str(keys.directory), wan__streams=1)
    with live_broker(config) as service:
        yield service


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], service: Service, server: str | None, pair: KeyPair
) -> zmq.Socket[bytes]:
    """A control connection as any ZeroMQ program opens it; without keys if `server` is None."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if server is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.connect(service.wires.address)
    return socket


def test_the_holder_of_a_key_is_answered(service: Service, keys: Keys) -> None:
    with zmq.Context() as context:
        socket = dealer(context, service, keys.broker.current.public, keys.pairs["a"])
        socket.send(encode_control(msg.AskStatus()))
        assert socket.poll(int(HANG_S * 1000)), "no answer"
        assert isinstance(decode_control(socket.recv()), msg.Status)
        socket.close()


def test_an_unknown_key_is_refused(service: Service, keys: Keys) -> None:
    gate = service.wires.gate
    assert gate is not None
    before = gate.refused
    with zmq.Context() as context:
        socket = dealer(context, service, keys.broker.current.public, new_pair())
        wait_until(lambda: gate.refused > before, "the refusal")
        assert not socket.poll(0, zmq.POLLOUT)
        socket.close()
