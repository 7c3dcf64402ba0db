"""Thousands of connections, half of them cut in mid-transfer: `python connections.py COUNT NAMES`.

Every second one is a learner that says Hello under one of NAMES names (20), subscribes and is gone;
the others speak ZMTP by hand, send half of a message to the uplink and reset the connection. What a
broker holds must not grow with their number, nor with that of the names beyond the thousand that it
remembers: file descriptors, resident memory.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from running import wait_until

from narrows.proto import messages as msg
from narrows.proto.codec.codecs import codec_names
from narrows.proto.frames import decode_control, downlink_topic, encode_control
from narrows.proto.layout import fingerprint, split_layout
from narrows.proto.limits import PROTOCOL

NAMES = 20
STREAMS = 4
SLACK = 4
"""Descriptors beyond the first count that do not mean a leak."""
HANG_S = 120.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"XPUB"
LAYOUT = (msg.LayoutEntry("weight", (64, 64), "float32", "rda"),)


@dataclass
class Sample:
    """Resources that the broker held after so many connections."""

    connections: int
    descriptors: int
    resident_bytes: int
    seconds: float
    """Seconds since the start."""


@dataclass
class Result:
    samples: list[Sample] = field(default_factory=list[Sample])
    seconds: float = 0.0
    exit_code: int = -1

    @property
    def descriptors_grown(self) -> int:
        return self.samples[-1].descriptors - self.samples[0].descriptors

    @property
    def bytes_per_connection(self) -> float:
        """Growth of the second half: by then every cache is as large as it gets."""
        middle, last = self.samples[len(self.samples) // 2], self.samples[-1]
        return (last.resident_bytes - middle.resident_bytes) / (
            last.connections - middle.connections
        )


def run(count: int, folder: Path, *, samples: int = 10, names: int = NAMES) -> Result:
    """Connects `count` times to a broker in `folder`."""
    ready, result = folder / "ready", Result()
    log = (folder / "broker.log").open("w")
    broker = subprocess.Popen(
        [sys.executable, "-m", "narrows", "broker", "--listen", "tcp://127.0.0.1:0",
         "--state-dir", str(folder / "state"), "--ready-file", str(ready)],
        stdout=log, stderr=log,
    )  # fmt: skip
    started = time.monotonic()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    try:
        _wait_for(ready, broker)
        address = ready.read_text().strip()
        welcome = _member(context, address, "site-0")
        idle = _descriptors(broker.pid)
        for number in range(1, count + 1):
            if number % 2:
                welcome = _member(context, address, f"site-{number // 2 % names}", welcome)
            else:
                _cut_short("127.0.0.1", welcome.uplink_port)
            if number % (count // samples) == 0:
                seconds = time.monotonic() - started
                # What was just closed may not have been noticed yet; what leaks stays.
                wait_until(lambda: _descriptors(broker.pid) <= idle + SLACK, "the connections' end")
                result.samples.append(_sample(number, broker.pid, seconds))
    finally:
        context.destroy()
        broker.terminate()
        result.exit_code = broker.wait(HANG_S)
        log.close()
    result.seconds = time.monotonic() - started
    return result


def _wait_for(ready: Path, broker: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: ready.exists() or broker.poll() is not None, "the broker to serve")
    assert ready.exists(), "the broker does not start"


def _member(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    name: str,
    known: msg.Welcome | None = None,
) -> msg.Welcome:
    """Joins as a new process of one of the names, subscribes, and vanishes without a Bye."""
    incarnation = secrets.token_hex(16)
    hello = msg.Hello(
        PROTOCOL, name, incarnation, "", (0, 0, 0), fingerprint(LAYOUT, 0), codec_names(), 0, 0, (),
    )  # fmt: skip
    with context.socket(zmq.DEALER) as control, context.socket(zmq.SUB) as downlink:
        if known is not None:
            downlink.connect(address.rsplit(":", 1)[0] + f":{known.downlink_port}")
            for stream in range(STREAMS):
                downlink.setsockopt(zmq.SUBSCRIBE, downlink_topic(name, incarnation, stream))
        control.connect(address)
        control.send(encode_control(hello))
        while control.poll(1000 * int(HANG_S)):
            message = decode_control(control.recv())
            if isinstance(message, msg.AskLayout):
                control.send(encode_control(split_layout(LAYOUT, 0)[message.first]))
            if isinstance(message, msg.Welcome):
                return message
            assert not isinstance(message, msg.Refuse), message
    raise AssertionError("no Welcome")


def _cut_short(host: str, port: int) -> None:
    """Sends half of a data message, then a reset."""
    with socket.create_connection((host, port), timeout=HANG_S) as connection:
        connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        received = b""
        while len(received) < 64 + 10:
            piece = connection.recv(4096)
            assert piece, "the broker has hung up"
            received += piece
        payload = b"\x02" + struct.pack(">Q", 100_000) + bytes(50_000)
        connection.sendall(b"\x01\x01u" + b"\x01\xc8" + bytes(200) + payload)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _sample(connections: int, pid: int, seconds: float) -> Sample:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(connections, _descriptors(pid), pages * os.sysconf("SC_PAGE_SIZE"), seconds)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        counts = [int(argument) for argument in sys.argv[1:]]
        outcome = run(
            counts[0] if counts else 10_000, Path(where), names=[*counts, NAMES, NAMES][1]
        )
    for sample in outcome.samples:
        print(f"{sample.connections:6}  {sample.descriptors:4} descriptors"
              f"  {sample.resident_bytes / 2**20:7.1f} MiB  {sample.seconds:6.1f} s")  # fmt: skip
    print(f"{outcome.seconds:.0f} s; {outcome.descriptors_grown:+} descriptors,"
          f" {outcome.bytes_per_connection:+.0f} bytes per connection in the second half;"
          f" the broker ended with {outcome.exit_code}")  # fmt: skip
