"""A file of the journal, read through a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from narrows.broker.storage.disk import Files

BLOCK_BYTES: Final = 1 << 20
"""Bytes that a scan reads at once."""

_ZEROS: Final = bytes(BLOCK_BYTES)


class FileWindow:
    """A file through a buffer. It ends where the file ended when the window was made.

    A journal can be larger than memory, so no file is read whole.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.name = name
        self.size_bytes = files.size_bytes(name)
        self._files = files
        self._buffer = bytearray(min(BLOCK_BYTES, self.size_bytes))
        self._start = self._stop = 0

    def at(self, offset: int, count: int) -> memoryview:
        """Up to BLOCK_BYTES from `offset`, valid until the next call."""
        self._fill(offset, count)
        start = offset - self._start
        return memoryview(self._buffer)[start : min(start + count, self._stop - self._start)]

    def find(self, text: bytes, offset: int) -> int:
        """Where `text` begins, at `offset` or later; -1: nowhere."""
        while offset + len(text) <= self.size_bytes:
            self._fill(offset, len(text))
            stop = self._stop - self._start
            place = self._buffer.find(text, offset - self._start, stop)
            if place >= 0:
                return self._start + place
            offset = self._stop - len(text) + 1
        return -1

    def _fill(self, offset: int, count: int) -> None:
        if self._start <= offset and min(offset + count, self.size_bytes) <= self._stop:
            return
        self._start, self._stop = offset, min(offset + BLOCK_BYTES, self.size_bytes)
        target = memoryview(self._buffer)[: self._stop - offset]
        self._files.read(self.name, offset, target)

    def pieces(self, offset: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `offset` to `stop`, in blocks."""
        for start in range(offset, min(stop, self.size_bytes), BLOCK_BYTES):
            yield self.at(start, min(BLOCK_BYTES, stop - start))

    def ends_with_zeros(self, offset: int) -> bool:
        """True if the file has only zeros from `offset` on."""
        pieces = self.pieces(offset, self.size_bytes)
        return all(bytes(piece) == _ZEROS[: len(piece)] for piece in pieces)
