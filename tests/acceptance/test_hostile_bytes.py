"""Hostile bytes at all three ports: each is refused by name, and the honest learner trains on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import psutil
from acceptance import hostile
from acceptance.kit import Child, Site, wait_until
from acceptance.raw import Peer, fingerprint_of, framed, refusals, throw, throw_without_end

ELEMENTS = 48 * 49
MEMORY_BYTES_MAX = 200 << 20
"""One unfinished message at a port may take 64 MiB, and the allocator keeps some of it."""

LARGE = 80
"""Damaged payloads of 4 MB: more than MEMORY_BYTES_MAX, if they were kept."""

PORTS = ((b"DEALER", 60_000), (b"XPUB", 200_000), (b"XSUB", 400))
"""The sockets that talk with the broker's three ports, and bytes that a frame there may have."""


def check(refusal: dict[str, Any], case: str, code: str, *, why: bool = True) -> None:
    """Checks that a refusal has this code, and says what was refused and why."""
    assert refusal["code"] == code and refusal["message"], (case, refusal)
    assert refusal["expected"] + refusal["got"] + refusal["remedy"] or not why, (case, refusal)


def stand_still(member: Peer, learner: Child) -> int:
    """Freezes the learner while a round is open, and gives the round's base version."""
    while True:
        learner.freeze()
        before = member.status()
        for _ in range(2):
            member.hear("beat")
        now = member.status()
        if now["rounds"] and now["versions"] == before["versions"]:
            return int(now["versions"][0])
        learner.thaw()
        member.hear("beat")


def test_hostile_bytes_at_each_port_harm_nobody(site: Site) -> None:
    broker = site.broker(fragments=1, late="50s", lost="60s", beat="50ms")
    learner = site.learner("good")
    wait_until(lambda: len(site.merged()) >= 2, "merges", broker, learner)
    fingerprint, memory = fingerprint_of(site.layout()), psutil.Process(broker.pid)
    for offset, (kind, frame_bytes) in enumerate(PORTS):
        throw_without_end(site.ports.first + offset, kind, bytes(frame_bytes))
    bytes_before = memory.memory_info().rss  # One unfinished message may take 64 MiB.
    for offset, (kind, _) in enumerate(PORTS):
        port = site.ports.first + offset
        throw(port, list(hostile.NO_HANDSHAKES.values()))
        throw(port, list(hostile.NO_FRAMES.values()), kind)
        for parts in (1, 3, 30):
            throw(port, [framed(*[frame] * parts) for frame, _ in hostile.FRAMES.values()], kind)

    with Peer(site.address, "mallory", fingerprint) as member:
        for case, (frame, code) in hostile.FRAMES.items():
            member.control.send(frame)
            check(member.hear("refuse"), case, code)
        for case, (fields, code) in hostile.HELLOS.items():
            with Peer(site.address, "eve", fingerprint) as stranger:
                stranger.hello(**fields)
                check(stranger.hear("refuse"), case, code)
        member.join()
        for message in hostile.NONSENSE:
            member.tell(**message)
        version = stand_still(member, learner)
        for case, (fields, code) in hostile.announcements(ELEMENTS, version).items():
            member.announce(**{"base_version": version, "elements": ELEMENTS} | fields)
            check(member.hear("refuse"), case, code)
        for case, (fields, code) in hostile.chunks(ELEMENTS, version).items():
            member.chunk(b"bytes", **{"version": version} | fields)
            check(member.hear("refuse"), case, code)
        for case, (payload, code) in hostile.payloads(ELEMENTS).items():
            member.chunk(payload, version=version, count=ELEMENTS)
            check(member.hear("refuse"), case, code, why=False)
        expected = refusals(member) + Counter(code for _, code in hostile.UNTOLD.values())
        for fields, _ in hostile.UNTOLD.values():
            member.chunk(b"bytes", **{"version": version} | fields)
        wait_until(lambda: refusals(member) == expected, f"{expected} refusals", broker)
        for _ in range(LARGE):  # One by one: what waits to be read takes memory, too.
            expected["bad_checksum"] += 1
            member.chunk(bytes(4_000_000), payload_digest=7)
            wait_until(lambda: refusals(member) == expected, f"{expected} refusals", broker)
        learner.thaw()
        made = len(site.merged())
        wait_until(lambda: len(site.merged()) >= made + 4, "more merges", broker, learner)
        bytes_most = bytes_before + MEMORY_BYTES_MAX
        wait_until(lambda: memory.memory_info().rss < bytes_most, "memory to be freed", broker)
    site.check_equal_copies("good")
    assert {name for one in site.merged() for name in one["contributors"]} == {"good"}
    assert "Traceback" not in broker.log
