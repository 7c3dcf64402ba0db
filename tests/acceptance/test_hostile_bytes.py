"""Hostile bytes at all three ports: each is refused by name, and the honest learner trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import zmq
from acceptance import hostile
from acceptance.kit import Child, Site, wait_until
from acceptance.peer import (
    ENVELOPE,
    Peer,
    fingerprint_of,
    framed,
    packed,
    refusals,
    throw,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ELEMENTS: Final = 48 * 49
MEMORY_BYTES_MAX: Final = 200 << 20
"""One unfinished message at a port may take 64 MiB here, and the allocator keeps some of it."""
UNFINISHED_BYTES: Final = 64 << 20
GROWTH_BYTES_MAX: Final = 96 << 20
"""The same for small frames, however many."""

FRAMES_PER_NAME: Final = 40

LARGE: Final = 80
"""Damaged payloads of 4 MB: more than MEMORY_BYTES_MAX, if they were kept."""

PORTS: Final = ((b"DEALER", 60_000), (b"XPUB", 200_000), (b"XSUB", 400))
"""The sockets that talk with the broker's three ports, and bytes that a frame there may have."""


@dataclass
class Siege:
    """A broker with an honest learner, and Mallory, who is known under many names."""

    site: Site
    broker: Child
    fingerprint: str
    guests: ExitStack = field(default_factory=ExitStack)
    peer: Peer = field(init=False)
    listener: zmq.Socket[bytes] = field(init=False)
    names: int = 0
    sent: int = 0
    bytes_most: int = 0
    """Memory that the broker may take at the end."""

    def mallory(self) -> Peer:
        """Mallory under a new name; the old one leaves."""
        self.guests.close()
        self.names += 1
        peer = Peer(self.site, f"mallory-{self.names % 700}", self.fingerprint)
        self.peer = self.guests.enter_context(peer)
        return peer

    @property
    def rss_bytes(self) -> int:
        return int(self.broker.ps.memory_info().rss)


@pytest.fixture
def siege(site: Site) -> Generator[Siege]:
    broker = site.broker("fragments.count=1")
    site.learner("good")
    site.contribute("good", count=2)
    siege = Siege(site, broker, fingerprint_of(site))
    yield siege
    siege.guests.close()
    site.contribute("good", count=4)
    site.check_copies("good")
    assert {name for one in site.merged() for name in one["contributors"]} == {"good"}
    assert "Traceback" not in broker.log
    wait_until(lambda: siege.rss_bytes < siege.bytes_most, "memory to be freed", broker)


