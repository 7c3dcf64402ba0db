"""Hostile bytes at all three ports: each is refused by name, and the honest learner trains on.

The unit tests and the simulator know every wrong field, payload and value; here is one of each
kind, as it comes off the wire.
"""

import math
import random
import time
from collections import Counter
from typing import Any, Final

import pytest
import zmq
import zstandard
from acceptance.kit import Site, resident_bytes
from acceptance.peer import (
    ENVELOPE,
    Peer,
    fingerprint_of,
    framed,
    greeting,
    handshake,
    packed,
    refusals,
    throw,
)

from narrows.bench.kit.processes import wait_until

ELEMENTS: Final = 48 * 49
MEMORY_BYTES_MAX: Final = 200 << 20
"""One unfinished message at a port may take 64 MiB here, and the allocator keeps some of it."""
UNFINISHED_BYTES: Final = 64 << 20
LARGE: Final = 80
"""Damaged payloads of 4 MB: more than MEMORY_BYTES_MAX, if they were kept."""

PORTS: Final = ((b"DEALER", 60_000), (b"XPUB", 200_000), (b"XSUB", 400))
"""The sockets that talk with the broker's three ports, and bytes that a frame there may have."""

ASK_STATUS: Final = {"type": "askstatus"}
ASK: Final = packed(**ASK_STATUS)
RANDOM: Final = random.Random(1).randbytes(5000)

NO_HANDSHAKES: Final = [
    RANDOM,
    b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n" * 20,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + RANDOM,  # TLS
    b"\x01\x00" + RANDOM,  # ZMTP 1
    greeting(major=9) + RANDOM,
    greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + RANDOM[:192],
    handshake(b"REP"),
    greeting() + b"\x04\x0a\x05READY\x0bSoc",
    greeting() + b"\x04\x13\x05READY\x04Type" + b"\xff" * 8,  # A property of 4 GiB.
    greeting() + b"\x06" + (1 << 63).to_bytes(8, "big") + RANDOM,
]
"""Bytes that a TCP connection may bring instead of a ZMTP handshake."""

NO_FRAMES: Final = [
    b"\x02" + (1 << 63).to_bytes(8, "big") + RANDOM,
    b"\xf8\x10" + RANDOM,  # Reserved flags.
    b"\x01\x04part" * 50,  # The last part never comes.
    b"\x00\xff" + RANDOM[:100],  # The rest of the frame never comes.
    b"\x04\x08\x07UNKNOWN",
    RANDOM,
]
"""Bytes that may follow the handshake instead of ZMTP frames."""

FRAMES: Final[dict[str, tuple[list[bytes], str]]] = {
    "garbage": ([RANDOM[:400]], "bad_message"),
    "one empty frame": ([b""], "bad_message"),
    "other protocol": ([b"NRW\2", ASK], "protocol_version"),
    "a thousand frames": ([ENVELOPE, *[b""] * 999], "bad_message"),
    "nested 60,000 deep": ([ENVELOPE, b"\x91" * 60_000], "bad_message"),
    "unknown type": ([ENVELOPE, packed(type="exec", command="true")], "bad_message"),
    "beyond the bound": ([ENVELOPE, bytes(140_000)], "too_large"),
}
"""Frames that are no message to a broker, with the code that answers them on the control port."""

HELLOS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "path for a name": ({"name": "../../etc/passwd"}, "bad_message"),
    "incarnation of another": ({"incarnation": "good.00000001"}, "bad_name"),
    "other layout": ({"fingerprint": "0" * 32}, "layout_differs"),
    "5,000 fragments": ({"copies": [[0, 0]] * 5000}, "bad_message"),
}

NONSENSE: Final[list[dict[str, Any]]] = [
    {"type": "report", "steps": 1 << 62, "tokens": 1 << 62, "loss": -math.inf, "bases": [1 << 53]},
    {"type": "report", "steps": 0, "tokens": 1 << 62, "loss": math.nan, "bases": [0],
     "paused": "\x1b[2J", "finished": [4095] * 4096},
]  # fmt: skip
"""Messages in good form that say nothing sensible; they are not answered."""

