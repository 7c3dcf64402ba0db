"""One zstd frame of known content size: written, and read back without trusting its header.

The library allocates what a frame declares, whatever limit its caller gives: 13 bytes can ask
for exabytes. So the header is read and compared before anything is decompressed.
"""

from __future__ import annotations

from typing import Final

import zstandard

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.kernels import U8

WINDOW_BYTES_MAX: Final = 8 << 20
"""Largest window that is accepted; our own frames need no more than their content."""

MAGIC: Final = b"\x28\xb5\x2f\xfd"

LEVEL: Final = 1
"""Higher levels gain nothing on codes; levels below 0 leave the entropy coder out."""

# Idle contexts. One serves one thread at a time, and making one costs as much as compressing ten
# thousand codes; pop and append of a list are atomic, so threads share them without a lock.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(content: U8) -> bytes:
    """One frame of `content` (n,), at most `frame_bytes_max(n)` bytes."""
    try:
        compressor = _compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=LEVEL)
    frame = compressor.compress(content.data)
    _compressors.append(compressor)
    return frame


def decompress(frame: memoryview, size_bytes: int) -> bytes:
    """The content of `frame`, exactly `size_bytes` > 0 bytes.

    Raises RemoteProtocolError BAD_PAYLOAD unless `frame` is one whole frame that declares this
    size, a window up to WINDOW_BYTES_MAX and no dictionary, with nothing after it.
    """
    try:
        _check_header(frame, size_bytes)
        content = _decompress(frame)
    except zstandard.ZstdError as error:
        raise _bad("one whole frame", str(error)) from error
    if len(content) != size_bytes:
        raise _bad(f"{size_bytes} bytes", str(len(content)))
    return content


def frame_bytes_max(size_bytes: int) -> int:
    """Largest frame of `size_bytes` bytes: ZSTD_compressBound of zstd.h."""
    margin = ((128 << 10) - size_bytes) >> 11 if size_bytes < 128 << 10 else 0
    return size_bytes + (size_bytes >> 8) + margin


def _check_header(frame: memoryview, size_bytes: int) -> None:
    # A skippable frame declares a content size as well; only its magic number tells.
    if bytes(frame[:4]) != MAGIC:
        raise _bad(MAGIC.hex(), bytes(frame[:4]).hex())
    head = zstandard.get_frame_parameters(frame)
    if head.content_size != size_bytes or head.window_size > WINDOW_BYTES_MAX or head.dict_id != 0:
        raise _bad(
            f"{size_bytes} bytes, window up to {WINDOW_BYTES_MAX}, no dictionary",
            f"{head.content_size} bytes, window {head.window_size}, dictionary {head.dict_id}",
        )


def _decompress(frame: memoryview) -> bytes:
    try:
        decompressor = _decompressors.pop()
    except IndexError:
        decompressor = zstandard.ZstdDecompressor()
    content = decompressor.decompress(frame, allow_extra_data=False)
    # Only after success: a context that met a damaged frame is dropped.
    _decompressors.append(decompressor)
    return content


def _bad(expected: str, got: str) -> RemoteProtocolError:
    return RemoteProtocolError(ErrorCode.BAD_PAYLOAD, "zstd frame", expected=expected, got=got)