def test_hostile_bytes_at_each_port_are_refused_by_name(siege: Siege) -> None:
    site = siege.site
    for offset, (kind, frame_bytes) in enumerate(PORTS):
        part = framed(bytes(frame_bytes), b"")[: 9 + frame_bytes]  # Another one follows.
        throw(site.ports.first + offset, [part * (UNFINISHED_BYTES // len(part))], kind)
    siege.bytes_most = siege.rss_bytes + MEMORY_BYTES_MAX
    for offset, (kind, _) in enumerate(PORTS):
        port = site.ports.first + offset
        throw(port, hostile.NO_HANDSHAKES)
        throw(port, hostile.NO_FRAMES, kind)
        for repeat in (1, 3, 30):
            throw(port, [framed(*each * repeat) for each, _ in hostile.FRAMES.values()], kind)
    wait_until(lambda: refusals(site)["bad_message"] > 20, "what was read of it", siege.broker)

    for case, (fields, code) in hostile.HELLOS.items():
        stranger = siege.mallory()
        stranger.hello(**fields)
        stranger.is_refused(code, case)
    member = siege.mallory()
    for case, (frames, code) in hostile.FRAMES.items():
        member.control.send_multipart(frames)
        member.is_refused(code, case)
    for message in (*hostile.NONSENSE, {"type": "push", "fragment": 0}):
        member.tell(**message)
    member.join()
    for message in hostile.NONSENSE:
        member.tell(**message)
    for message in hostile.FROM_A_BROKER:
        member.tell(**message)
        member.is_refused("bad_message", message)
    for message in hostile.REQUESTS:
        member.tell(**message)
        member.is_refused("bad_message", message)
    for fields in hostile.PUSHES:
        member.announce(**fields)
        member.is_refused("bad_message", fields)
    for case, (fields, code) in hostile.CHUNKS.items():
        member.chunk(b"bytes", **fields)
        member.is_refused(code, case)
    for case, (payload, code) in hostile.payloads(ELEMENTS).items():
        member.chunk(payload)
        member.is_refused(code, case)

    before = refusals(site, "data from")
    expected = Counter(code for _, code in hostile.UNTOLD)
    for fields in (*hostile.SILENT, *(one for one, _ in hostile.UNTOLD)):
        member.chunk(b"bytes", **fields)
    for parts in ([b"u/00"], [b""] * 2, [b"u/00", b"\xc1", b""], [b"u/00"] * 1000):
        member.uplink.send_multipart(parts)
        expected["bad_message"] += 1
    wait_until(
        lambda: refusals(site, "data from") - before == expected, str(expected), siege.broker
    )
    for _ in range(LARGE):  # One by one: what waits to be read takes memory, too.
        member.chunk(bytes(4_000_000))
        member.is_refused("too_large")

    listener = member.dial(zmq.XSUB, 2)
    for text in (b"\1", b"\0", b"\0p/00", b"\2", b"p/00", b"\1" + b"x" * 500):
        listener.send(text)


def _packs(value: Any) -> bool:
    try:
        packed(x=value)
    except (ValueError, OverflowError):
        return False
    return True


numbers = st.integers(-(1 << 63), (1 << 64) - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=40)
    | st.binary(max_size=40) | st.sampled_from(["good", "mallory", "decoupled", "f32-blosc2"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
).filter(_packs)  # fmt: skip
headers = st.fixed_dictionaries(
    {},
    optional={
        "epoch": values, "kind": st.integers(-1, 6), "fragment": st.integers(0, 3),
        "version": numbers, "push_id": numbers, "chunk": st.integers(0, 3) | numbers,
        "codec": st.sampled_from(["int4-zstd", "int8-zstd", "f32-blosc2", "x"]),
        "payload_digest": numbers, "learner": values, "contributors": values,
    },
)  # fmt: skip
HONEST: Final[list[dict[str, Any]]] = [
    {"type": "report", "steps": 1, "tokens": 1, "loss": 1.0, "held": [0]},
    {"type": "push", "fragment": 0, "push_id": 1, "base": 0, "tokens": 5, "steps": 5},
    {"type": "fetch", "kind": 3, "fragment": 0, "version": 1, "push_id": 0, "chunks": [[0, 1]]},
    {"type": "askstatus"},
    {"type": "bye", "reason": "x"},
]


@st.composite
def controls(draw: st.DrawFn) -> list[bytes]:
    """An honest message with one field changed or its end cut off, or frames of any kind."""
    message = dict(draw(st.sampled_from(HONEST)))
    key = draw(st.sampled_from([*message, "more"]))
    body = packed(**message | {key: draw(values)})
    cut = body[: draw(st.integers(0, len(body)))]
    any_frames = st.lists(st.binary(max_size=200), min_size=1, max_size=4)
    return draw(st.sampled_from([[ENVELOPE, body], [ENVELOPE, cut]]) | any_frames)


@settings(
    max_examples=10 * settings().max_examples, phases=[Phase.generate], database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(
    controls(), headers, st.binary(max_size=3000),
    st.sampled_from([b"\0p/00", b"\1p/01", b"\0", b"\2", b"p/00", b""]) | st.binary(max_size=200),
)  # fmt: skip
def test_random_frames_harm_nobody(
    siege: Siege, control: list[bytes], fields: dict[str, Any], payload: bytes, raw: bytes
) -> None:
    if siege.sent % FRAMES_PER_NAME == 0:
        siege.mallory().join()
        siege.listener = siege.peer.dial(zmq.XSUB, 2)
    siege.sent += 1
    peer = siege.peer
    peer.control.send_multipart(control)
    header = peer.header(payload, **fields)
    peer.uplink.send_multipart([b"u/00", header if siege.sent % 4 else raw, payload])
    siege.listener.send(raw)
    assert siege.broker.exit_code is None
    if siege.sent == FRAMES_PER_NAME:
        siege.bytes_most = siege.rss_bytes + GROWTH_BYTES_MAX
