"""Attackers with a valid key: floods, lies about others, lies about themselves."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Final

import zmq

from narrows.bench.attack.honest import keyed_client
from narrows.bench.attack.insider import Insider
from narrows.bench.attack.raw_curve import RawCurve
from narrows.bench.attack.target import AttackTarget, Socket
from narrows.proto import messages as msg
from narrows.proto.frames import downlink_topic, encode_control
from narrows.proto.keys import SiteKey
from narrows.proto.limits import FRAGMENTS_MAX, PUSH_TOKENS_MAX, TOKENS_MAX


class Breach(Exception):
    """An attacker could do what it should not."""


BATCH: Final = 50
"""Messages between two looks at the answers."""
PART_BYTES: Final = 1 << 20
CONTROL_PART_BYTES: Final = 60_000
LINGER_MS: Final = 2000


# Floods.


def status_flood(target: AttackTarget) -> Iterator[int]:
    """Asks for the status as fast as it can."""
    insider, question = Insider(target), encode_control(msg.AskStatus())
    while True:
        yield sum(insider.say_frame(question) for _ in range(BATCH))
        insider.discard()


def refused_pushes(target: AttackTarget) -> Iterator[int]:
    """Announces pushes to rounds that do not exist, and sends chunks that do not decode."""
    insider = Insider(target)
    insider.join()
    uplink = insider.uplink()
    for number in count(1):
        insider.say(msg.Push(number % 4, 1 << 40, 1, number, 1 << 16, 9, 3))
        junk = os.urandom(2000)
        with suppress(zmq.Again):
            uplink.send_multipart(insider.chunk(junk, push_id=number), zmq.NOBLOCK)
        insider.discard()
        yield 2


def founding_chunks(target: AttackTarget) -> Iterator[int]:
    """Sends version 0 to a run that is founded, in chunks of the largest size."""
    insider = Insider(target)
    insider.join()
    uplink, payload = insider.uplink(), os.urandom(PART_BYTES)
    fields = {"kind": msg.DataKind.FOUND, "push_id": 0, "codec": "raw32", "count": 1 << 18}
    frames = insider.chunk(payload, **fields)
    while True:
        with suppress(zmq.Again):
            uplink.send_multipart(frames, zmq.NOBLOCK)
            yield 1
        time.sleep(0.0005)
        insider.discard()


def fetches(target: AttackTarget) -> Iterator[int]:
    """Asks for whole states without end, and takes them."""
    insider = Insider(target)
    insider.join()
    topics = tuple(downlink_topic(target.name, insider.incarnation, n) for n in range(4))
    downlink = target.connect(insider.context, zmq.SUB, target.downlink_port, topics=topics)
    received = [0] * 4
    while True:
        yield sum(insider.say(msg.Fetch(n % 4, -1)) for n in range(BATCH))
        with suppress(zmq.Again):
            while True:
                topic, _, payload = downlink.recv_multipart(zmq.NOBLOCK)
                received[int(topic[-2:])] += len(payload)
        insider.say(insider.report(received=tuple(received)))
        insider.discard()


def subscriptions(target: AttackTarget) -> Iterator[int]:
    """Subscribes to topics of its own name, of others, and to nonsense, and takes them back."""
    insider = Insider(target)
    downlink = target.connect(insider.context, zmq.SUB, target.downlink_port)
    while True:
        for name in (target.name, target.victim, "x" * 40):
            topic = downlink_topic(name, secrets.token_hex(16), 0)
            downlink.setsockopt(zmq.SUBSCRIBE, topic)
        downlink.setsockopt(zmq.SUBSCRIBE, os.urandom(100))
        yield 4
        time.sleep(0.0001)


def heavy_control(target: AttackTarget) -> Iterator[int]:
    """Sends the largest control messages that are allowed, and larger ones."""
    insider = Insider(target)
    insider.join()
    versions = tuple(1 << 52 for _ in range(FRAGMENTS_MAX))
    heavy = encode_control(insider.hello(incarnation=secrets.token_hex(16), versions=versions))
    nested = encode_control(msg.Decline(0, 0, 1, "x" * 1000))
    while True:
        yield sum(insider.say_frame(heavy) + insider.say_frame(nested) for _ in range(10))
        insider.say_frame(os.urandom(CONTROL_PART_BYTES))
        insider.discard()


def endless_multipart(target: AttackTarget) -> Iterator[int]:
    """Sends messages that never end, on every port."""
    kinds = ("DEALER", "PUB", "SUB")
    while True:
        for kind, port in zip(kinds, target.ports, strict=True):
            with suppress(OSError):
                line = RawCurve(target, port, kind)
                part = bytes(CONTROL_PART_BYTES if kind == "DEALER" else 500)
                for _ in range(2000):
                    line.send(part, more=True)
                    yield 1
        time.sleep(0.01)


def many_parts(target: AttackTarget) -> Iterator[int]:
    """Finishes messages of a million empty parts, on every port."""
    insider = Insider(target)
    for number in count():
        kind, port = ((zmq.DEALER, 0), (zmq.PUB, 1), (zmq.XSUB, 2))[number % 3]
        line = target.connect(insider.context, kind, target.ports[port])
        if line.poll(2000, zmq.POLLOUT):
            for _ in range(1_000_000):
                line.send(b"", zmq.SNDMORE)
            line.send(b"")
            yield 1
        line.close(LINGER_MS)


def foreign_subscriptions(target: AttackTarget) -> Iterator[int]:
    """Sends messages of a subscriber between its subscriptions, to get those of others."""
    insider = Insider(target)
    lines = [target.connect(insider.context, zmq.XSUB, target.downlink_port) for _ in range(4)]
    for number in count(1):
        with suppress(zmq.Again):
            lines[number % 2].send_multipart([b"x"] * 1200, zmq.NOBLOCK)
        for line in lines[2:]:
            topic = downlink_topic(target.name, secrets.token_hex(16), 0)
            with suppress(zmq.Again):
                line.send(b"\x01" + topic, zmq.NOBLOCK)
            while line.poll(0):
                frames = line.recv_multipart()
                if not frames[0].startswith(target.name.encode() + b"/"):
                    raise Breach(f"the insider reads what is sent to another: {frames[0]!r}")
        yield 3
        if number % 100 == 0:  # Each line may send a bounded number of subscriptions.
            lines.pop(number // 100 % 4).close(0)
            lines.append(target.connect(insider.context, zmq.XSUB, target.downlink_port))
        time.sleep(0.001)


def joins(target: AttackTarget) -> Iterator[int]:
    """Joins under a new incarnation and leaves, without end."""
    insider = Insider(target)
    while True:
        insider.say(insider.hello(incarnation=secrets.token_hex(16)))
        insider.say(msg.Bye("for a moment"))
        insider.discard()
        yield 1


def connections(target: AttackTarget) -> Iterator[int]:
    """Opens sockets with its valid key, as many as the broker lets it have."""
    insider = Insider(target)
    insider.context.set(zmq.MAX_SOCKETS, 5000)
    held = list[Socket]()
    while True:
        if len(held) < 1000:
            port = target.ports[len(held) % 3]
            kind = (zmq.DEALER, zmq.PUB, zmq.SUB)[len(held) % 3]
            held.append(target.connect(insider.context, kind, port))
            yield 1
        time.sleep(0.005)


# Lies about others.


def names(target: AttackTarget) -> Iterator[int]:
    """Speaks under the victim's name on control and on the uplink, and listens to its topics."""
    insider = Insider(target)
    insider.join()
    uplink = insider.uplink()
    downlink = target.connect(insider.context, zmq.SUB, target.downlink_port)
    for prefix in (b"", target.victim.encode(), target.victim.encode() + b"/"):
        downlink.setsockopt(zmq.SUBSCRIBE, prefix)
    while True:
        insider.say(insider.hello(name=target.victim, incarnation=secrets.token_hex(16)))
        with suppress(zmq.Again):
            uplink.send_multipart(insider.chunk(b"x" * 100, learner=target.victim), zmq.NOBLOCK)
        insider.discard()
        if downlink.poll(5):
            frames = downlink.recv_multipart()
            raise Breach(f"the insider reads what is sent to its victim: {frames[0]!r}")
        yield 3


