"""Hostile bytes at all three ports: each is refused by name, and the honest learner trains on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import psutil
import zmq
from acceptance import hostile
from acceptance.kit import Site, wait_until
from acceptance.raw import Peer, fingerprint_of, framed, refusals, throw, throw_without_end

ELEMENTS = 48 * 49
MEMORY_BYTES_MAX = 200 << 20
"""One unfinished message at a port may take 64 MiB here, and the allocator keeps some of it."""

UNFINISHED_BYTES = 64 << 20

LARGE = 80
"""Damaged payloads of 4 MB: more than MEMORY_BYTES_MAX, if they were kept."""

PORTS = ((b"DEALER", 60_000), (b"XPUB", 200_000), (b"XSUB", 400))
"""The sockets that talk with the broker's three ports, and bytes that a frame there may have."""


def check(refusal: dict[str, Any], case: str, code: str) -> None:
    """Checks that a refusal has this code, and says what was refused and why."""
    assert refusal["code"] == code and refusal["message"], (case, refusal)
    assert refusal["expected"] and refusal["got"], (case, refusal)


def test_hostile_bytes_at_each_port_harm_nobody(site: Site) -> None:
    broker = site.broker(fragments=1)
    learner = site.learner("good")
    wait_until(lambda: len(site.merged()) >= 2, "merges", broker, learner)
    fingerprint, memory = fingerprint_of(site.layout()), psutil.Process(broker.pid)
    for offset, (kind, frame_bytes) in enumerate(PORTS):
        throw_without_end(site.ports.first + offset, kind, bytes(frame_bytes), UNFINISHED_BYTES)
    bytes_before = memory.memory_info().rss
    for offset, (kind, _) in enumerate(PORTS):
        port = site.ports.first + offset
        throw(port, list(hostile.NO_HANDSHAKES.values()))
        throw(port, list(hostile.NO_FRAMES.values()), kind)
        for repeat in (1, 3, 30):
            frames = [framed(*parts * repeat) for parts, _ in hostile.FRAMES.values()]
            throw(port, frames, kind)

    with Peer(site.address, "mallory", fingerprint) as member:
        for case, (frames, code) in hostile.FRAMES.items():
            member.control.send_multipart(frames)
            check(member.hear("refuse"), case, code)
        for case, (fields, code) in hostile.HELLOS.items():
            with Peer(site.address, "eve", fingerprint) as stranger:
                stranger.hello(**fields)
                check(stranger.hear("refuse"), case, code)
        for message in (*hostile.NONSENSE, {"type": "push", "fragment": 0}):
            member.tell(**message)
        member.join()
        for message in hostile.NONSENSE:
            member.tell(**message)
        for message in hostile.FROM_A_BROKER:
            member.tell(**message)
            check(member.hear("refuse"), str(message), "bad_message")
        version = site.merged()[-1]["version"]
        for case, message in hostile.requests(version).items():
            member.tell(**message)
            check(member.hear("refuse"), case, "bad_message")
        for case, (fields, code) in hostile.announcements(version).items():
            member.announce(**fields)
            check(member.hear("refuse"), case, code)
        for case, (fields, code) in hostile.CHUNKS.items():
            member.chunk(b"bytes", **fields)
            check(member.hear("refuse"), case, code)
        for case, (payload, code) in hostile.payloads(ELEMENTS).items():
            member.chunk(payload)
            check(member.hear("refuse"), case, code)

        before = refusals(site, "data from")
        expected = Counter(code for _, code in hostile.UNTOLD.values())
        for fields in (*hostile.SILENT.values(), *(one for one, _ in hostile.UNTOLD.values())):
            member.chunk(b"bytes", **fields)
        for parts in ([b"u/00"], [b""] * 2, [b"u/00", b"\xc1", b""], [b"u/00"] * 1000):
            member.uplink.send_multipart(parts)
            expected["bad_message"] += 1
        wait_until(lambda: refusals(site, "data from") - before == expected, str(expected), broker)
        for _ in range(LARGE):  # One by one: what waits to be read takes memory, too.
            member.chunk(bytes(4_000_000))
            assert member.hear("refuse")["code"] == "too_large"

        listener = member.dial(zmq.XSUB, 2)
        for text in (b"\1", b"\0", b"\0p/00", b"\2", b"p/00", b"\1" + b"x" * 500):
            listener.send(text)
        made = len(site.merged())
        wait_until(lambda: len(site.merged()) >= made + 4, "more merges", broker, learner)
        bytes_most = bytes_before + MEMORY_BYTES_MAX
        wait_until(lambda: memory.memory_info().rss < bytes_most, "memory to be freed", broker)
    site.check_equal_copies("good")
    assert {name for one in site.merged() for name in one["contributors"]} == {"good"}
    assert "Traceback" not in broker.log
