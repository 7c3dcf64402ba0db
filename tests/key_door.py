"""A broker's door alone: a ROUTER with CURVE, and ZAP answered from a list that a test changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from narrows.proto.frames import decode_control, encode_control
from narrows.proto.keys import KeyPair, SiteKey, new_pair
from narrows.proto.messages import ControlMessage

Answer = Callable[[str, ControlMessage], ControlMessage | None]


class Door:
    """Admits the public keys in `admitted`, by the name of their holder. Use it in a with block."""

    def __init__(self, answer: Answer, *, pair: KeyPair | None = None, keys: bool = True) -> None:
        self.admitted: dict[str, str] = {}
        self.asked = 0
        """Handshakes that got as far as the question for their key."""
        self.heard: list[tuple[str, ControlMessage]] = []
        self.server = pair or new_pair()
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        if keys:
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret.encode())
            self._router.setsockopt(zmq.ZAP_DOMAIN, b"narrows")
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def key(self, name: str, *servers: str) -> SiteKey:
        """A key for this door, which does not admit it yet."""
        return SiteKey(name, new_pair(), self.address, servers or (self.server.public,))

    def admit(self, key: SiteKey) -> SiteKey:
        self.admitted[key.pair.public] = key.name
        return key

    def __enter__(self) -> Door:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._over:
            ready = dict(poller.poll(10))
            if self._zap in ready:
                self._serve_zap()
            if self._router in ready:
                self._serve()

    def _serve_zap(self) -> None:
        peer, _, version, request, *_, key = self._zap.recv_multipart()
        name = self.admitted.get(z85.encode(key).decode())
        self.asked += 1
        status = [b"400", b"", b""] if name is None else [b"200", b"", name.encode()]
        self._zap.send_multipart([peer, b"", version, request, *status, b""])

    def _serve(self) -> None:
        peer, frame = self._router.recv_multipart(copy=False)
        try:
            name = str(frame.get("User-Id"))
        except zmq.ZMQError:
            name = ""
        message = decode_control(frame.bytes)
        self.heard.append((name, message))
        answer = self._answer(name, message)
        if answer is not None:
            self._router.send_multipart([peer.bytes, encode_control(answer)])