def epochs(target: AttackTarget) -> Iterator[int]:
    """Claims to have followed a broker of a higher term, with forged proofs."""
    insider = Insider(target)
    welcome = insider.join()
    term, life, nonce = welcome.epoch
    for number in count(1):
        epoch = (term + number, life, nonce)
        proof = welcome.epoch_proof if number % 2 else secrets.token_hex(32)
        insider.say(
            insider.hello(
                run_id=welcome.run_id,
                epoch=epoch,
                epoch_proof=proof,
                incarnation=secrets.token_hex(16),
            )
        )
        insider.discard()
        time.sleep(0.01)
        yield 1


# Lies about itself.


def wild_reports(target: AttackTarget) -> Iterator[int]:
    """Reports tokens, steps, step times and rates beyond all bounds."""
    insider = Insider(target)
    insider.join()
    times = (0.0, 1e-9, 1e9)
    for number in count():
        insider.say(
            insider.report(
                step=TOKENS_MAX,
                tokens=TOKENS_MAX - number % 2,
                step_s=times[number % 3],
                up_bits_per_s=1e18,
            )
        )
        insider.discard()
        time.sleep(0.05)
        yield 1


def wild_pushes(target: AttackTarget) -> Iterator[int]:
    """Trains like an honest learner, and declares the most tokens that a push can carry."""
    key = SiteKey(target.name, target.pair, target.broker, (target.server,))
    learner = keyed_client(key, target.params)
    learner.start()
    while True:
        time.sleep(0.05)
        learner.boundary(PUSH_TOKENS_MAX // 16, 1.0)
        yield 1


def silent_member(target: AttackTarget) -> Iterator[int]:
    """Joins, reports that it lives, never adopts, never pushes, never leaves."""
    insider = Insider(target)
    insider.join()
    for number in count():
        insider.say(insider.report(step=number, tokens=number))
        insider.discard()
        time.sleep(0.25)
        yield 1
