"""One Blosc2 chunk of float32 values, bytes shuffled, coded by zstd: written, and read back
without trusting its header.

A hostile header can ask for any amount of memory, name filters and codecs that are loaded as
plugins, and leave content unwritten, so that old memory shows. Therefore the whole header must be
as `compress` writes it (Blosc2 chunk format 5, little-endian). Only the coded bytes behind it are
left to the library:

| bytes | content |
|---|---|
| 0, 1 | 5, 1: the formats of chunk and codec |
| 2 | flags: one of FLAGS (coded or stored, blocks split or not) |
| 3 | 4: bytes per item |
| 4:8 | bytes of the content |
| 8:12 | bytes of a block, at least 1 |
| 12:16 | bytes of the chunk, this header included |
| 16:31 | TAIL: shuffle, then zstd |
| 31 | 0, or 0x10: all zeros, and nothing follows the header |
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, cast

import blosc2

from narrows.proto.codec.buffers import empty_f32
from narrows.proto.codec.kernels import F32
from narrows.proto.errors import ErrorCode, RemoteProtocolError

HEADER_BYTES: Final = 32
FORMATS: Final = (5, 1)
FLAGS: Final = frozenset((0x07, 0x85, 0x87, 0x95, 0x97))
ITEM_BYTES: Final = 4
TAIL: Final = b"\1\0\0\0\0\0\5" + bytes(8)
ZEROS: Final = 0x10

LEVEL: Final = 1
"""Compression level. It leaves 84% of the bytes of parameters; higher ones are slower and gain
nothing."""

_HEADER: Final = struct.Struct("<4B3I15sB")

# The library annotates every keyword as a dictionary.
_compress = cast(Callable[..., bytes], blosc2.compress2)
_decompress = cast(Callable[..., Any], blosc2.decompress2)


def compress(values: F32) -> bytes:
    """The chunk of `values` (n,), n > 0, at most 4 n + HEADER_BYTES bytes."""
    assert values.size > 0, "an empty chunk has an empty payload"
    chunk = _compress(
        values,
        codec=blosc2.Codec.ZSTD,
        clevel=LEVEL,
        filters=[blosc2.Filter.SHUFFLE],
        typesize=ITEM_BYTES,
        nthreads=1,
    )
    assert len(chunk) <= ITEM_BYTES * values.size + HEADER_BYTES, f"{len(chunk)} bytes"
    return chunk


def decompress(chunk: memoryview, count: int) -> F32:
    """The values (count,), count > 0, in memory from the pool.

    Raises RemoteProtocolError BAD_PAYLOAD unless `chunk` is one that `compress` can have made.
    """
    assert count > 0, "an empty chunk has an empty payload"
    _check_header(chunk, ITEM_BYTES * count)
    values = empty_f32(count)
    try:
        # A copy: the library needs aligned bytes.
        _decompress(bytes(chunk), dst=values, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise _bad("content that decodes", str(error)) from error
    return values


def _check_header(chunk: memoryview, content_bytes: int) -> None:
    if chunk.nbytes < HEADER_BYTES:
        raise _bad(f"at least {HEADER_BYTES} bytes", str(chunk.nbytes))
    *formats, flags, item_bytes, content, block, size, tail, special = _HEADER.unpack_from(chunk)
    if (
        tuple(formats) != FORMATS
        or flags not in FLAGS
        or item_bytes != ITEM_BYTES
        or content != content_bytes
        or not 0 < block <= content_bytes
        or size != chunk.nbytes
        or tail != TAIL
        or special not in (0, ZEROS)
        or (special == ZEROS) != (size == HEADER_BYTES)
    ):
        expected = f"a chunk of {content_bytes} bytes of shuffled float32, coded by zstd"
        raise _bad(expected, bytes(chunk[:HEADER_BYTES]).hex())


def _bad(expected: str, got: str) -> RemoteProtocolError:
    return RemoteProtocolError(ErrorCode.BAD_PAYLOAD, "Blosc2 chunk", expected=expected, got=got)
