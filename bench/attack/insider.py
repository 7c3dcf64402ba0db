"""A hostile learner: it has a valid key, says what it likes, and keeps no rule."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Final

import msgspec
import zmq

from narrows.bench.attack.target import AttackTarget, Socket
from narrows.bench.loop.bench import layout_of
from narrows.proto import messages as msg
from narrows.proto.codec import codec_names
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.frames import decode_control, digest, encode_control, encode_header
from narrows.proto.layout import fingerprint
from narrows.proto.limits import PROTOCOL

ANSWER_S: Final = 20.0


class Insider:
    """One control connection, and the data connections that are asked for."""

    def __init__(self, target: AttackTarget) -> None:
        self.target = target
        self.context: zmq.Context[Socket] = zmq.Context()
        self.control = target.connect(self.context, zmq.DEALER, target.ports[0])
        self.incarnation = secrets.token_hex(16)
        self.welcome: msg.Welcome | None = None

    def hello(self, **fields: object) -> msg.Hello:
        """The Hello of an honest learner but for these fields."""
        honest = msg.Hello(
            protocol=PROTOCOL,
            name=self.target.name,
            incarnation=self.incarnation,
            run_id="",
            epoch=(0, 0, 0),
            epoch_proof="",
            fingerprint=fingerprint(layout_of(self.target.params), 0),
            codecs=codec_names(),
            step=0,
            tokens=0,
            versions=(),
        )
        return msgspec.structs.replace(honest, **fields)

    def join(self) -> msg.Welcome:
        """Says Hello until it is welcomed. Raises BrokerUnreachable."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.say(self.hello())
            while self.control.poll(1000):
                answer = decode_control(self.control.recv())
                if isinstance(answer, msg.Welcome):
                    self.welcome = answer
                    return answer
        raise BrokerUnreachable(f"{self.target.broker} does not welcome {self.target.name}")

    def say(self, message: msg.ControlMessage) -> bool:
        """Sends a control message; False if the broker takes no more."""
        return self.say_frame(encode_control(message))

    def say_frame(self, frame: bytes) -> bool:
        with suppress(zmq.Again):
            self.control.send(frame, zmq.NOBLOCK)
            return True
        time.sleep(0.001)
        return False

    def discard(self) -> int:
        """Throws away what the broker has sent; returns the number of messages."""
        count = 0
        with suppress(zmq.Again):
            while True:
                self.control.recv_multipart(zmq.NOBLOCK)
                count += 1
        return count

    def uplink(self) -> Socket:
        """A data connection to the broker."""
        return self.target.connect(self.context, zmq.PUB, self.target.uplink_port)

    def chunk(self, payload: bytes, **fields: object) -> list[bytes]:
        """Topic, header and payload of a data message; a push unless `fields` say otherwise."""
        welcome = self.welcome
        header = msg.Header(
            protocol=PROTOCOL,
            run_id=welcome.run_id if welcome else "",
            epoch=welcome.epoch if welcome else (0, 0, 0),
            kind=msg.DataKind.PUSH,
            learner=self.target.name,
            incarnation=self.incarnation,
            fragment=0,
            version=0,
            push_id=1,
            offset=0,
            count=1024,
            codec="int4-zstd",
            payload_digest=digest(payload),
            result_digest=0,
            stream=0,
            position=len(payload),
        )
        return [b"u", encode_header(msgspec.structs.replace(header, **fields)), payload]

    def report(self, **fields: object) -> msg.Report:
        """A Report but for these fields."""
        honest = msg.Report(1, 1, 0.05, None, (), msg.TokenLedger(), 0.0)
        return msgspec.structs.replace(honest, **fields)
