"""One zstd frame of known content size: written, and read back without trusting its header.

The library allocates the size that a frame declares, whatever limit its caller gives: 13 bytes can
ask for exabytes. So the header is read and compared before anything is decompressed.
"""

from __future__ import annotations

from typing import Final

import zstandard

from narrows.proto.codec.buffers import empty_u8
from narrows.proto.codec.kernels import U8
from narrows.proto.errors import ErrorCode, RemoteProtocolError

WINDOW_BYTES_MAX: Final = 8 << 20
"""Largest window that is accepted; our own frames need no more than their content."""

MAGIC: Final = b"\x28\xb5\x2f\xfd"

BLOCK_HEAD_BYTES: Final = 3
RLE_BLOCK: Final = 1
CHECKSUM_FLAG: Final = 4
CHECKSUM_BYTES: Final = 4
"""Numbers of the frame format (RFC 8878)."""

BLOCK_CONTENT_BYTES_MIN: Final = 1024
"""Smallest mean content of a block. No encoder makes smaller ones, and a walk over many empty
blocks would take long."""

LEVEL: Final = 1
"""Higher levels gain nothing on codes; levels below 0 leave the entropy coder out."""

# Idle contexts. One serves one thread at a time, and making one costs as much as compressing ten
# thousand codes; pop and append of a list are atomic, so threads share them without a lock.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(content: U8) -> bytes:
    """One frame of `content` (n,), at most `frame_bytes_max(n)` bytes."""
    assert content.size > 0, "an empty chunk has an empty payload"
    try:
        compressor = _compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=LEVEL)
    frame = compressor.compress(content.data)
    _compressors.append(compressor)
    assert len(frame) <= frame_bytes_max(content.size), f"{len(frame)} of {content.size} bytes"
    return frame


def decompress(frame: memoryview, size_bytes: int) -> U8:
    """The content of `frame`, (size_bytes,) with size_bytes > 0, in memory from the pool.

    Raises RemoteProtocolError BAD_PAYLOAD unless `frame` is one whole frame that declares this
    size, a window up to WINDOW_BYTES_MAX and no dictionary, with nothing after it.
    """
    assert size_bytes > 0, "an empty chunk has an empty payload"
    try:
        _check_header(frame, size_bytes)
        _check_end(frame, size_bytes)
        return _decompress(frame, size_bytes)
    except zstandard.ZstdError as error:
        raise _bad("one whole frame", str(error)) from error


def frame_bytes_max(size_bytes: int) -> int:
    """Largest frame of `size_bytes` bytes: ZSTD_compressBound of zstd.h."""
    assert size_bytes >= 0, size_bytes
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


def _check_end(frame: memoryview, size_bytes: int) -> None:
    """Walks over the blocks (RFC 8878, 3.1.1): nothing may follow the last one."""
    place = zstandard.frame_header_size(frame)
    checksum_bytes = CHECKSUM_BYTES if frame[4] & CHECKSUM_FLAG else 0
    is_last = False
    blocks_left = 4 + size_bytes // BLOCK_CONTENT_BYTES_MIN
    while not is_last:
        blocks_left -= 1
        if blocks_left < 0:
            raise _bad("blocks of a useful size", "more of them than content")
        head = int.from_bytes(frame[place : place + BLOCK_HEAD_BYTES], "little")
        is_last = bool(head & 1)
        place += BLOCK_HEAD_BYTES + (1 if (head >> 1) & 3 == RLE_BLOCK else head >> 3)
        if place + checksum_bytes > len(frame):
            raise _bad("one whole frame", "a frame that is cut")
    if place + checksum_bytes != len(frame):
        raise _bad("one frame", f"{len(frame) - place - checksum_bytes} bytes after it")


def _decompress(frame: memoryview, size_bytes: int) -> U8:
    try:
        decompressor = _decompressors.pop()
    except IndexError:
        decompressor = zstandard.ZstdDecompressor()
    content = empty_u8(size_bytes)
    # Not `decompress`: it returns bytes, which are new memory of the system each time.
    with decompressor.stream_reader(frame) as reader:
        got_bytes = reader.readinto(content.data)
    if got_bytes != size_bytes:
        raise _bad(f"{size_bytes} bytes", str(got_bytes))
    # Only after success: a context that has met a damaged frame is not used again.
    _decompressors.append(decompressor)
    return content


def _bad(expected: str, got: str) -> RemoteProtocolError:
    return RemoteProtocolError(ErrorCode.BAD_PAYLOAD, "zstd frame", expected=expected, got=got)
