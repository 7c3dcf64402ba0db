"""A peer that speaks the protocol by hand, for messages that no honest learner sends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import zmq
from running import HANG_S, LAYOUT, wait_until

from narrows.broker.process.service import Service
from narrows.proto import messages as msg
from narrows.proto.codec import F32
from narrows.proto.codec.codecs import codec_names
from narrows.proto.codec.transfer import (
    STATE_CODEC,
    EncodedChunk,
    decode_chunk,
    digest_of,
    encode_fragment,
    values_of,
)
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.frames import (
    decode_control,
    decode_data,
    digest,
    downlink_topic,
    encode_control,
    encode_header,
)
from narrows.proto.layout import fingerprint, split_layout
from narrows.proto.limits import PROTOCOL

Frames = Sequence[bytes]
Message = TypeVar("Message")

PUSH = msg.Push(fragment=0, base_version=0, attempt=1, push_id=1, elements=216, tokens=9, steps=3)
"""An announcement that a member may make as soon as it has adopted version 0."""


class Peer:
    """One connection to each port of a broker that has a single stream per direction."""

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.incarnation = secrets.token_hex(16)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        # A socket whose key was refused takes no message, for ever.
        self._context.setsockopt(zmq.SNDTIMEO, int(HANG_S * 1000))
        self.control = self.make(zmq.DEALER)
        self.control.connect(address)
        self.welcome: msg.Welcome | None = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy()

    def make(self, kind: int) -> zmq.Socket[bytes]:
        """A socket of this peer's context."""
        return self._context.socket(kind)

    # Control.

    def send(self, message: msg.ControlMessage) -> None:
        self.control.send(encode_control(message))

    def receive(self, kind: type[Message]) -> Message:
        """The next control message of this kind; others are passed over."""
        deadline = time.monotonic() + HANG_S  # Beats never end.
        while True:
            message = decode_control(_receive(self.control, deadline)[0])
            if isinstance(message, kind):
                return message
            if isinstance(message, msg.AskLayout):
                self.send(self.parts[message.first])

    def hello(self, **fields: object) -> msg.Hello:
        """An honest Hello but for these fields; `layout` and `frozen_digest` go into the
        fingerprint."""
        layout = cast(tuple[msg.LayoutEntry, ...], fields.pop("layout", LAYOUT))
        frozen_digest = cast(int, fields.pop("frozen_digest", 0))
        self.parts = split_layout(layout, frozen_digest)
        honest = msg.Hello(
            protocol=PROTOCOL,
            name=self.name,
            incarnation=self.incarnation,
            run_id="",
            epoch=(0, 0, 0),
            fingerprint=fingerprint(layout, frozen_digest),
            codecs=codec_names(),
            step=0,
            tokens=0,
            versions=(),
        )
        return msgspec.structs.replace(honest, **fields)

    def status(self) -> msg.Status:
        self.send(msg.AskStatus())
        return self.receive(msg.Status)

    def refusals(self, code: str) -> int:
        """Number of the broker's refusals with this code."""
        return self.status().contributions_refused.get(code, 0)

    def join(self) -> msg.Welcome:
        """Says Hello and opens the data connections; the broker listens when this returns."""
        self.send(self.hello())
        self.welcome = self.receive(msg.Welcome)
        assert self.welcome.settings.streams == 1
        host = self.address.rsplit(":", 1)[0]
        self.uplink = self.make(zmq.XPUB)
        self.uplink.connect(f"{host}:{self.welcome.uplink_port}")
        self.downlink = self.make(zmq.SUB)
        self.downlink.setsockopt(zmq.SUBSCRIBE, downlink_topic(self.name, self.incarnation, 0))
        self.downlink.connect(f"{host}:{self.welcome.downlink_port}")
        assert _receive(self.uplink) == [b"\1"]
        return self.welcome

    # Data.

    def frames(self, payload: bytes, **fields: object) -> list[bytes]:
        """Topic, header and payload of an honest chunk but for these header fields."""
        assert self.welcome is not None
        honest = msg.Header(
            protocol=PROTOCOL,
            run_id=self.welcome.run_id,
            epoch=self.welcome.epoch,
            kind=msg.DataKind.PUSH,
            learner=self.name,
            incarnation=self.incarnation,
            fragment=0,
            version=0,
            push_id=1,
            offset=0,
            count=1,
            codec=self.welcome.settings.push_codec,
            payload_digest=digest(payload),
            result_digest=0,
            stream=0,
            position=len(payload),
        )
        header = msgspec.structs.replace(honest, **fields)
        return [b"u", encode_header(header), payload]

    def send_data(self, frames: Frames) -> None:
        self.uplink.send_multipart(frames)

    def send_fragment(self, index: int, values: F32, **fields: object) -> None:
        """All chunks of a fragment, as FOUND or PUSH."""
        assert self.welcome is not None
        found = fields.get("kind") is msg.DataKind.FOUND
        name = STATE_CODEC if found else self.welcome.settings.push_codec
        for chunk in encoded(self.table[index], values, name):
            where = {"fragment": index, "offset": chunk.offset, "count": chunk.count}
            self.send_data(self.frames(chunk.payload, **{**where, "codec": name, **fields}))

    @property
    def table(self) -> tuple[Fragment, ...]:
        assert self.welcome is not None
        return build_table(LAYOUT, self.welcome.settings.fragment_count)

    def found(self) -> None:
        """Sends zeros as version 0 and adopts it."""
        for part in self.table:
            zeros = np.zeros(part.elements, np.float32)
            self.send_fragment(part.index, zeros, kind=msg.DataKind.FOUND, push_id=0)
        while self.receive(msg.Welcome).role is not msg.Role.ADOPT:
            pass
        for part in self.table:
            self.send(msg.Adopted(part.index, 0))
        # No round is opened before two Reports have shown how long a step takes.
        self._report(steps=2)
        self._report(steps=3)
        wait_until(lambda: len(self.status().rounds) == 2, "two open rounds")

    def _report(self, *received: int, steps: int = 3) -> None:
        self.send(msg.Report(steps, steps, 0.001, None, received, msg.TokenLedger(), 0.0))

    def heads(self) -> list[msg.FragmentHead]:
        """Version and digest of each fragment as the broker sends it, checked."""
        return [self._head(part.index) for part in self.table]

    def _head(self, fragment: int) -> msg.FragmentHead:
        self.send(msg.Fetch(fragment, -1))
        while True:
            header, payload = decode_data(_receive(self.downlink))
            self._report(header.position)
            if (header.kind, header.fragment) == (msg.DataKind.STATE, fragment):
                assert header.count == self.table[fragment].elements
                part = self.table[fragment]
                chunk = decode_chunk(part, header.codec, 0, header.count, payload)
                assert digest_of(values_of(part, [(0, chunk)])) == header.result_digest
                return msg.FragmentHead(header.version, header.result_digest)


