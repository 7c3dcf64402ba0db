"""Payloads of every codec: nothing is read, written or claimed beyond what the bounds say.

The payload lies before a page that nobody may touch, so that a read behind its end is noticed.

An input is the number of a codec, 2 bytes for the elements, 1 for the spans, and the payload. From
number 8 on the rest is the content of a valid zstd frame, so that codes and scales are reached.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import zstandard
from fuzz.guarded import Guarded
from fuzz.target import Target
from hypothesis import strategies as st

from narrows.proto.codec import blosc2_chunk, buffers, codec, codec_names, codecs, piece_scales
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.kernels import F32, I64
from narrows.proto.codec.quantised import QuantisedCodec
from narrows.proto.errors import RemoteProtocolError

GOLDEN = Path(__file__).parents[2] / "golden/codecs.json"
ELEMENTS_MAX = 20_000
SPANS_MAX = 5
HEAD_BYTES = 4
check_header = blosc2_chunk._check_header
decompress = blosc2_chunk._decompress
SOURCE, RESULT = Guarded(1 << 17), Guarded(1 << 17)
COMPRESSED = 8


@lru_cache
def bounds_of(count: int, spans: int) -> I64:
    """Bounds of so many spans of nearly equal length."""
    return np.linspace(0, count, min(spans, count) + 1).astype(np.int64)


def input_of(name: str, count: int, spans: int, payload: bytes) -> bytes:
    """The inverse of `run`'s reading."""
    number, elements = codec_names().index(name), (count - 1).to_bytes(2, "little")
    return bytes([number]) + elements + bytes([spans - 1]) + payload


def run(data: bytes) -> None:
    if len(data) < HEAD_BYTES:
        return
    names = codec_names()
    name, rest = names[data[0] % COMPRESSED % len(names)], data[HEAD_BYTES:]
    count = int.from_bytes(data[1:3], "little") % ELEMENTS_MAX + 1
    bounds = bounds_of(count, data[3] % SPANS_MAX + 1)
    if data[0] >= COMPRESSED and name.endswith("-zstd"):
        head = 2 * (bounds.size - 1)
        size = count if name.startswith("int8") else (count + 1) // 2
        content = (rest[head:] * (size // max(len(rest) - head, 1) + 1))[:size].ljust(size, b"\0")
        rest = rest[:head].ljust(head, b"\0") + zstandard.compress(content, 1)
    decoded(name, rest, bounds)


def decoded(name: str, payload: bytes, bounds: I64) -> None:
    """Decodes twice, with other old memory each time, and encodes again."""
    scheme, count = codec(name), int(bounds[-1])
    if scheme.name == "f32-blosc2":
        unpacked(payload, count)
    try:
        poison(0x55)
        chunk = scheme.decode(SOURCE.holding(payload), bounds)
    except RemoteProtocolError:
        return
    assert chunk.count == count and chunk.codes.nbytes <= 4 * count
    values = values_of(chunk)
    assert bool(np.isfinite(values).all()) and bool(np.isfinite(chunk.square_sums()).all())
    poison(0xAA)
    assert values_of(scheme.decode(payload, bounds)).tobytes() == values.tobytes()
    assert values_of(scheme.decode(again(chunk, values), bounds)).tobytes() == values.tobytes()


def unpacked(chunk: bytes, count: int) -> None:
    """The library alone, between two such pages: our own decoder gives it a copy."""
    try:
        check_header(memoryview(chunk), blosc2_chunk.ITEM_BYTES * count)
    except RemoteProtocolError:
        return
    values = np.frombuffer(RESULT.end(4 * count), np.float32)
    with suppress(RuntimeError, ValueError):
        decompress(SOURCE.holding(chunk), dst=values, nthreads=1)


def again(chunk: DecodedChunk, values: F32) -> bytes:
    """The payload that our own encoder makes of a decoded chunk."""
    scheme = codec(chunk.codec)
    if isinstance(scheme, QuantisedCodec):
        return scheme.payload(chunk.whole_codes(), chunk.scales)
    return scheme.encode(values, chunk.bounds, chunk.scales, np.empty_like(values))


def values_of(chunk: DecodedChunk) -> F32:
    values = np.full(chunk.count, np.nan, np.float32)
    chunk.values(values)
    return values


def poison(byte: int) -> None:
    """Fills the idle memory of the pool: what a decoder leaves unwritten shows."""
    for waiting in list(buffers._idle.values()):
        for memory in waiting:
            memory[:] = byte


def seeds() -> list[bytes]:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert stored
    found: list[bytes] = []
    for name in codec_names():
        for count, spans, wide in ((1, 1, 1.0), (7, 2, 1.0), (600, 3, 0.0), (3000, 1, 30.0)):
            found.append(encoded(name, count, spans, wide, 1))
        if codec(name).quantised:
            head = bytearray(encoded(name, 9, 2, 1.0, 1)[:HEAD_BYTES])
            head[0] += COMPRESSED
            found.append(bytes(head) + bytes.fromhex("003f803e 01ff7f 81"))
    return found


def encoded(name: str, count: int, spans: int, wide: float, seed: int) -> bytes:
    """An input whose payload our own encoder makes."""
    bounds = bounds_of(count, spans)
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    values *= np.float32(wide)
    scales = piece_scales(values, bounds, 0.5)
    payload = codec(name).encode(values, bounds, scales, np.empty_like(values))
    return input_of(name, count, spans, payload)


def mutate(data: bytes, random: Random) -> bytes:
    """A payload of our own encoder with a few other bytes: the libraries in C guide no fuzzer."""
    name, count = random.choice(codec_names()), random.choice((1, 9, 300, 2500))
    wide = random.choice((0.0, 1e-30, 1.0, 1e20))
    made = encoded(name, count, random.randint(1, SPANS_MAX), wide, random.randrange(50))
    for _ in range(random.randrange(4)):
        at, removed = random.randint(HEAD_BYTES, len(made)), random.randrange(3)
        made = made[:at] + random.randbytes(random.randrange(3)) + made[at + removed :]
    return made


EXAMPLES = st.builds(
    encoded, st.sampled_from(codec_names()), st.integers(1, 700), st.integers(1, SPANS_MAX),
    st.sampled_from((0.0, 1e-30, 1.0, 1e20)), st.integers(0, 99),
)  # fmt: skip

codecs.warm_up()
TARGET = Target("payloads", run, seeds, EXAMPLES, mutate, bytes_max=16384)