STATE: Final = {"type": "fetch", "kind": 3, "fragment": 0, "version": 0, "push_id": 0}
REQUESTS: Final[list[dict[str, Any]]] = [
    STATE | {"chunks": [[0, 1]], "fragment": 4095},
    STATE | {"chunks": [[0, 1]], "kind": 0},
    STATE | {"chunks": [[0, 1 << 48]]},
    STATE | {"chunks": [[0, 1]] * 257},
    {"type": "status", "status": {"learners": {}}},
]
"""Wrong requests of a run of one fragment in one chunk, and what only a broker sends; each is
refused."""

PUSHES: Final[list[dict[str, Any]]] = [
    {"fragment": 1}, {"base": 1 << 40}, {"tokens": 1 << 60}, {"steps": 0}, {"push_id": 0},
]  # fmt: skip
"""Wrong announcements of a push of fragment 0, the only one; each is refused."""

CHUNKS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "fragment one past": ({"fragment": 1}, "bad_message"),
    "chunk one past": ({"chunk": 1}, "bad_chunk"),
    "far beyond": ({"chunk": 1 << 48}, "bad_chunk"),
    "codec not agreed": ({"codec": "f32-blosc2"}, "bad_chunk"),
}
"""Wrong headers of a chunk of that fragment; its push is refused on control."""

UNTOLD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"learner": "nobody"}, "bad_message"),
    ({"kind": 2}, "bad_message"),
    ({"contributors": [["good.00000001", 1]] * 2000}, "bad_message"),
    ({"kind": 1}, "bad_chunk"),
    ({"kind": 4}, "bad_chunk"),
    ({"payload_digest": 7}, "bad_digest"),
]
"""Headers that name no push which could be refused, and a chunk that is damaged on its way: they
are dropped and noted."""

SILENT: Final[list[dict[str, Any]]] = [
    {"epoch": "1-00000000"},
    {"learner": "mallory.00000000"},
    {"kind": 1, "codec": "f32-blosc2"},
    {"kind": 4, "codec": "f32-blosc2"},
]
"""Headers of what an honest learner may have on its way when a life ends: they are dropped."""