class World:
    """A live broker with a well-behaved learner that holds version 0 and keeps its rounds open."""

    def __init__(self, service: Service, good: Peer) -> None:
        self.service, self.good = service, good
        self.before = good.heads()
        self._names = 0

    def peer(self) -> Peer:
        """Another one, under a name of its own."""
        self._names += 1
        return Peer(self.service.wires.address, f"mallory-{self._names}")

    def check_unharmed(self) -> None:
        """Checks that the good learner is served, the model is unchanged, and nothing is kept."""
        assert self.good.heads() == self.before
        status = self.good.status()
        assert status.phase is msg.Phase.RUNNING
        assert len(status.rounds) == 2
        assert status.contributions_merged == 0
        wait_until(lambda: self.service.jobs.held == 0, "the payloads to be dropped")


def encoded(
    part: Fragment, values: F32, name: str, chunk_elements: int = 1024
) -> list[EncodedChunk]:
    """The chunks of a fragment as an honest sender makes them."""
    chunks = encode_fragment(
        part, values, codec_name=name, rho=0.5, chunk_elements=chunk_elements,
        reconstructed=np.empty_like(values),
    )  # fmt: skip
    return list(chunks)


def sealed(body: bytes, protocol: int = PROTOCOL) -> bytes:
    """Any body in a valid envelope."""
    return b"NRW" + bytes([protocol]) + digest(body).to_bytes(8, "little") + body


def packed(**fields: Any) -> bytes:
    """A control frame of any fields."""
    return sealed(msgspec.msgpack.encode(fields))


def closes(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """Sends what must make the other side close the connection; returns once it has."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        socket.send_multipart(frames)
        assert monitor.poll(int(HANG_S * 1000)), "the connection stays open"
    finally:
        socket.disable_monitor()
        monitor.close()


def _receive(socket: zmq.Socket[bytes], deadline: float | None = None) -> list[bytes]:
    left_s = HANG_S if deadline is None else max(deadline - time.monotonic(), 0.0)
    assert socket.poll(int(left_s * 1000)), "no answer"
    return socket.recv_multipart()
