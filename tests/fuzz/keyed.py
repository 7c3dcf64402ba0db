"""Peers with keys for a broker under made-up connections, and what one of them says out of turn."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import zmq
from fuzz.sessions import PORTS, Port, messages
from peer import Peer

from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import KeyPair, Keyring, new_broker_key, new_pair
from narrows.proto.keys.ring import write_ring

NAMES = ("honest", "another", "insider")
SEND_WAIT_MS = 200
KINDS: dict[Port, int] = {"control": zmq.DEALER, "uplink": zmq.XPUB, "downlink": zmq.XSUB}


class Keys:
    """A broker's directory of keys, and a pair for each of NAMES."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = new_broker_key(directory).current.public
        self.pairs = {name: new_pair() for name in NAMES}
        ring = Keyring()
        for name, pair in self.pairs.items():
            ring = ring.allow(KeyHolder(name, KeyRole.LEARNER), pair.public, now=time.time())
        write_ring(directory, ring)

    def peer(self, address: str, name: str) -> Peer:
        """A peer that proves the key of its name."""
        return KeyedPeer(address, name, self.server, self.pairs[name])


class KeyedPeer(Peer):
    """A peer whose sockets prove a key."""

    def __init__(self, address: str, name: str, server: str, pair: KeyPair) -> None:
        self._server, self._pair = server, pair
        super().__init__(address, name)

    def make(self, kind: int) -> zmq.Socket[bytes]:
        socket = super().make(kind)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        return socket


def misbehave(seed: int, insider: Peer, honest: Peer, ports: dict[Port, int]) -> None:
    """One connection of the insider, with messages behind the handshake of its key."""
    random = Random(seed)
    port = random.choice(PORTS)
    socket = insider.make(KINDS[port])
    socket.connect(f"tcp://127.0.0.1:{ports[port]}")
    for parts in messages(random, port, honest):
        # An XPUB has nobody to send to before the broker subscribes, a cut connection has nobody.
        if port == "uplink":
            socket.poll(SEND_WAIT_MS)
        if socket.poll(SEND_WAIT_MS, zmq.POLLOUT):
            socket.send_multipart(parts, zmq.NOBLOCK)
    socket.close(linger=SEND_WAIT_MS)