def payloads(elements: int) -> dict[str, tuple[bytes, str]]:
    """Wrong payloads (int4-zstd) of all elements of that fragment, which has two pieces."""
    scales = b"\x80\x3e" * 2
    right = zstandard.compress(bytes(-(-elements // 2)), 1)
    return {
        "cut": (scales + right[:-1], "bad_payload"),
        "much longer": (scales + right + bytes(4096), "too_large"),
        "NaN scale": (b"\xc0\x7f" + scales[2:] + right, "not_finite"),
        "zstd bomb": (
            scales + b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(9),
            "bad_payload",
        ),
    }


@pytest.mark.timeout(90)
def test_hostile_bytes_at_each_port_are_refused_by_name(site: Site) -> None:
    broker = site.broker("fragments.count=1")
    site.learner("good")
    site.contribute("good", count=2)

    for offset, (kind, frame_bytes) in enumerate(PORTS):
        part = framed(bytes(frame_bytes), b"")[: 9 + frame_bytes]  # Another one follows.
        throw(site.port + offset, [part * (UNFINISHED_BYTES // len(part))], kind)
    memory_bytes_max = resident_bytes(broker) + MEMORY_BYTES_MAX
    for offset, (kind, _) in enumerate(PORTS):
        port = site.port + offset
        throw(port, NO_HANDSHAKES)
        throw(port, NO_FRAMES, kind)
        for repeat in (1, 3, 30):
            throw(port, [framed(*each * repeat) for each, _ in FRAMES.values()], kind)
    wait_until(lambda: refusals(site)["bad_message"] > 20, "what was read of it", broker)

    fingerprint = fingerprint_of(site)
    for number, (case, (fields, code)) in enumerate(HELLOS.items()):
        with Peer(site, f"stranger-{number}", fingerprint) as stranger:
            stranger.hello(**fields)
            stranger.is_refused(code, case)
    with Peer(site, "mallory", fingerprint) as member:
        for case, (frames, code) in FRAMES.items():
            member.control.send_multipart(frames)
            member.is_refused(code, case)
        for message in (*NONSENSE, {"type": "push", "fragment": 0}):
            member.tell(**message)
        member.join()
        for message in NONSENSE:
            member.tell(**message)
        for message in REQUESTS:
            member.tell(**message)
            member.is_refused("bad_message", message)
        for fields in PUSHES:
            member.announce(**fields)
            member.is_refused("bad_message", fields)
        for case, (fields, code) in CHUNKS.items():
            member.chunk(b"bytes", **fields)
            member.is_refused(code, case)
        for case, (payload, code) in payloads(ELEMENTS).items():
            member.chunk(payload)
            member.is_refused(code, case)

        before = refusals(site, "data from")
        expected = Counter(code for _, code in UNTOLD)
        for fields in (*SILENT, *(one for one, _ in UNTOLD)):
            member.chunk(b"bytes", **fields)
        for parts in ([b"u/00"], [b""] * 2, [b"u/00", b"\xc1", b""], [b"u/00"] * 1000):
            member.uplink.send_multipart(parts)
            expected["bad_message"] += 1
        wait_until(lambda: refusals(site, "data from") - before == expected, str(expected), broker)
        for _ in range(LARGE):  # One by one: what waits to be read takes memory, too.
            member.chunk(bytes(4_000_000))
            member.is_refused("too_large")

        listener = member.dial(zmq.XSUB, 2)
        for text in (b"\1", b"\1\xff", b"\0", b"\0p/00", b"\2", b"p/00", b"\1" + b"x" * 500):
            listener.send(text)
        site.contribute("good", count=4)
    site.check_copies("good")
    assert site.contributors() == {"good"}
    assert "Traceback" not in broker.log
    wait_until(lambda: resident_bytes(broker) < memory_bytes_max, "memory to be freed", broker)


FRAMES_PER_PEER: Final = 200

HONEST: Final[list[dict[str, Any]]] = [
    {"type": "report", "steps": 1, "tokens": 1, "loss": 1.0, "bases": [0]},
    {"type": "push", "fragment": 0, "push_id": 1, "base": 0, "tokens": 5, "steps": 5},
    STATE | {"chunks": [[0, 1]]},
    ASK_STATUS,
]
"""Messages of which one field is altered, or that are cut."""

FIELDS: Final = (
    "epoch", "kind", "learner", "fragment", "version", "push_id", "chunk", "codec",
    "payload_digest", "contributors",
)  # fmt: skip
"""Those of a header."""


def anything(rng: random.Random) -> Any:
    """A value of any type, wild or likely."""
    inner = rng.choice([None, True, -1, 0, 3, 1 << 63, 0.5, math.nan, "", "good", RANDOM[:40]])
    return rng.choice([inner, inner, [inner] * rng.randrange(9), {"good": inner}])


def test_random_frames_harm_nobody(site: Site, pytestconfig: pytest.Config) -> None:
    broker = site.broker("fragments.count=1")
    site.learner("good")
    site.contribute("good", count=2)
    rng = random.Random(3)
    fingerprint = fingerprint_of(site)
    memory_bytes: list[int] = []
    ends_at = time.monotonic() + 60 * float(pytestconfig.getoption("--minutes"))
    while time.monotonic() < ends_at or len(memory_bytes) < 2:
        with Peer(site, f"mallory-{len(memory_bytes)}", fingerprint) as mallory:
            mallory.join()
            listener = mallory.dial(zmq.XSUB, 2)
            for _ in range(FRAMES_PER_PEER):
                honest = rng.choice(HONEST)
                altered = packed(**honest | {rng.choice([*honest, "more"]): anything(rng)})
                cut = [ENVELOPE, altered[: rng.randrange(len(altered))]]
                noise = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randint(1, 4))]
                mallory.control.send_multipart(rng.choice([[ENVELOPE, altered], cut, noise]))
                payload = rng.randbytes(rng.randrange(3000))
                header = mallory.header(payload, **{rng.choice(FIELDS): anything(rng)})
                mallory.uplink.send_multipart([b"u/00", rng.choice([header, noise[0]]), payload])
                # A subscription that begins a topic would have all that are published sent to it.
                listener.send(rng.choice([b"", b"\0", b"\0p/00", b"\2", b"p/00", b"\0" + noise[0]]))
            mallory.tell(**ASK_STATUS)
            mallory.hear("status")  # All before it was read.
        memory_bytes.append(resident_bytes(broker))
    site.contribute("good", count=4)
    site.check_copies("good")
    print(f"{FRAMES_PER_PEER * len(memory_bytes)} random messages at each port")
    assert refusals(site)["bad_message"] > FRAMES_PER_PEER / 2
    assert "Traceback" not in broker.log
    assert max(memory_bytes) < memory_bytes[0] + MEMORY_BYTES_MAX
