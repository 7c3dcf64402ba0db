"""Round trips of control messages: asks the broker for its status in a loop, and times the answers.

`python -m narrows.bench.kit.probe BROKER` prints seconds per answer, one line each, until it is
ended. It has its own connection, which stays open as a learner's does.
"""

from __future__ import annotations

import sys
import time
from typing import Final

import zmq

from narrows.proto import socket_options
from narrows.proto.frames import encode_control
from narrows.proto.messages import AskStatus

INTERVAL_S: Final = 0.25
"""Interval of the questions. Four small messages a second take 0.3% of a line of 10 Mbit/s."""

ANSWER_S: Final = 60.0
"""Longest wait for an answer; a later answer counts as one that took so long."""


def probe(broker: str) -> None:
    """Asks for ever. One question at a time, so that a slow answer is not asked for twice."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for name, value in socket_options.CONTROL.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(broker)
    question = encode_control(AskStatus())
    while True:
        asked_s = time.monotonic()
        socket.send(question)
        if socket.poll(int(ANSWER_S * 1000)):
            socket.recv()
        print(time.monotonic() - asked_s, flush=True)
        time.sleep(max(0.0, asked_s + INTERVAL_S - time.monotonic()))


if __name__ == "__main__":
    probe(sys.argv[1])
