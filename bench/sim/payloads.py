"""Data of the simulator: it names what it stands for, and is as long as a codec would make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import xxhash

from narrows.proto.codec import EncodedChunk, codecs_of
from narrows.proto.flow import chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.frames import digest
from narrows.proto.messages import RunSettings

BITS_PER_ELEMENT: Final[Mapping[str, float]] = {
    "raw32": 32.0,
    "f32-blosc2": 28.0,
    "bf16": 16.0,
    "int8-zstd": 5.0,
    "int4-zstd": 3.0,
}
"""About what real parameters and outer gradients take at the default step."""


class Content(NamedTuple):
    """The transfer that a payload stands for."""

    source: str
    """Incarnation of a founder; name and push of a contributor; "" from the broker."""
    base: int
    """Digest of the published copy that it builds on, 0: none."""
    result: int
    """Digest of the published copy that it makes, 0 for a push."""


_decoder = msgspec.msgpack.Decoder(Content)
_LENGTH_BYTES: Final = 2


def digest_of(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(parts).encode())


def codec_for(setting: str) -> str:
    """The codec that the simulator takes for a setting of the configuration."""
    return min(codecs_of(setting))


def encode_content(
    content: Content, part: Fragment, settings: RunSettings, codec: str
) -> tuple[EncodedChunk, ...]:
    """The chunks of a whole transfer."""
    said = msgspec.msgpack.encode(content)
    said = len(said).to_bytes(_LENGTH_BYTES, "little") + said
    chunks: list[EncodedChunk] = []
    for offset, count in part.chunks(chunk_elements(settings, codec)):
        payload = said.ljust(int(count * BITS_PER_ELEMENT[codec] / 8), b"\0")
        chunks.append(EncodedChunk(offset, count, payload, digest(payload)))
    return tuple(chunks)


def decode_content(payload: memoryview) -> Content:
    """The transfer that a payload stands for."""
    length = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return _decoder.decode(payload[_LENGTH_BYTES : _LENGTH_BYTES + length])
