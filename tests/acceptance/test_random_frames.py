"""A key holder sends random frames at all three ports: nothing breaks, memory stays flat.

The gate runs five seconds of it; NARROWS_FRAMES_MINUTES=10 and `-m slow` run the long proof.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any, Final

import psutil
import pytest
import zmq
from acceptance.keyring import Keyring
from acceptance.kit import Child, Site, wait_until
from acceptance.raw import ENVELOPE, Curve, Peer, fingerprint_of, packed
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

KEYS: Final = 700
"""Keys of mallory's; the broker keeps one out that has sent a hundred refused messages."""
FRAMES_PER_KEY: Final = 40
"""Examples before the next key; each sends at most two messages that are refused."""
GROWTH_BYTES_MAX: Final = 96 << 20

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=40)
    | st.binary(max_size=40) | st.sampled_from(["good", "mallory", "decoupled", "f32-blosc2"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
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
    """An honest message with one field changed, or frames of any kind."""
    message = dict(draw(st.sampled_from(HONEST)))
    key = draw(st.sampled_from([*message, "more"]))
    changed = [ENVELOPE, packed(**message | {key: draw(values.filter(_packs))})]
    cut = [ENVELOPE, changed[1][: draw(st.integers(0, len(changed[1])))]]
    any_frames = st.lists(st.binary(max_size=200), min_size=1, max_size=4)
    return draw(st.sampled_from([changed, cut]) | any_frames)


def _packs(value: Any) -> bool:
    try:
        packed(x=value)
    except (ValueError, OverflowError):
        return False
    return True


headers = st.fixed_dictionaries(
    {},
    optional={
        "epoch": values.filter(_packs), "kind": st.integers(-1, 6), "fragment": st.integers(0, 3),
        "version": numbers, "push_id": numbers, "chunk": st.integers(0, 3) | numbers,
        "codec": st.sampled_from(["int4-zstd", "int8-zstd", "f32-blosc2", "x"]),
        "payload_digest": numbers, "learner": values.filter(_packs),
        "contributors": values.filter(_packs),
    },
)  # fmt: skip
payloads = st.binary(max_size=3000)
commands = st.sampled_from([b"\0p/00", b"\1p/01", b"\0", b"\2", b"p/00", b""]) | st.binary(
    max_size=200
).filter(lambda text: text[:1] != b"\1")
"""Frames that a listener may send; it asks for no topic that would have all connections cut."""


class Mallory:
    """Sends what hypothesis draws, each forty examples under another key of his."""

    def __init__(self, site: Site, fingerprint: str, curves: Iterator[tuple[str, Curve]]) -> None:
        self._site, self._fingerprint, self._curves = site, fingerprint, curves
        self._peer: Peer | None = None
        self.sent = 0

    def send(
        self, control: list[bytes], fields: dict[str, Any], payload: bytes, raw: bytes
    ) -> None:
        if self.sent % FRAMES_PER_KEY == 0:
            self.close()
            name, curve = next(self._curves)
            self._peer = Peer(self._site.address, name, self._fingerprint, curve)
            self._peer.join()
            self._listener = self._peer.dial(zmq.XSUB, 2)
            self._listener.setsockopt(zmq.SNDTIMEO, 1000)
        self.sent += 1
        peer = self._peer
        assert peer is not None
        peer.control.send_multipart(control)
        peer.push_id += 1
        header = peer.header(payload, **fields)
        peer.uplink.send_multipart([b"u/00", header if self.sent % 4 else raw, payload])
        self._listener.send(raw)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.__exit__()


@pytest.mark.parametrize(
    "minutes",
    [
        5 / 60,
        pytest.param(
            float(os.environ.get("NARROWS_FRAMES_MINUTES", "10")),
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_random_frames_of_a_key_holder_harm_nobody(site: Site, minutes: float) -> None:
    ring = Keyring(site)
    key = ring.admit("good")
    pairs = {f"mallory-{number}": zmq.curve_keypair() for number in range(KEYS)}
    lines = [f'"{name}" = "{public.decode()}"\n' for name, (public, _) in pairs.items()]
    with (site.folder / ring.name / "allow.toml").open("a") as file:
        file.writelines(lines)
    broker = site.broker(keys=ring.name, seeder="good", fragments=1)
    learner = site.learner("good", key=str(site.folder / key))
    wait_until(lambda: len(site.merged()) >= 2, "merges", broker, learner)
    curves = cycle(
        (name, Curve(ring.server, public.decode(), secret.decode()))
        for name, (public, secret) in pairs.items()
    )
    mallory = Mallory(site, fingerprint_of(site.layout()), curves)
    memory = psutil.Process(broker.pid)
    end, number, bytes_before = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < end:
        number += 1
        _examples(mallory, number)
        _alive(broker, learner)
        bytes_before = bytes_before or memory.memory_info().rss
    mallory.close()
    made = len(site.merged())
    wait_until(lambda: len(site.merged()) >= made + 4, "more merges", broker, learner)
    assert memory.memory_info().rss < bytes_before + GROWTH_BYTES_MAX
    print(f"{mallory.sent} examples; {(memory.memory_info().rss - bytes_before) >> 20} MiB more")
    site.check_equal_copies("good")
    assert "Traceback" not in broker.log


def _alive(*children: Child) -> None:
    for child in children:
        assert child.exit_code is None, child.tail()


def _examples(mallory: Mallory, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=100, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(controls(), headers, payloads, commands)
    def send(control: list[bytes], fields: dict[str, Any], payload: bytes, raw: bytes) -> None:
        mallory.send(control, {k: v for k, v in fields.items() if _packs(v)}, payload, raw)

    send()
